"""A step that fails on one rank ends on all of them, and they go on together."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipegrad import FlatBucket, GradientSync, LateWork, ReductionStep, Work
from pipegrad.comm.agreement import Board, agree
from pipegrad.comm.failures import FailureNotice
from pipegrad_handlers.pipeline_shared import PipelineShared
from tests.support.gradients.cases import (
    Case,
    Replies,
    give,
    on,
    outcome,
    rank,
    replies,
    stage,
    step,
    tied,
)

TWO: list[Case] = []
two = replies(2, TWO)
SECONDS = 25.0  # until a rank that does not go on is given up, on a busy machine


def told(function: Callable[[], object]) -> str:
    """Returns what a function says, or raises: interrupts too."""
    try:
        return outcome(function)
    except BaseException as error:  # noqa: BLE001 - whatever it is
        return f"{type(error).__name__}: {error}"


# Interrupts in what pipegrad calls.


class Exits(PipelineShared):
    """Wants to end the process, on rank 1."""

    def launch(
        self, bucket: FlatBucket, reduction: ReductionStep, group: dist.ProcessGroup
    ) -> Work:
        if rank() == 1:
            raise SystemExit(0)
        return super().launch(bucket, reduction, group)


class ExitsAtOnce(PipelineShared):
    def __init__(self) -> None:
        super().__init__()
        if rank() == 1:
            raise SystemExit(0)


def raise_on_one(error: BaseException) -> int:
    if rank() == 1:
        raise error
    return rank()


@on(TWO)
def interrupts() -> Any:
    module = stage(a=(1,))
    sync = tied(module, "a", handlers=[Exits])
    found = {"launch": told(lambda: step(sync, module, a=1.0))}
    found["afterwards"] = told(sync.prepare)
    found["handler"] = told(lambda: tied(stage(a=(1,)), "a", handlers=[ExitsAtOnce]))
    for error in (SystemExit(0), SystemExit("over"), KeyboardInterrupt()):
        found[f"agree {error!r}"] = told(partial(agree, "a thing", partial(raise_on_one, error)))
    return found


@pytest.mark.parametrize(
    ("name", "mine", "theirs"),
    [
        ("launch", "ReduceError: rank 1: bucket 0 ", "ReduceError: a step failed on another rank"),
        ("afterwards", "ReduceError: this GradientSync failed", "ReduceError: this GradientSync"),
        ("handler", "AgreementError: ", "AgreementError: "),
        (
            "agree SystemExit(0)",
            "AgreementError: rank 1: Sys",
            "AgreementError: rank 1: SystemExit",
        ),
        ("agree SystemExit('over')", "AgreementError: ", "AgreementError: "),
        ("agree KeyboardInterrupt()", "KeyboardInterrupt: ", "AgreementError: rank 1: Keyboard"),
    ],
)
def test_what_wants_to_end_the_process_is_told(
    name: str, mine: str, theirs: str, two: Replies
) -> None:
    """Issue 16, point 9: the process ended with 0, and the other rank waited."""
    other, own = (reply["interrupts"][name] for reply in two)
    assert own.startswith(mine)
    assert other.startswith(theirs)
    words = "KeyboardInterrupt" if "Keyboard" in name else "SystemExit"
    assert words in other
    assert words in own
    assert [reply["interrupts seconds"] > 2 * SECONDS for reply in two] == [False, False]


def test_alone_an_exit_is_an_error_too() -> None:
    """Issue 16, point 9: a factory that exits ended the run with 0, and nothing was trained."""
    assert told(partial(agree, "a thing", partial(exit_with, 0))) == (
        "AgreementError: a thing failed: SystemExit: 0"
    )


def exit_with(code: int) -> None:
    raise SystemExit(code)


# Verbs that one rank alone is refused.


@on(TWO)
def frozen_on_one() -> Any:
    """Rank 0 freezes a parameter, is refused, and does something else for a while."""
    module = stage(a=(1,))
    sync = tied(module, "a")
    right = step(sync, module, a=1.0)
    module.zero_grad()
    began = time.monotonic()
    if rank() == 0:
        module.a.requires_grad_(False)
        said = told(sync.prepare)
        module.a.requires_grad_(True)
        agree("until the other is done", str)
        again = told(lambda: step(sync, module, a=1.0))
    else:
        said, again = told(lambda: step(sync, module, a=1.0)), ""
        agree("until the other is done", str)
    seconds = time.monotonic() - began
    module.zero_grad()
    return right, said, again, step(sync, module, a=3.0), seconds


@on(TWO)
def forgotten_on_one() -> Any:
    """Rank 0 forgets that its stage is final, and does something else for a while."""
    module = stage(a=(1,))
    sync = tied(module, "a")
    sync.prepare()
    give(module, a=1.0)
    began = time.monotonic()
    if rank() == 1:
        sync.stage_final(1)
    said = told(sync.finish)
    agree("until the other is done", str)
    again = ""
    if rank() == 0:
        sync.stage_final(0)
        again = told(sync.finish)
    seconds = time.monotonic() - began
    module.zero_grad()
    return {"a": [2.0]}, said, again, step(sync, module, a=3.0), seconds


@pytest.mark.parametrize("case", ["frozen_on_one", "forgotten_on_one"])
def test_a_verb_that_one_rank_is_refused_does_not_hold_the_others(case: str, two: Replies) -> None:
    """Issue 16, point 10 (2.3): the other rank waited as long as the process lived."""
    words = {"frozen_on_one": "'0.a' was ", "forgotten_on_one": "finish() before stage_final()"}
    refused, waits = (reply[case] for reply in two)
    assert refused[1].startswith("StepError: ")
    assert words[case] in refused[1]
    assert waits[1].startswith("ReduceError: this rank waits for one that does not go on: rank 0: ")
    assert words[case] in waits[1]
    assert refused[2].startswith("ReduceError: a step failed on another rank: rank 1: ")
    for right, _, _, afterwards, seconds in (refused, waits):
        assert right == {"a": [2.0]}
        assert afterwards == {"a": [6.0]}
        assert seconds < 2 * SECONDS


# Steps that are aborted.


@on(TWO)
def aborted() -> Any:
    """Rank 1 fails before, among and behind its launches; nobody zeroes a gradient."""
    module = stage(a=(1,), b=(1,))
    sync = tied(module, "a", "b", bucket_bytes=0)
    found: list[tuple[Any, ...]] = []
    for finals in (0, 1, 2):
        sync.prepare()
        give(module, a=5.0, b=5.0)
        if rank() == 1 and finals < 2:
            if finals:
                sync.parameters_final(1, [module.b])  # type: ignore[list-item]
            said = str(sync.abort(MemoryError("too large")))
        else:
            sync.stage_final(rank())
            said = told(sync.finish)
        kept = [parameter.grad is None for parameter in module.parameters()]
        found.append((said, kept, finals))
        module.zero_grad()
        found[-1] = (*found[-1], step(sync, module, a=1.0, b=2.0))
        module.zero_grad()
    with sync.accumulate():
        step(sync, module, a=1.0, b=1.0)
        sync.prepare()
        give(module, a=1.0, b=1.0)
    sync.abort(MemoryError("too large"))
    found.append(("", [parameter.grad is None for parameter in module.parameters()], 3))
    found[-1] = (*found[-1], step(sync, module, a=1.0, b=2.0))
    return found


def test_an_aborted_step_leaves_nothing_and_all_go_on(two: Replies) -> None:
    """Issue 16, point 10 (runtime, 4 and 14): a part of the gradients was left and added to."""
    for here, reply in enumerate(two):
        for said, dropped, finals, afterwards in reply["aborted"]:
            if finals < 2:
                assert dropped == [True, True]
                cause = "ReduceError: a step failed on another rank"
                assert said == "None" if here else said.startswith(cause)
                assert here or "rank 1: MemoryError: too large" in said
            elif finals == 2:
                assert (said, dropped) == ("None", [False, False])
            else:
                assert dropped == [True, True]
            assert afterwards == {"a": [2.0], "b": [4.0]}


class SumsLate(PipelineShared):
    """All of its communication is in the wait, which comes late; `ended` counts them."""

    ended = 0

    def launch(
        self, bucket: FlatBucket, reduction: ReductionStep, group: dist.ProcessGroup
    ) -> Work:
        return LateWork(LateSum(bucket, group).wait)


class LateSum:
    def __init__(self, bucket: FlatBucket, group: dist.ProcessGroup) -> None:
        self._bucket = bucket
        self._group = group

    def wait(self) -> None:
        dist.all_reduce(self._bucket.buffer, group=self._group)
        SumsLate.ended += 1


@on(TWO)
def late_work() -> Any:
    """Rank 1 fails in step 2, in which all ranks meet; it does not go on before rank 0 has told."""
    module = stage(a=(1,))
    sync = tied(module, "a", handlers=[SumsLate])
    step(sync, module, a=1.0)
    module.zero_grad()
    said, board = "", Board("late work")
    if rank() == 1:
        sync.prepare()
        sync.abort(MemoryError("too large"))
        board.wait("told", timedelta(seconds=60))
    else:
        said = told(lambda: step(sync, module, a=1.0))
        began = time.monotonic()
        while SumsLate.ended < 2 and time.monotonic() - began < 30:  # rank 1 is not called
            time.sleep(0.01)
        board.post("told", b"")
    ended = SumsLate.ended
    return said, ended, step(sync, module, a=3.0)


def test_late_work_of_a_failed_step_waits_for_no_verb(two: Replies) -> None:
    """It stood behind the meeting of all ranks: on devices both would have waited for ever."""
    (said, *first), (_, *second) = (reply["late_work"] for reply in two)
    assert said.startswith("ReduceError: a step failed on another rank")
    assert first == second == [2, {"a": [6.0]}]


def reduce(sync: GradientSync, module: nn.Module) -> None:
    give(module, a=1.0)
    sync.stage_final(rank())
    sync.finish()


def refused_while_accumulating(sync: GradientSync, module: nn.Module) -> None:
    """Rank 0 is refused a `prepare` after one that only accumulated and was not finished."""
    with sync.accumulate():
        sync.prepare()
    if rank() == 0:
        whole, module.a = module.a, nn.Parameter(torch.zeros(3))
        assert told(sync.prepare).startswith("StepError: '0.a' was (1,)")
        module.a = whole
    sync.prepare()
    reduce(sync, module)


def refused_while_leaving(sync: GradientSync, module: nn.Module) -> None:
    """Rank 0 is refused a `prepare` when its gradients have left, and does as it is told."""
    sync.prepare()
    give(module, a=1.0)
    sync.stage_final(rank())
    if rank() == 0:
        assert "inside a step whose gradients are leaving" in told(sync.prepare)
    sync.finish()


def refused_without_a_step(sync: GradientSync, module: nn.Module) -> None:
    """Rank 0 calls `finish` again, after a step that only accumulated and was finished."""
    with sync.accumulate():
        sync.prepare()
        give(module, a=1.0)
        sync.finish()
    if rank() == 0:
        assert "finish() before stage_final() of stages [0]" in told(sync.finish)
    sync.prepare()
    reduce(sync, module)


REFUSALS = (refused_while_accumulating, refused_while_leaving, refused_without_a_step)


@on(TWO)
def refusals() -> Any:
    """After each, the numbers of steps; and what rank 0 hears of a step that fails on rank 1."""
    found = {}
    for refused in REFUSALS:
        module = stage(a=(1,))
        sync = tied(module, "a")
        refused(sync, module)
        module.zero_grad()
        number, words = sync._parts.failures.step, ""
        sync.prepare()
        if rank() == 1:
            sync.abort(MemoryError("too large"))
        else:
            words = told(partial(reduce, sync, module))
        found[refused.__name__] = number, words, step(sync, module, a=3.0)
    return found


@pytest.mark.parametrize("refused", REFUSALS, ids=lambda refused: refused.__name__)
def test_a_refused_verb_counts_steps_as_other_ranks_do(
    refused: Callable[[GradientSync, nn.Module], None], two: Replies
) -> None:
    """Failures were posted for a step where no other rank read them."""
    (first, words, after), (second, _, other) = (r["refusals"][refused.__name__] for r in two)
    assert first == second
    assert words.startswith("ReduceError: a step failed on another rank: rank 1: MemoryError")
    assert (after, other) == ({"a": [6.0]}, {"a": [6.0]})


@on(TWO)
def aborted_after_accumulating() -> Any:
    """Rank 1 fails before the step that reduces; the one before only accumulated, unfinished."""
    module = stage(a=(1,))
    sync = tied(module, "a")
    with sync.accumulate():
        sync.prepare()
        give(module, a=1.0)
    words = ""
    if rank() == 1:
        sync.abort(MemoryError("no data"), begun=False)
    else:
        sync.prepare()
        words = told(lambda: reduce(sync, module))
    module.zero_grad()
    return words, sync._parts.failures.step, step(sync, module, a=3.0)


def test_an_abort_after_accumulating_is_of_the_next_step(two: Replies) -> None:
    """The other rank finished with a gradient that lacked a part, and nobody said so."""
    (words, *first), (_, *second) = (reply["aborted_after_accumulating"] for reply in two)
    assert "rank 1: MemoryError: no data" in words
    assert first == second == [2, {"a": [6.0]}]


@on(TWO)
def interrupted_while_posting() -> str:
    """Ctrl-C comes while rank 0 posts a failure that is final."""
    module = stage(a=(1,))
    sync = tied(module, "a")
    sync.prepare()
    with mock.patch.object(FailureNotice, "post", side_effect=KeyboardInterrupt):
        assert told(lambda: sync.abort(MemoryError("x"), final=True)) == "KeyboardInterrupt: "
    return told(sync.prepare)


def test_a_final_failure_is_remembered_though_an_interrupt_comes(two: Replies) -> None:
    for reply in two:
        assert "failed before and its communicators" in reply["interrupted_while_posting"]
