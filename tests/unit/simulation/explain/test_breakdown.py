"""The parts of each rank sum to its step, whatever the spans are like, and gaps have names."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from pipegrad.simulation.explain.critical_path import PARTS, Breakdown, break_down, typical_step
from pipegrad.simulation.explain.lookup import Lookup
from pipegrad.simulation.timeline import MemoryPoint, Span, Timeline, in_percent, in_time
from tests.unit.simulation.explain.test_critical_path import TWO_RANKS


def broken_down(*spans: Span, ends: tuple[float, ...], step: int = 0) -> Breakdown:
    timeline = Timeline("hand-made", "measured", 1, (0,), 1, spans, ends)
    return break_down(Lookup(timeline), step)


def parts(breakdown: Breakdown, rank: int = 0) -> dict[str, float]:
    return {part: seconds for part, seconds in breakdown.ranks[rank].parts.items() if seconds}


def test_the_parts_of_two_ranks_as_rows_and_as_json() -> None:
    breakdown = break_down(Lookup(TWO_RANKS), 0)
    both = {"F": 10, "B": 20, "optimizer": 5}
    assert parts(breakdown) == both | {"wait for receive": 38, "wait for reduction": 2}
    assert parts(breakdown, 1) == both | {"wait for receive": 14, "wait for ranks": 26}
    assert [own.computing for own in breakdown.ranks] == pytest.approx([30 / 75, 30 / 75])
    assert breakdown.columns() == [
        *("rank", "forward", "backward", "waits to receive", "for reductions", "for all ranks"),
        "optimizer",
    ]
    assert list(breakdown.rows())[1:] == [["1", "13 %", "27 %", "19 %", "0.0 %", "35 %", "6.7 %"]]
    data = json.loads(json.dumps(asdict(breakdown)))
    assert (data["seconds"], data["ranks"][0]["parts"]["F"]) == (75, 10)


def test_what_no_span_covers_is_other() -> None:
    own = broken_down(Span(0, "F", 1, 3), Span(0, "B", 5, 6), ends=(10.0,)).ranks[0]
    assert own.parts["other"] == 7


def test_time_that_two_spans_claim_counts_once() -> None:
    breakdown = broken_down(
        Span(0, "F", 0, 4),
        Span(0, "B", 3, 8),
        Span(0, "B", 4, 5),
        Span(0, "W", 8, 10),
        ends=(10.0,),
    )
    assert parts(breakdown) == {"F": 4, "B": 4, "W": 2}


def test_a_span_belongs_to_the_steps_that_it_is_in() -> None:
    spans = (Span(0, "F", -1, 2), Span(0, "B", 3, 7), Span(0, "F", 7, 20, 1))
    first = broken_down(*spans, ends=(5.0, 10.0))
    assert parts(first) == {"F": 2, "B": 2, "other": 1}
    assert parts(broken_down(*spans, ends=(5.0, 10.0), step=1)) == {"B": 2, "F": 3}


def test_nothing_recorded_in_a_step_or_of_no_time() -> None:
    own = broken_down(ends=(2.0,)).ranks[0]
    assert own.parts == {**dict.fromkeys(PARTS, 0.0), "other": 2}
    assert own.computing == 0
    breakdown = broken_down(ends=(0.0,))
    assert breakdown.ranks[0].computing == 1
    assert list(breakdown.rows()) == [["0"]]


def test_the_typical_step_has_the_median_time() -> None:
    timeline = Timeline("steps", "measured", 1, (0,), 1, (), (9.0, 11.0, 14.0, 20.0))
    assert typical_step(timeline) == 2
    assert typical_step(Timeline("none", "measured", 1, (0,), 1, (), ())) == 0


TWO_STEPS = Timeline(
    "two steps",
    "measured",
    1,
    (0,),
    1,
    (Span(0, "F", 0, 4), Span(0, "F", 5, 9, 1)),
    (5.0, 12.0),
    ((MemoryPoint(0.0, 10), MemoryPoint(4.0, 30), MemoryPoint(8.0, 20)),),
)


def test_a_step_behind_the_first_takes_from_its_begin_to_its_end() -> None:
    assert break_down(Lookup(TWO_STEPS), 1).seconds == 7.0


def test_a_step_alone_begins_with_the_memory_that_is_held_then() -> None:
    assert TWO_STEPS.of_step(1).memory == ((MemoryPoint(0.0, 30), MemoryPoint(3.0, 20)),)
    assert TWO_STEPS.of_step(0).memory[0][0] == MemoryPoint(0.0, 10)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.00 us"),
        (0.00123, "1.23 ms"),
        (0.0123, "12.3 ms"),
        (7200, "7200 s"),
        (0.0009999999, "1.00 ms"),
        (1e9, "1.00e+09 s"),
        (-0.01, "-10.0 ms"),
    ],
)
def test_times(seconds: float, text: str) -> None:
    assert in_time(seconds) == text


def test_shares() -> None:
    shares = [0, 0.004, 0.0994, 0.0996, 0.5, 1]
    assert list(map(in_percent, shares)) == ["0.0 %", "0.4 %", "9.9 %", "10 %", "50 %", "100 %"]
