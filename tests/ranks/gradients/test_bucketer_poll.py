"""Bucketer.poll: results that are there are called back before flush."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from pipegrad import Bucketer
from tests.support.gradients.cases import outcome, rank
from tests.support.gradients.sums import Calls, inputs

pytestmark = pytest.mark.ranks(2)


def wait_for(bucketer: Bucketer, calls: list[Any], num: int) -> None:
    """Polls until so many callbacks have run."""
    end = time.monotonic() + 60.0
    while len(calls) < num and time.monotonic() < end:
        bucketer.poll()


@pytest.mark.parametrize("capacity", [0, 2**18])
@pytest.mark.parametrize("size", [1, 2**18])  # the larger one is more than a bucket takes
def test_what_is_full_or_too_large_is_called_back_without_flush(capacity: int, size: int) -> None:
    # As fairscale's test_reduce_scatter; each rank has zeros for itself and ones for others.
    bucketer, sums = Bucketer(capacity_bytes=capacity), list[torch.Tensor]()
    tensors = [torch.full((size,), float(row != rank())) for row in range(2)]
    bucketer.reduce_scatter(tensors, callback=sums.append)
    if size * 4 * 2 < capacity:
        bucketer.poll()
        assert not sums
        bucketer.flush()
    wait_for(bucketer, sums, 1)
    assert [value.unique().tolist() for value in sums] == [[1.0]]
    bucketer.flush()
    assert len(sums) == 1
    bucketer.release()


def test_what_is_too_large_overtakes_what_waits() -> None:
    calls = Calls(100)
    for numel, due in ((1, 0), (1000, 1), (2, 1)):
        calls.add(numel, float(numel))
        wait_for(calls.bucketer, calls.got, due)
        calls.bucketer.poll()
        assert [numel for numel, _ in calls.got] == [1000] * due
    assert calls.flush() == [(1000, 1000.0), (1, 1.0), (2, 2.0)]


def test_callbacks_in_poll_may_not_add() -> None:
    # A callback that adds would do so at another time on each rank.
    calls, words = Calls(0), list[str]()

    def add(_: torch.Tensor) -> None:
        words.append(outcome(calls.bucketer.poll))
        words.append(outcome(lambda: calls.add(1, 1.0)))
        raise ValueError("of the callback")

    calls.bucketer.reduce_scatter(inputs(1), callback=add)
    wait_for(calls.bucketer, words, 2)
    calls.add(1, 2.0)  # goes on
    polled, added = words
    assert polled.startswith("StepError: poll() in a callback")
    assert added.startswith("StepError: reduce_scatter() in a callback that poll() runs")
    assert outcome(calls.bucketer.flush) == "ValueError: of the callback"
    assert calls.flush() == [(1, 2.0)]


def test_staging_of_inference_mode_is_used_outside_of_it_and_the_reverse() -> None:
    calls, sums = Calls(4), list[float]()
    for mode in (True, False, True):
        with torch.inference_mode(mode=mode):
            calls.add(2, 1.0)
            calls.bucketer.all_reduce(torch.ones(2), callback=lambda x: sums.append(x.sum().item()))
            if mode:
                calls.bucketer.flush()
    calls.add(2, 2.0)
    calls.add(2, 3.0)
    assert sorted(value for _, value in calls.flush()) == [1.0, 1.0, 1.0, 2.0, 3.0]
    assert sums == [4.0] * 3
