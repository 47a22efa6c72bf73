"""What a backward waits for, and what is refused before memory is made."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from pipegrad.comm.sync_points import Done
from pipegrad.errors import ReduceError, StepError
from pipegrad.gradients import reducer, reductions
from pipegrad.gradients.reducer import Room
from pipegrad.gradients.reductions import PairSum, Rows
from pipegrad.observe.links import Wires


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


# Numbers of another rank that say how much memory a message needs.


def sending(*numbers: int) -> Any:
    """Returns a receive that takes these numbers, and is done."""

    def receive(*given: Any) -> Done:
        next(x for x in given if isinstance(x, torch.Tensor)).copy_(torch.tensor(numbers))
        return Done()

    return receive


@pytest.mark.parametrize("counts", [(5, 0), (-1, 0), (0, 2), (2**40, 0)])
def test_more_rows_than_a_buffer_has_are_refused_before_memory_is_made(
    monkeypatch: pytest.MonkeyPatch, counts: tuple[int, ...]
) -> None:
    pair = PairSum([Rows(0, 4, 2), Rows(8, 1, 1)], back=mock.Mock())
    pair.use(torch.zeros(9))
    monkeypatch.setattr(reductions, "receive", sending(*counts))
    with pytest.raises(ReduceError, match="more than there are"):
        pair._add_rows()


@pytest.mark.parametrize("number", [-1, 2**40])
def test_a_size_that_no_probe_has_is_refused(number: int) -> None:
    edges = mock.Mock(**{"host.return_value": (None, 0)})
    wires = Wires(edges, 0, torch.device("cpu"))
    with (
        mock.patch("pipegrad.comm.sync_points.in_use.receive", sending(number)),
        pytest.raises(StepError, match=f"rank 1 has sent {number}, expected a number of bytes"),
    ):
        wires.hear(1)
