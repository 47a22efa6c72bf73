"""Bucketer: callbacks that raise or call, collectives that fail, memory, refusals."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from pipegrad import Bucketer
from pipegrad.comm import collectives
from pipegrad.reduce import bucketer as module
from pipegrad.reduce.bucket_buffer import FlatBuffer
from tests.support.gradients.cases import Case, on, outcome, rank, replies
from tests.support.gradients.sums import Calls, inputs, spied

TWO: list[Case] = []
FOUR: list[Case] = []


two = replies(2, TWO)
four = replies(4, FOUR)


def raising(calls: Calls, value: float) -> Callable[[torch.Tensor], None]:
    def use(view: torch.Tensor) -> None:
        calls.note(view)
        raise ValueError(f"callback {value}")

    return use


def run_raising(raises: bool) -> Any:
    calls = Calls(4)
    with spied() as log:
        for value in (1.0, 2.0, 3.0, 4.0):
            bad = raises and value in (2.0, 3.0)
            callback = raising(calls, value) if bad else calls.note
            calls.bucketer.reduce_scatter(inputs(2, value), callback=callback)
        notes = None
        try:
            calls.bucketer.flush()
        except ValueError as error:
            notes = [str(error), *error.__notes__]
        again = outcome(calls.bucketer.flush)
        sent = len(log)
    return notes, again, [value for _, value in calls.got], sent


@on(FOUR)
def raising_on_one() -> Any:
    return run_raising(rank() == 1)


@on(FOUR)
def raising_on_all() -> Any:
    return run_raising(True)


def test_a_callback_that_raises_stops_no_other_and_sends_nothing_again(
    four: list[dict[str, Any]],
) -> None:
    fine = (None, "None", [1.0, 2.0, 3.0, 4.0], 2)
    notes = ["callback 2.0", "A callback also raised ValueError: callback 3.0"]
    raised = (notes, *fine[1:])
    assert [reply["raising_on_one"] for reply in four] == [fine, raised, fine, fine]
    assert [reply["raising_on_all"] for reply in four] == [raised] * 4


@on(FOUR)
def raising_in_a_call() -> Any:
    """The first callback runs inside the third call."""
    calls = Calls(0)
    calls.bucketer.reduce_scatter(inputs(1), callback=raising(calls, 1.0))
    later = [outcome(partial(calls.add, 1, value)) for value in (2.0, 3.0, 4.0)]
    held = outcome(calls.bucketer.release)
    raised = outcome(calls.bucketer.flush)
    return later, held, raised, len(calls.got), outcome(calls.bucketer.release)


def test_what_a_callback_raises_inside_a_call_waits_for_flush(four: list[dict[str, Any]]) -> None:
    held = (
        "StepError: release() with 0 buckets queued, 2 in flight and 1 callbacks' errors not "
        "raised yet: flush() first"
    )
    right = (["0", "1", "2"], held, "ValueError: callback 1.0", 4, "None")
    assert [reply["raising_in_a_call"] for reply in four] == [right] * 4


@on(FOUR)
def chained() -> Any:
    """What hybrid sharding does: the sum within a node is summed between nodes."""
    world = dist.get_world_size()
    calls = Calls(6)
    sums: list[Any] = []

    def on_to_all(view: torch.Tensor) -> None:
        calls.bucketer.all_reduce(view, callback=lambda total: sums.append(total.tolist()))

    with spied() as log:
        for value in range(9):
            calls.bucketer.reduce_scatter(inputs(2, float(value)), callback=on_to_all)
        calls.bucketer.flush()
    one = [[world * (world * value + 600.0)] * 2 for value in range(9)]
    return sums == one, [kind for kind, *_ in log].count("all_reduce") < 9


def test_callbacks_may_add_and_flush_runs_theirs_too(four: list[dict[str, Any]]) -> None:
    assert [reply["chained"] for reply in four] == [(True, True)] * 4


@on(FOUR)
def nested() -> Any:
    calls = Calls(4)
    words: list[str] = []

    def use(view: torch.Tensor) -> None:
        calls.note(view)
        words.append(outcome(calls.bucketer.flush))
        words.append(outcome(calls.bucketer.release).split(":")[0])

    calls.bucketer.reduce_scatter(inputs(1), callback=use)
    return calls.flush(), words


def test_flush_and_release_in_a_callback_are_refused(four: list[dict[str, Any]]) -> None:
    words = [
        "StepError: flush() in a callback: whoever runs it sends what callbacks add",
        "StepError",
    ]
    assert [reply["nested"] for reply in four] == [([(1, 1.0)], words)] * 4


@on(FOUR)
def steady() -> Any:
    """How many buffers each of four rounds makes; each fills three buckets of eight floats."""
    bucketer = Bucketer(capacity_bytes=4 * 4 * 8)
    made = []
    for _ in range(4):
        with mock.patch.object(module, "FlatBuffer", wraps=FlatBuffer) as counter:
            for _ in range(6):
                bucketer.reduce_scatter([torch.ones(4)] * 4, callback=lambda view: None)
            bucketer.flush()
        made.append(counter.call_count)
    return made, bucketer.allocated_bytes


def test_staging_is_used_again(four: list[dict[str, Any]]) -> None:
    """Three results a round, which belong to who holds a view; stagings in the first one only."""
    assert [reply["steady"] for reply in four] == [([3 + 3, 3, 3, 3], 3 * 4 * 4 * 8)] * 4


@on(FOUR)
def released() -> Any:
    calls = Calls(4)
    others = set(threading.enumerate())
    found: list[Any] = []
    for _ in range(2):
        calls.add(1, 1.0)
        found.append(outcome(calls.bucketer.release).split(",")[0])
        calls.add(4, 1.0)  # does not fit, and fills a bucket of its own
        calls.bucketer.capacity_bytes //= 2  # leaves no use for the staging
        found.append(calls.flush())
        calls.add(1, 1.0)
        calls.flush()
        calls.bucketer.release()
        calls.bucketer.capacity_bytes *= 2
        found.append(calls.bucketer.allocated_bytes)
    calls.bucketer.release()  # with nothing there
    for thread in set(threading.enumerate()) - others:
        thread.join(5)
    return found, set(threading.enumerate()) <= others


def test_release_frees_everything_and_the_bucketer_goes_on(four: list[dict[str, Any]]) -> None:
    refused = "StepError: release() with 1 buckets queued"
    right = ([refused, [(1, 1.0), (4, 1.0)], 0] * 2, True)
    assert [reply["released"] for reply in four] == [right] * 4


@on(FOUR)
def broken() -> Any:
    """The second collective fails, on all ranks so that none hangs; a third is on its way."""
    calls = Calls(4)
    calls.bucketer.reduce_scatter(inputs(4), callback=raising(calls, 1.0))
    send = collectives.reduce_scatter
    fails = iter([False, True, False])

    def sometimes(output: Any, rows: Any, group: Any) -> None:
        if next(fails):
            raise RuntimeError("cable pulled")
        send(output, rows, group)

    found: list[Any] = [outcome(calls.bucketer.flush)]
    with mock.patch.object(collectives, "reduce_scatter", sometimes):
        calls.bucketer.reduce_scatter(inputs(4, 1.0), callback=raising(calls, 1.0))
        calls.add(4, 2.0)
        found.append(outcome(lambda: calls.add(4, 3.0)))
        try:
            calls.bucketer.flush()
        except Exception as error:  # noqa: BLE001 - whatever it is, is asserted
            found.append((f"{type(error).__name__}: {error}", getattr(error, "__notes__", [])))
    found.append([value for _, value in calls.got])
    words = [
        outcome(calls.bucketer.flush),
        outcome(lambda: calls.add(1, 1.0)),
        outcome(lambda: calls.bucketer.all_reduce(torch.ones(1), callback=calls.note)),
    ]
    held = calls.bucketer.allocated_bytes > 0
    calls.bucketer.release()
    words.append(outcome(calls.bucketer.flush))
    return found, words, held, calls.bucketer.allocated_bytes


def test_after_a_failed_collective_the_bucketer_says_so_and_can_only_be_released(
    four: list[dict[str, Any]],
) -> None:
    failure = (
        "reduce_scatter of 64 bytes of torch.float32 on cpu over ranks [0, 1, 2, 3] failed: "
        "cable pulled"
    )
    first = ["ValueError: callback 1.0", "2", (
        f"ReduceError: {failure}", ["A callback also raised ValueError: callback 1.0"]
    ), [1.0, 1.0]]  # fmt: skip
    ever_after = (
        "ReduceError: this Bucketer is of no use since a collective failed, its groups are out of "
        f"step; release() it, then make new groups and a new Bucketer: {failure}"
    )
    assert [reply["broken"] for reply in four] == [(first, [ever_after] * 4, True, 0)] * 4


@on(TWO)
def refusals() -> Any:
    bucketer = Bucketer()
    one = torch.ones(2)
    spoilt: dict[str, Any] = {
        "number": [one],
        "shapes": [one, torch.ones(3)],
        "dtypes": [one, one.double()],
        "devices": [one, one.to("meta")],
        "sparse": [one.to_sparse()] * 2,
        "bool": [one.bool()] * 2,
    }
    words = {
        name: outcome(partial(bucketer.reduce_scatter, rows, callback=print))
        for name, rows in spoilt.items()
    }
    some: Any = "print"
    words["callback"] = outcome(lambda: bucketer.all_reduce(one, callback=some))
    untouched = bucketer.allocated_bytes
    for wrong in (-1, 1e6):
        given: Any = wrong
        words[f"made with {wrong}"] = outcome(partial(Bucketer, capacity_bytes=given))
        bucketer.capacity_bytes = given
        words[f"set to {wrong}"] = outcome(partial(bucketer.all_reduce, one, callback=print))
    return words, untouched


def test_what_cannot_be_summed_is_refused_before_anything_is_touched(
    two: list[dict[str, Any]],
) -> None:
    one = "(2,) torch.float32 cpu torch.strided"
    differ = "reduce_scatter: expected inputs of one shape, dtype and device, found"
    right = {
        "number": "reduce_scatter: 1 inputs, expected 2: one for each of the ranks [0, 1]",
        "shapes": f"{differ} {one}; (3,) torch.float32 cpu torch.strided",
        "dtypes": f"{differ} {one}; (2,) torch.float64 cpu torch.strided",
        "devices": f"{differ} {one}; (2,) torch.float32 meta torch.strided",
        "sparse": "reduce_scatter: inputs are torch.sparse_coo, expected torch.strided: use "
        "to_dense()",
        "bool": "reduce_scatter: inputs are torch.bool, which has no sum: use an integer dtype",
        "callback": "all_reduce: callback is 'print', expected a function of the sum",
        "made with -1": "capacity_bytes is -1, expected an int from 0 on",
        "set to -1": "capacity_bytes is -1, expected an int from 0 on",
        "made with 1000000.0": "capacity_bytes is 1000000.0, expected an int from 0 on",
        "set to 1000000.0": "capacity_bytes is 1000000.0, expected an int from 0 on",
    }
    expected = {name: f"PlanError: {words}" for name, words in right.items()}
    assert [reply["refusals"] for reply in two] == [(expected, 0)] * 2
