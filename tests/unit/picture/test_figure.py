"""write_figure: text that stays, boxes where they belong, and files that do not change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pipegrad.errors import ScheduleError
from pipegrad.picture import write_figure
from pipegrad.simulation.timeline import Timeline
from tests.support.picture.timelines import SMALL, SPANS, simulated

SVG = "{http://www.w3.org/2000/svg}"
MEASURED = replace(SMALL, source="measured")


def texts(timelines: Sequence[Timeline], tmp_path: Path, **options: str) -> list[str]:
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


def test_a_prediction_and_its_run_are_drawn_rank_by_rank(tmp_path: Path) -> None:
    found = texts([SMALL, MEASURED], tmp_path)
    pair = ("predicted", "measured")
    assert [text for text in found if text.startswith("rank")] == ["rank 0"] * 2 + ["rank 1"] * 2
    assert [text for text in found if text in pair] == [*pair] * 2
    assert "by hand (measured): 16.0 ms; ranks compute in 44 % of the time." in found


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


def test_the_same_timeline_makes_the_same_file(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_figure([SMALL], tmp_path / f"{name}.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_a_file_of_many_boxes_is_small(tmp_path: Path) -> None:
    path = tmp_path / "figure.svg"
    write_figure([simulated(ranks=8, microbatches=200)], path)
    assert path.stat().st_size < 300_000
    assert "rank 7" in path.read_text()


@pytest.mark.parametrize("name", ["figure", "figure.jpg", "figure.html"])
def test_another_format_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match=r"as \.svg, found 'figure"):
        write_figure([SMALL], tmp_path / name)
