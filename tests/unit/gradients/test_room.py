"""How long a backward waits for the memory of buckets that are on their way."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from pipegrad.gradients import reducer
from pipegrad.gradients.reducer import Room


class Clock:
    """A clock that only waits move on."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Ticket:
    """A reduction that ends at a time."""

    def __init__(self, clock: Clock, ends: float) -> None:
        self.clock, self.ends = clock, ends

    def is_done(self, timeout_seconds: float = 0.0) -> bool:
        self.clock.now = max(self.clock.now, min(self.ends, self.clock.now + timeout_seconds))
        return self.clock.now >= self.ends


def waits(takes_seconds: list[float], *, is_patient: bool = True) -> list[float]:
    """Returns how long each step waits whose two reductions take so long."""
    clock, found = Clock(), list[float]()
    buffers: list[Any] = [mock.Mock(is_taken=True), mock.Mock(is_taken=True)]
    with mock.patch.object(reducer, "time", clock):
        made = Room(is_patient=is_patient)
        for seconds in takes_seconds:
            made.begin()
            begin = clock.now
            for buffer in buffers:
                ticket: Any = Ticket(clock, begin + seconds)
                made.launched(buffer, ticket)
            made.make()
            found.append(clock.now - begin)
            made.free()
    return found


def test_a_backward_waits_until_a_reduction_has_ended() -> None:
    assert waits([0.25, 0.5]) == pytest.approx([0.25, 0.5])


def test_waits_in_vain_become_shorter_and_those_in_time_longer_again() -> None:
    """A reduction that needs what this backward computes later never ends in time."""
    assert waits([9.0] * 4) == pytest.approx([1.0, 0.5, 0.25, 0.125], rel=1e-3)
    assert waits([9.0] * 12)[-1] == pytest.approx(1e-3, rel=0.1)
    assert waits([9.0, 9.0, 0.1, 9.0, 0.1]) == pytest.approx([1.0, 0.5, 0.1, 0.5, 0.1], rel=1e-3)


def test_a_stage_that_others_wait_for_does_not_wait() -> None:
    assert waits([9.0, 9.0], is_patient=False) == [0.0, 0.0]
