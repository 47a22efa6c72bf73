"""Bucketer.poll: results that are there are called back before flush."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipegrad import Bucketer
from tests.support.gradients.cases import Case, on, outcome, rank, replies
from tests.support.gradients.sums import Calls, inputs

FOUR: list[Case] = []

four = replies(4, FOUR)

SIZES = [1, 2**18]  # elements; the larger one is more than a bucket of 256 KiB takes
CAPACITIES = [0, 2**18]
SOON = 60.0  # seconds until what was sent has ended for sure


def wait_for(bucketer: Bucketer, got: list[Any], num: int) -> None:
    """Polls until so many callbacks have run."""
    end = time.monotonic() + SOON
    while len(got) < num and time.monotonic() < end:
        bucketer.poll()


@on(FOUR)
def at_once() -> Any:
    """As fairscale's test_reduce_scatter; each rank has zeros for itself and ones for others."""
    found = {}
    for capacity in CAPACITIES:
        for size in SIZES:
            bucketer, got = Bucketer(capacity_bytes=capacity), list[Any]()
            tensors = [torch.ones(size) for _ in range(dist.get_world_size())]
            tensors[rank()].fill_(0)
            bucketer.reduce_scatter(tensors, callback=got.append)
            if size * 4 * len(tensors) < capacity:
                bucketer.poll()
                assert not got
                bucketer.flush()
            wait_for(bucketer, got, 1)
            found[capacity, size] = [value.unique().tolist() for value in got]
            bucketer.flush()
            assert len(got) == 1
            bucketer.release()
    return found


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("size", SIZES)
def test_what_is_full_or_too_large_is_called_back_without_flush(
    four: list[dict[str, Any]], capacity: int, size: int
) -> None:
    """Issue 16, point 15. Before flush came no callback of a bucket that had long ended."""
    assert [reply["at_once"][capacity, size] for reply in four] == [[[3.0]]] * 4


@on(FOUR)
def out_of_order() -> Any:
    """As fairscale's: a large one overtakes two small ones, which wait for flush."""
    calls = Calls(100)
    counts = []
    for numel, due in ((1, 0), (1000, 1), (2, 1)):
        calls.add(numel, float(numel))
        wait_for(calls.bucketer, calls.got, due)
        calls.bucketer.poll()
        counts.append([numel for numel, _ in calls.got])
    return counts, calls.flush()


def test_what_is_too_large_overtakes_what_waits(four: list[dict[str, Any]]) -> None:
    """Issue 16, point 15."""
    counts, got = [[], [1000], [1000]], [(1000, 1000.0), (1, 1.0), (2, 2.0)]
    assert [reply["out_of_order"] for reply in four] == [(counts, got)] * 4


@on(FOUR)
def adding() -> Any:
    """A callback that adds would do so at another time on each rank."""
    calls = Calls(0)
    found: list[Any] = []

    def add(_: torch.Tensor) -> None:
        found.append(outcome(calls.bucketer.poll))
        found.append(outcome(lambda: calls.add(1, 1.0)))
        raise ValueError("of the callback")

    calls.bucketer.reduce_scatter(inputs(1), callback=add)
    wait_for(calls.bucketer, found, 2)
    calls.add(1, 2.0)  # goes on
    return found, outcome(calls.bucketer.flush), calls.flush()


def test_callbacks_in_poll_may_not_add(four: list[dict[str, Any]]) -> None:
    """Issue 16, point 15. What a callback raises is raised by flush, as everywhere."""
    for reply in four:
        (polled, added), flushed, got = reply["adding"]
        assert polled.startswith("StepError: poll() in a callback")
        assert added.startswith("StepError: reduce_scatter() in a callback that poll() runs")
        assert flushed == "ValueError: of the callback"
        assert got == [(1, 2.0)]


@on(FOUR)
def inference() -> Any:
    """Staging that was made in inference mode is used outside of it, and the reverse."""
    calls = Calls(4)
    for mode in (True, False, True):
        with torch.inference_mode(mode=mode):
            calls.add(2, 1.0)
            calls.bucketer.all_reduce(torch.ones(2), callback=lambda x: calls.got.append(x.sum()))
            if mode:
                calls.bucketer.flush()
    calls.add(2, 2.0)
    calls.add(2, 3.0)
    got = calls.flush()
    return [float(x) if isinstance(x, torch.Tensor) else x[1] for x in got]


def test_inference_mode_leaves_nothing_behind(four: list[dict[str, Any]]) -> None:
    """Issue 16, point 10 (3.5). After a call under inference_mode the next one outside failed."""
    expected = [1.0, 8.0, 1.0, 1.0, 8.0, 8.0, 2.0, 3.0]
    assert [sorted(reply["inference"]) for reply in four] == [sorted(expected)] * 4
