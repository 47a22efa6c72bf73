"""Bucketer: callbacks that raise or call, collectives that fail, memory, refusals."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, cast
from unittest import mock

import pytest
import torch

from pipegrad import Bucketer
from pipegrad.comm import collectives
from pipegrad.reduce import bucketer as module
from pipegrad.reduce.bucket_buffer import FlatBuffer
from tests.support.gradients.cases import outcome, rank
from tests.support.gradients.sums import Calls, inputs, spied

pytestmark = pytest.mark.ranks(2)


def raising(calls: Calls, value: float) -> Callable[[torch.Tensor], None]:
    def use(view: torch.Tensor) -> None:
        calls.note(view)
        raise ValueError(f"callback {value}")

    return use


def flushed(calls: Calls) -> list[str]:
    """Returns what flush raises, and its notes."""
    try:
        calls.bucketer.flush()
    except Exception as error:  # noqa: BLE001 - whatever it is, is asserted
        return [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])]
    return []


@pytest.mark.parametrize("ranks", [(1,), (0, 1)])
def test_a_callback_that_raises_stops_no_other_and_sends_nothing_again(
    ranks: tuple[int, ...],
) -> None:
    calls = Calls(4)
    with spied() as log:
        for value in (1.0, 2.0, 3.0, 4.0):
            raises = rank() in ranks and value in (2.0, 3.0)
            callback = raising(calls, value) if raises else calls.note
            calls.bucketer.reduce_scatter(inputs(2, value), callback=callback)
        words = flushed(calls)
        assert flushed(calls) == []
    notes = ["ValueError: callback 2.0", "A callback also raised ValueError: callback 3.0"]
    assert words == (notes if rank() in ranks else [])
    assert [value for _, value in calls.got] == [1.0, 2.0, 3.0, 4.0]
    assert len(log) == 2


def test_what_a_callback_raises_inside_a_call_waits_for_flush() -> None:
    calls = Calls(0)
    calls.bucketer.reduce_scatter(inputs(1), callback=raising(calls, 1.0))
    assert [calls.add(1, value) for value in (2.0, 3.0, 4.0)] == [0, 1, 2]
    assert outcome(calls.bucketer.release) == (
        "StepError: release() with 0 buckets queued, 2 in flight and 1 callbacks' errors not "
        "raised yet: flush() first"
    )
    assert flushed(calls) == ["ValueError: callback 1.0"]
    assert len(calls.got) == 4
    calls.bucketer.release()


def test_callbacks_may_add_and_flush_runs_theirs_too() -> None:
    # What hybrid sharding does: the sum within a node is summed between nodes.
    calls, sums = Calls(6), list[Any]()

    def sum_of_all(view: torch.Tensor) -> None:
        calls.bucketer.all_reduce(view, callback=lambda total: sums.append(total.tolist()))

    with spied() as log:
        for value in range(9):
            calls.bucketer.reduce_scatter(inputs(2, float(value)), callback=sum_of_all)
        calls.bucketer.flush()
    assert sums == [[2 * (2 * value + 100.0)] * 2 for value in range(9)]
    assert [kind for kind, *_ in log].count("all_reduce") < 9


def test_flush_and_release_in_a_callback_are_refused() -> None:
    calls, words = Calls(4), list[str]()

    def use(view: torch.Tensor) -> None:
        calls.note(view)
        words.extend(map(outcome, (calls.bucketer.flush, calls.bucketer.release)))

    calls.bucketer.reduce_scatter(inputs(1), callback=use)
    assert calls.flush() == [(1, 1.0)]
    flush, release = words
    assert flush == "StepError: flush() in a callback: whoever runs it sends what callbacks add"
    assert release.startswith("StepError: ")


def test_staging_is_used_again() -> None:
    bucketer = Bucketer(capacity_bytes=2 * 4 * 8)
    buffers = []
    for _ in range(4):  # each fills three buckets of eight floats
        with mock.patch.object(module, "FlatBuffer", wraps=FlatBuffer) as counter:
            for _ in range(6):
                bucketer.reduce_scatter([torch.ones(4)] * 2, callback=lambda view: None)
            bucketer.flush()
        buffers.append(counter.call_count)
    # Three results a round, which belong to who holds a view; stagings in the first one only.
    assert buffers == [3 + 3, 3, 3, 3]
    assert bucketer.allocated_bytes == 3 * 2 * 4 * 8


def test_release_frees_everything_and_the_bucketer_goes_on() -> None:
    calls, others = Calls(4), set(threading.enumerate())
    for _ in range(2):
        calls.add(1, 1.0)
        refused = "StepError: release() with 1 buckets queued"
        assert outcome(calls.bucketer.release).split(",")[0] == refused
        calls.add(4, 1.0)  # does not fit, and fills a bucket of its own
        calls.bucketer.capacity_bytes //= 2  # leaves no use for the staging
        assert calls.flush() == [(1, 1.0), (4, 1.0)]
        calls.add(1, 1.0)
        calls.flush()
        calls.bucketer.release()
        calls.bucketer.capacity_bytes *= 2
        assert calls.bucketer.allocated_bytes == 0
    calls.bucketer.release()  # with nothing there
    for thread in set(threading.enumerate()) - others:
        thread.join(60)
        assert not thread.is_alive()


def test_after_a_failed_collective_the_bucketer_can_only_be_released() -> None:
    # The second collective fails, on all ranks so that none hangs; a third is on its way.
    calls = Calls(4)
    calls.bucketer.reduce_scatter(inputs(4), callback=raising(calls, 1.0))
    send, fails = collectives.reduce_scatter, iter([False, True, False])

    def sometimes(output: Any, rows: Any, group: Any) -> None:
        if next(fails):
            raise RuntimeError("cable pulled")
        send(output, rows, group)

    assert flushed(calls) == ["ValueError: callback 1.0"]
    failure = (
        "reduce_scatter of 32 bytes of torch.float32 on cpu over ranks [0, 1] failed: cable pulled"
    )
    with mock.patch.object(collectives, "reduce_scatter", sometimes):
        calls.bucketer.reduce_scatter(inputs(4, 1.0), callback=raising(calls, 1.0))
        calls.add(4, 2.0)
        assert calls.add(4, 3.0) == 2
        assert flushed(calls) == [
            f"ReduceError: {failure}",
            "A callback also raised ValueError: callback 1.0",
        ]
    assert [value for _, value in calls.got] == [1.0, 1.0]
    ever_after = (
        "ReduceError: this Bucketer is of no use since a collective failed, its groups are out of "
        f"step; release() it, then make new groups and a new Bucketer: {failure}"
    )
    assert outcome(calls.bucketer.flush) == ever_after
    assert outcome(lambda: calls.add(1, 1.0)) == ever_after
    all_reduce = lambda: calls.bucketer.all_reduce(torch.ones(1), callback=calls.note)  # noqa: E731
    assert outcome(all_reduce) == ever_after
    assert calls.bucketer.allocated_bytes > 0
    calls.bucketer.release()
    assert calls.bucketer.allocated_bytes == 0
    assert outcome(calls.bucketer.flush) == ever_after


ONE = torch.ones(2)
DIFFER = (
    "expected inputs of one shape, dtype and device, found (2,) torch.float32 cpu torch.strided"
)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([ONE], "1 inputs, expected 2: one for each of the ranks [0, 1]"),
        ([ONE, torch.ones(3)], f"{DIFFER}; (3,) torch.float32 cpu torch.strided"),
        ([ONE, ONE.double()], f"{DIFFER}; (2,) torch.float64 cpu torch.strided"),
        ([ONE, ONE.to("meta")], f"{DIFFER}; (2,) torch.float32 meta torch.strided"),
        (
            [ONE.to_sparse()] * 2,
            "inputs are torch.sparse_coo, expected torch.strided: use to_dense()",
        ),
        ([ONE.bool()] * 2, "inputs are torch.bool, which has no sum: use an integer dtype"),
    ],
    ids=["number", "shapes", "dtypes", "devices", "sparse", "bool"],
)
def test_what_cannot_be_summed_is_refused_before_anything_is_touched(
    rows: list[torch.Tensor], words: str
) -> None:
    bucketer = Bucketer()
    refused = outcome(lambda: bucketer.reduce_scatter(rows, callback=print))
    assert refused == f"PlanError: reduce_scatter: {words}"
    assert bucketer.allocated_bytes == 0


def test_options_that_are_none_are_refused() -> None:
    bucketer, some = Bucketer(), cast("Any", "print")
    words = outcome(lambda: bucketer.all_reduce(ONE, callback=some))
    assert words == "PlanError: all_reduce: callback is 'print', expected a function of the sum"
    for wrong in (-1, cast("int", 1e6)):
        words = f"PlanError: capacity_bytes is {wrong}, expected an int from 0 on"
        assert outcome(partial(Bucketer, capacity_bytes=wrong)) == words
        bucketer.capacity_bytes = wrong
        assert outcome(lambda: bucketer.all_reduce(ONE, callback=print)) == words
