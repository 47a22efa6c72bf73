"""Steps of a timeline alone, and its times and shares as people read them."""

from __future__ import annotations

import pytest

from pipegrad.simulation.explain.breakdown import break_down
from pipegrad.simulation.explain.lookup import Lookup
from pipegrad.simulation.timeline import MemoryPoint, Span, Timeline, in_percent, in_time

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
