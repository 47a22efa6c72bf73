"""write_figure: text that stays, boxes where they belong, and files that do not change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from pipegrad.errors import ScheduleError
from pipegrad.picture import figure, write_figure
from pipegrad.simulation.timeline import Span, Timeline
from tests.support.picture.timelines import SMALL, SPANS, simulated

SVG = "{http://www.w3.org/2000/svg}"
MEASURED = replace(SMALL, source="measured")


def texts(timelines: Sequence[Timeline], tmp_path: Path, **options: str) -> list[str]:
    pytest.importorskip("matplotlib")
    path = tmp_path / "figure.svg"
    write_figure(timelines, path, **options)
    root = ElementTree.fromstring(path.read_text())
    return ["".join(node.itertext()).strip() for node in root.iter(f"{SVG}text")]


def test_the_figure_has_its_text_as_text(tmp_path: Path) -> None:
    found = texts([SMALL], tmp_path, title="A step & more")
    assert {"A step & more", "rank 0", "stage 0", "rank 1", "F0", "B0", "mean"} <= set(found)
    assert "by hand (predicted): 16.0 ms; ranks compute in 44 % of the time." in found
    assert {"F forward", "wait for receive", "transfer", "gradient reduction"} <= set(found)
    assert "parameter sync" not in found  # none was made


def test_the_lines_of_a_hatch_can_be_seen(tmp_path: Path) -> None:
    """With transparent colours, a SVG had lines of the colour of what is between them."""
    texts([SMALL], tmp_path)
    root = ElementTree.fromstring((tmp_path / "figure.svg").read_text())
    patterns = list(root.iter(f"{SVG}pattern"))
    assert len(patterns) == 2  # waits for a receive and for a reduction
    for pattern in patterns:
        between, lines = pattern.find(f"{SVG}rect"), pattern.find(f"{SVG}path")
        assert between is not None
        assert lines is not None
        assert between.attrib["fill"] not in lines.attrib["style"]


def test_a_prediction_and_its_run_are_drawn_rank_by_rank(tmp_path: Path) -> None:
    found = texts([SMALL, MEASURED], tmp_path)
    pair = ("predicted", "measured")
    assert [text for text in found if text.startswith("rank")] == ["rank 0"] * 2 + ["rank 1"] * 2
    assert [text for text in found if text in pair] == [*pair] * 2
    assert "The predicted step is as long as measured." in found


def test_two_schedules_are_drawn_one_above_the_other(tmp_path: Path) -> None:
    found = texts([SMALL, simulated("zbv", ranks=2, microbatches=4)], tmp_path)
    headings = [text for text in found if text in ("by hand (predicted)", "zbv (predicted)")]
    assert headings == ["by hand (predicted)", "zbv (predicted)"]
    assert "stage 0, 3" in found


@pytest.mark.parametrize(
    "timeline",
    [
        replace(SMALL, spans=(SPANS[0]._replace(end=0.0),), step_ends=(0.0,)),
        replace(SMALL, step_ends=(), memory=()),
        replace(SMALL, num_ranks=200, stage_to_rank=tuple(range(200)), memory=()),
        replace(SMALL, name="$x^$ <&", spans=tuple(s._replace(label="$_{") for s in SPANS)),
    ],
    ids=["no time", "no step", "many ranks", "signs of formulas"],
)
def test_odd_timelines_are_drawn(timeline: Timeline, tmp_path: Path) -> None:
    assert "rank 1" in texts([timeline], tmp_path)


@pytest.mark.parametrize("suffix", ["svg", "png", "pdf"])
def test_the_same_timeline_makes_the_same_file(suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("a", "b"):
        write_figure([SMALL], tmp_path / f"{name}.{suffix}")
    first, second = (tmp_path / f"{name}.{suffix}" for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()


def test_many_boxes_become_an_image_but_text_stays(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "figure.svg"
    write_figure([simulated(ranks=8, microbatches=200)], path)
    assert path.stat().st_size < 2_000_000
    assert "rank 7" in path.read_text()


@pytest.mark.parametrize("name", ["figure", "figure.jpg", "figure.html"])
def test_another_format_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match=r"\.svg, \.png, \.pdf, found 'figure"):
        write_figure([SMALL], tmp_path / name)


def test_without_matplotlib_the_error_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def without(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr("pipegrad.picture.figure.import_module", without)
    with pytest.raises(ImportError, match=r"pip install 'pipegrad\[picture\]'"):
        write_figure([SMALL], tmp_path / "figure.png")


def test_names_of_many_ranks_are_smaller_than_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    drawn, found = figure._drawn, list[Any]()

    def kept(*arguments: Any) -> Any:
        found.append(drawn(*arguments))
        return found[0]

    monkeypatch.setattr(figure, "_drawn", kept)
    spans = tuple(Span(rank, "F", 0.0, 1.0, stage=rank, microbatch=0) for rank in range(128))
    many = Timeline("many", "predicted", 128, tuple(range(128)), 1, spans, (1.0,))
    write_figure([many], tmp_path / "figure.svg")
    [axes] = found[0].axes
    names = [text for text in axes.texts if text.get_text().startswith("rank ")]
    assert len(names) == 128
    # The axes count inches of a figure that is not shrunk yet.
    shrink = axes.get_position().height * found[0].get_figheight() / axes.get_ylim()[0]
    height = 72 * shrink * figure._HEIGHTS["rank"]
    assert min(text.get_fontsize() for text in names) >= 2.0
    assert max(text.get_fontsize() for text in names) < height < 8.0
