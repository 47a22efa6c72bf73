"""What a picture refuses, its tracks and colours, and its sentences."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pipegrad.errors import ScheduleError
from pipegrad.picture import write_figure, write_html
from pipegrad.picture.drawable import PALETTE, Track, sentences, titles, tracks
from pipegrad.simulation.explain.critical_path import critical_path
from pipegrad.simulation.explain.lookup import Lookup
from pipegrad.simulation.timeline import KINDS, WAITS, MemoryPoint, Span, Timeline
from tests.support.picture.timelines import SMALL, SPANS, simulated


def changed(**values: Any) -> tuple[Span, ...]:
    return (SPANS[0]._replace(**values), *SPANS[1:])


@pytest.mark.parametrize("write", [write_html, write_figure])
@pytest.mark.parametrize(
    ("timelines", "words"),
    [
        ([], r"a list of one or two timelines, found \[\]"),
        (SMALL, "a list of one or two"),
        (["a"], "a list of one or two"),
        ([replace(SMALL, spans=())], "has no spans"),
        ([replace(SMALL, spans=changed(rank=2))], "spans.0: expected ranks of 2"),
        ([replace(SMALL, spans=changed(kind="nap"))], "spans.0: expected one of .* found 'nap'"),
        ([replace(SMALL, spans=changed(end=float("nan")))], "spans.0: expected a begin"),
        ([replace(SMALL, spans=changed(begin=1.0))], "spans.0: expected a begin"),
        ([replace(SMALL, spans=changed(begin="now"))], "cannot be drawn"),
        ([replace(SMALL, spans=changed(begin=-1.0))], "begins before the timeline does"),
        ([replace(SMALL, spans=changed(stage=0.5))], "spans.0: expected integers"),
        ([replace(SMALL, spans=changed(microbatch=2**40))], "integers of 32 bits"),
        ([replace(SMALL, spans=changed(microbatch=9))], "none of a step's"),
        ([replace(SMALL, spans=changed(label=None))], "spans.0: expected a text"),
        ([replace(SMALL, num_ranks=3)], "num_ranks: 3, expected a stage on each rank"),
        ([replace(SMALL, memory=(SMALL.memory[0], (MemoryPoint(0.0, -1),)))], "each at least 0"),
        ([replace(SMALL, step_ends=(2.0, 1.0))], "seconds that ascend"),
        ([replace(SMALL, memory=SMALL.memory[:1])], "memory: expected points of 2 ranks"),
        ([SMALL, replace(SMALL, time_unit="units")], "one timeline is in seconds, the other in un"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_one_line(
    write: Any, timelines: Any, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "picture.svg"
    with pytest.raises(ScheduleError, match=words) as error:
        write(timelines, path)
    assert "\n" not in str(error.value)
    assert not path.exists()


def test_a_picture_says_how_long_each_step_takes_and_how_much_of_it_ranks_compute() -> None:
    said = ["by hand (predicted): 16.0 ms; ranks compute in 44 % of the time."]  # 14 of 2 x 16 ms
    assert sentences([SMALL]) == [said, said]
    measured = replace(SMALL, source="measured", step_ends=(0.020,))
    other = "by hand (measured): 20.0 ms; ranks compute in 35 % of the time."
    assert sentences([SMALL, measured])[0] == [*said, other]
    first = replace(SMALL, name="a", step_ends=(0.010, 0.020))
    assert [about[0].partition(";")[0] for about in sentences([first])] == [
        "a (predicted): 20.0 ms for 2 steps (10.0 ms each)",
        "a (predicted): 10.0 ms",
        "a (predicted): 10.0 ms",
    ]
    # A step that only one timeline has.
    assert len(sentences([simulated(steps=2), SMALL])[2]) == 1
    # Timelines of one name are numbered.
    assert titles([SMALL, SMALL]) == ["by hand (predicted)", "by hand (predicted) (2)"]
    assert titles([replace(SMALL, name="")]) == ["predicted"]


def test_times_that_nobody_knows_are_in_units() -> None:
    long = tuple(s._replace(begin=1000 * s.begin, end=1000 * s.end) for s in SPANS)
    units = replace(SMALL, spans=long, step_ends=(16.0,), memory=(), time_unit="units")
    title = "by hand (predicted, in units)"
    assert sentences([units])[0] == [f"{title}: 16 units; ranks compute in 44 % of the time."]
    path = critical_path(Lookup(units), 0)
    assert str(path).startswith(
        "of 16 units, 14 units are compute (rank 0 7 units, rank 1 7 units)"
    )
    assert Timeline.from_json(units.to_json()) == units
    assert Timeline.from_json({**SMALL.to_json(), "time_unit": "seconds"}) == SMALL
    older = {name: value for name, value in SMALL.to_json().items() if name != "time_unit"}
    assert Timeline.from_json(older) == SMALL


def test_every_kind_has_a_paint_and_no_two_look_alike() -> None:
    assert set(PALETTE) == set(KINDS)
    looks = [(paint.fill, paint.is_hatched, paint.is_mirrored) for paint in PALETTE.values()]
    assert len(set(looks)) == len(looks)
    assert {kind for kind, paint in PALETTE.items() if paint.is_hatched} == set(WAITS)


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in WAITS])
def test_text_can_be_read_on_its_colour(kind: Any) -> None:
    light, dark = sorted((luminance(PALETTE[kind].fill), luminance(PALETTE[kind].text)))[::-1]
    assert (light + 0.05) / (dark + 0.05) >= 4.5  # AA of WCAG 2.1


@pytest.mark.parametrize("kind", KINDS)
def test_a_box_can_be_seen_on_the_dark_page(kind: Any) -> None:
    css = (
        files("pipegrad.picture")
        .joinpath("page", "page.css")
        .read_text()
        .split('data-theme="dark"')[1]
    )
    back = luminance(css.split("--back: ")[1][:7])
    assert (luminance(PALETTE[kind].fill) + 0.05) / (back + 0.05) >= 3.0


def test_a_rank_has_a_track_of_its_own_and_one_of_what_runs_beside() -> None:
    assert list(tracks(SMALL)) == [
        Track(0, False, [0, 6, 7]),
        Track(0, True, [1]),
        Track(1, False, [2, 3, 4, 9, 10]),
        Track(1, True, [8]),
        Track(1, True, [5]),
    ]


@pytest.mark.parametrize(
    ("spans", "found"),
    [
        # They touch, also if numbers are rounded.
        ((Span(0, "F", 0.0, 0.1 + 0.2), Span(0, "B", 0.3, 0.4)), [[0, 1]]),
        # They overlap: all are shown.
        (
            (Span(0, "F", 0.0, 0.2), Span(0, "host", 0.1, 0.3), Span(0, "B", 0.2, 0.4)),
            [[0, 2], [1]],
        ),
        ((), [[]]),
    ],
)
def test_own_spans_of_a_rank_share_a_track_unless_they_overlap(
    spans: tuple[Span, ...], found: list[list[int]]
) -> None:
    timeline = replace(SMALL, num_ranks=1, spans=spans)
    assert [track.spans for track in tracks(timeline)] == found


def test_no_track_has_spans_that_overlap_and_none_is_lost() -> None:
    timeline = simulated("zbv")
    found = list(tracks(timeline))
    assert sorted(n for track in found for n in track.spans) == list(range(len(timeline.spans)))
    for track in found:
        own = [timeline.spans[number] for number in track.spans]
        assert {span.rank for span in own} <= {track.rank}
        assert all(a.end <= b.begin + 1e-9 for a, b in pairwise(own))
