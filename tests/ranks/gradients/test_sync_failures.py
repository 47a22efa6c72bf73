"""What fails on one rank is every rank's error, soon: in a comm stream, at the start, mid-step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipegrad import (
    FlatBucket,
    GradientSync,
    LateWork,
    Reduction,
    ReductionStep,
    Topology,
    Work,
)
from pipegrad.comm.agreement import agree
from pipegrad.comm.failures import FailureNotice
from pipegrad.comm.process_groups import Groups
from pipegrad.comm.store import store
from pipegrad_handlers.pipeline_shared import PipelineShared
from tests.support.gradients.cases import (
    DATA,
    SHARED,
    give,
    grads,
    outcome,
    rank,
    replicated,
    stage,
    step,
    tied,
)
from tests.support.ranked import gathered


def refuse_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on rank 1 cannot send."""
    if rank() == 1:
        refuse = mock.Mock(side_effect=OSError("no route to host"))
        monkeypatch.setattr(PipelineShared, "launch", refuse)


@pytest.mark.ranks(2)
def test_a_failure_in_a_comm_stream_is_every_ranks_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values arrive in the first step. In the second, rank 1 cannot send."""
    module = stage(a=(1,), b=(1,))
    sync = tied(module, "a", "b", bucket_bytes=0, comm_streams=1)
    assert step(sync, module, a=1.0, b=2.0) == {"a": [2.0], "b": [4.0]}
    module.zero_grad()
    if rank() == 0:  # a refusal that one rank alone meets does not part the ranks
        give(module, a=1.0)
        module.zero_grad()
    refuse_launches(monkeypatch)
    refused = outcome(lambda: step(sync, module, a=1.0, b=2.0))
    assert refused.startswith("ReduceError: ")
    for part in (
        "rank 1",
        "bucket 0 (0.b",
        "over ranks [0, 1]",
        "PipelineShared",
        "no route to host",
    ):
        assert part in refused
    prepared = outcome(sync.prepare)
    assert prepared.startswith("ReduceError: this GradientSync failed before")
    assert "no route to host" in prepared
    assert outcome(sync.finish).startswith("StepError: finish() without prepare()")


@pytest.mark.ranks(2)
def test_a_launch_that_returns_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue 16, point 18. It was "'NoneType' object has no attribute 'wait'"."""
    monkeypatch.setattr(PipelineShared, "launch", lambda *_: None)
    module = stage(a=(1,))
    sync = tied(module, "a", handlers=[PipelineShared])
    refused = outcome(lambda: step(sync, module, a=1.0))
    assert refused.startswith("ReduceError: ")
    assert "PipelineShared" in refused
    assert "launch() returned None, expected a Work, with a wait()" in refused


class Optioned(PipelineShared):
    def __init__(self, *, size: int = 1, path: str = "") -> None:
        if path and rank():
            raise FileNotFoundError(f"no such file: {path}")
        self.size = size


class Impure(PipelineShared):
    """Says on each rank that only this rank's process averages."""

    def reductions(self, parameters: Any, topology: Topology) -> Iterable[Reduction]:
        op = "mean" if rank() else "sum"
        return [Reduction(p, topology.ranks_of(p.holders), op) for p in parameters]  # type: ignore[arg-type]


class Raises(PipelineShared):
    def reductions(self, parameters: Any, topology: Topology) -> Iterable[Reduction]:
        if rank():
            raise KeyError("dp")
        return super().reductions(parameters, topology)


# What all ranks say, in parts; and what each is given.
WRONG: list[tuple[str, Callable[[int], dict[str, Any]]]] = [
    ("AgreementError: ranks disagree on handlers ... on rank 0 ... data-parallel",
     lambda r: {"handlers": [Optioned] if r else [Optioned, DATA]}),
    ("AgreementError: ranks disagree on handlers ... 'size', '0' ... 'size', '1'",
     lambda r: {"handlers": [{"name": Optioned, "size": r}]}),
    ("ranks disagree on bucket_bytes: 100 on rank 0, 101 on rank 1; make them the same",
     lambda r: {"bucket_bytes": 100 + r}),
    ("ranks disagree on tied",
     lambda r: {"tied": [["a"], {0: "b", 1: "b"}] if r else [["a"], ["b"]]}),
    ("AgreementError ... rank 1: PluginOptionError ... no such file: groups.toml",
     lambda _: {"handlers": [{"name": Optioned, "path": "groups.toml"}]}),
    ("AgreementError ... rank 1: PluginError ... no_module_1",
     lambda r: {"handlers": ["no_module_1:Handler"] if r else [SHARED]}),
    ("AgreementError: ranks disagree on what the handlers reduce",
     lambda _: {"handlers": [Impure]}),
    ("AgreementError ... rank 1: PlanError: handler ... KeyError('dp') (test_sync_failures.py:",
     lambda _: {"handlers": [Raises]}),
    ("PlanError: 'a' on stage 0 and 'a' on stage 1 ... pipeline-shared",
     lambda _: {"handlers": [DATA]}),
    ("AgreementError ... rank 1: ", lambda r: {"tied": None if r else [["a"], ["b"]]}),
]  # fmt: skip


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("says", "options"), WRONG)
def test_ranks_that_disagree_all_end_with_the_same_error(
    says: str, options: Callable[[int], dict[str, Any]]
) -> None:
    given = {"tied": [["a"], ["b"]], "handlers": [Optioned], **options(rank())}
    modules = {rank(): stage(a=(2,), b=(2,))}
    refused = outcome(lambda: GradientSync(modules, Topology.create(pipeline=2), **given))
    assert [part for part in says.split(" ... ") if part not in refused] == []
    assert gathered(refused) == [refused] * 2


@pytest.mark.ranks(2)
def test_models_that_differ_are_every_ranks_error() -> None:
    def differing(**own: Any) -> Callable[[], GradientSync]:
        return lambda: replicated(stage(**({"a": (2,), "b": (2,)} | (own if rank() else {}))))

    parameters = "AgreementError: ranks disagree on the parameters of stage 0"
    module = stage(a=(2 + rank(),), b=(2,))
    twice = stage(a=(2,))
    if rank():  # a second name of a parameter is no difference
        twice.again = twice.a
    for make, parts in (
        (lambda: tied(module, "a"), ["PlanError", "shape is (3,) and the other's (2,)"]),
        (differing(a=(3,)), [parameters, "a (3,)"]),
    ):
        refused = outcome(make)
        assert [part for part in parts if part not in refused] == [], refused
        assert gathered(refused) == [refused] * 2
    assert outcome(lambda: replicated(twice).close()) == "None"


# A step that fails on one rank ends on all of them, and they go on together.


FAILED_ELSEWHERE = "ReduceError: a step failed on another rank: rank 1: MemoryError: too large"


def told(function: Callable[[], object]) -> str:
    """Returns what a function says, or raises: interrupts too."""
    try:
        return outcome(function)
    except BaseException as error:  # noqa: BLE001 - whatever it is
        return f"{type(error).__name__}: {error}"


def made(*names: str, **options: Any) -> tuple[nn.Module, GradientSync]:
    module = stage(**dict.fromkeys(names or ("a",), (1,)))
    return module, tied(module, *(names or ("a",)), **options)


def reduce(sync: GradientSync, module: nn.Module) -> None:
    give(module, a=1.0)
    sync.stage_final(rank())
    sync.finish()


def leave(*_: object, **__: object) -> None:
    raise SystemExit(0)


@pytest.mark.ranks(2)
def test_a_handler_that_wants_to_end_the_process_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue 16, point 9: the process ended with 0, and the other rank waited."""
    if rank() == 1:
        monkeypatch.setattr(PipelineShared, "launch", leave)
    module, sync = made()
    refused = told(lambda: step(sync, module, a=1.0))
    own, other = "ReduceError: rank 1: bucket 0 ", "ReduceError: a step failed on another rank"
    assert refused.startswith(own if rank() else other)
    again = told(sync.prepare)
    own, other = "ReduceError: this GradientSync failed", "ReduceError: this GradientSync"
    assert again.startswith(own if rank() else other)
    assert all("SystemExit" in each for each in (refused, again))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "error", [SystemExit(0), SystemExit("over"), KeyboardInterrupt()], ids=repr
)
def test_what_ends_the_process_while_ranks_agree_is_told(error: BaseException) -> None:
    def raise_on_one() -> int:
        if rank() == 1:
            raise error
        return rank()

    refused = told(lambda: agree("a thing", raise_on_one))
    name = type(error).__name__
    is_own = rank() == 1 and name == "KeyboardInterrupt"
    assert refused.startswith(f"{name}: " if is_own else f"AgreementError: rank 1: {name}")


def test_alone_an_exit_is_an_error_too() -> None:
    """Issue 16, point 9: a factory that exits ended the run with 0, and nothing was trained."""
    assert told(lambda: agree("a thing", leave)) == "AgreementError: a thing failed: SystemExit: 0"


@pytest.mark.ranks(2, ends_world=True)
@pytest.mark.parametrize("goes_on", [True, False])
def test_others_wait_for_a_rank_that_is_refused_a_verb_until_the_time_is_over(
    goes_on: bool,
) -> None:
    """Issue 16, point 10 (2.3): the other rank waited as long as the process lived."""
    module, sync = made(step_timeout_seconds=30.0 if goes_on else 2.0)
    sync.prepare()
    give(module, a=1.0)
    if rank() == 0:
        refused = told(sync.finish)
        assert refused.startswith("StepError: finish() before stage_final()")
        if goes_on:
            sync.stage_final(0)
    else:
        sync.stage_final(1)
    if goes_on:
        sync.finish()
        assert grads(module) == {"a": [2.0]}
    elif rank() == 1:
        assert told(sync.finish).startswith("StallError: rank 0 was outside of pipegrad (")
    else:
        time.sleep(6.0)


@pytest.mark.ranks(2)
def test_an_aborted_step_leaves_nothing_and_all_go_on() -> None:
    """Issue 16, point 10 (runtime, 4 and 14): a part of the gradients was left and added to."""
    module, sync = made("a", "b", bucket_bytes=0)
    for finals in (0, 1, 2):  # rank 1 fails before, among and behind its launches
        sync.prepare()
        give(module, a=5.0, b=5.0)
        if rank() == 1 and finals < 2:
            if finals:
                sync.parameters_final(1, [module.get_parameter("b")])
            sync.abort(MemoryError("too large"))
        else:
            sync.stage_final(rank())
            refused = told(sync.finish)
            assert refused == "None" if finals == 2 else refused.startswith(FAILED_ELSEWHERE)
        assert [p.grad is None for p in module.parameters()] == [finals < 2] * 2
        module.zero_grad()
        assert step(sync, module, a=1.0, b=2.0) == {"a": [2.0], "b": [4.0]}
        module.zero_grad()
    with sync.accumulate():
        step(sync, module, a=1.0, b=1.0)
        sync.prepare()
        give(module, a=1.0, b=1.0)
    sync.abort(MemoryError("too large"))
    assert [p.grad is None for p in module.parameters()] == [True, True]
    assert step(sync, module, a=1.0, b=2.0) == {"a": [2.0], "b": [4.0]}
    # An abort after accumulating is of the next step. The other rank finished with a gradient that
    # lacked a part, and nobody said so.
    module, sync = made()
    with sync.accumulate():
        sync.prepare()
        give(module, a=1.0)
    if rank() == 1:
        sync.abort(MemoryError("no data"), begun=False)
    else:
        sync.prepare()
        assert "rank 1: MemoryError: no data" in told(lambda: reduce(sync, module))
    module.zero_grad()
    assert sync._failures.step == 2
    assert step(sync, module, a=3.0) == {"a": [6.0]}
    # A final failure is remembered though an interrupt comes. Ctrl-C comes while a rank posts a
    # failure that is final.
    _, sync = made()
    sync.prepare()
    with mock.patch.object(FailureNotice, "post", side_effect=KeyboardInterrupt):
        assert told(lambda: sync.abort(MemoryError("x"), final=True)) == "KeyboardInterrupt: "
    assert "failed before and the ranks are" in told(sync.prepare)


class SumsLate(PipelineShared):
    """All of its communication is in the wait, which comes late; `ended` counts them."""

    ended = 0

    def launch(self, bucket: FlatBucket, reduction: ReductionStep, group: Any) -> Work:
        def wait() -> None:
            dist.all_reduce(bucket.buffer, group=group)
            self.ended += 1

        return LateWork(wait)


@pytest.mark.ranks(2)
def test_no_rank_steps_on_a_failed_step_where_no_wait_blocks_the_host() -> None:
    """As with NCCL: a slower rank fails when the others have launched and waited for everything."""
    module = stage(w=(3,))
    with mock.patch.object(Groups, "block_host", return_value=False):
        sync = tied(module, "w", handlers=["noop"])
    for fails in (True, False, True):
        module.zero_grad()
        sync.prepare()
        give(module, w=1.0)
        sync.stage_final(rank())
        if fails and rank() == 1:
            time.sleep(0.5)
            sync.abort(RuntimeError("late"))
        elif fails:
            assert "rank 1: RuntimeError: late" in outcome(sync.finish)
        else:
            sync.finish()
        assert (module.w.grad is None) == fails
    sync.close()


@pytest.mark.ranks(2)
def test_a_step_that_one_rank_has_made_and_another_has_not_ends_the_training() -> None:
    """The stages share nothing. They went on with parameters of different steps."""
    module = stage(w=(2,))
    sync = tied(module)
    optimizer = sync.optimizer(torch.optim.SGD, lr=1.0)

    def train(number: int) -> None:
        sync.prepare()
        give(module, w=1.0)
        if number == 3 and rank() == 1:
            store().wait(["half made"], timedelta(seconds=60))
            sync.abort(error := RuntimeError("bad batch"))
            raise error
        sync.stage_final(rank())
        sync.finish()
        optimizer.step()
        optimizer.zero_grad()
        if number == 3:
            store().set("half made", b"")

    told = [gathered(outcome(partial(train, number))) for number in range(1, 7)]
    assert ["Error" in words for words in told[2]] == [False, True]
    assert "step 3 has failed on another rank after it ended on this one" in told[4][0]
    assert all("Error" in words for words in told[5]), told
    sync.close()


@pytest.mark.ranks(2)
def test_late_work_of_a_failed_step_waits_for_no_verb() -> None:
    """It stood behind the meeting of all ranks: on devices both would have waited for ever."""
    late = SumsLate()
    module, sync = made(handlers=[late])
    step(sync, module, a=1.0)
    module.zero_grad()
    if rank() == 1:
        sync.prepare()
        sync.abort(MemoryError("too large"))
        # In step 2 all ranks meet; this one does not go on before rank 0 says so.
        store().wait(["late work"], timedelta(seconds=60))
    else:
        refused = told(lambda: step(sync, module, a=1.0))
        assert refused.startswith("ReduceError: a step failed on another rank")
        began = time.monotonic()
        while late.ended < 2 and time.monotonic() - began < 30:  # rank 1 is not called
            time.sleep(0.01)
        store().set("late work", b"")
    assert late.ended == 2
    assert step(sync, module, a=3.0) == {"a": [6.0]}


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


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "refused", [refused_while_accumulating, refused_while_leaving, refused_without_a_step]
)
def test_a_refused_verb_counts_steps(refused: Callable[[GradientSync, nn.Module], None]) -> None:
    """Failures were posted for a step where no other rank read them."""
    module, sync = made()
    refused(sync, module)
    module.zero_grad()
    assert len(set(gathered(sync._failures.step))) == 1
    sync.prepare()
    if rank() == 1:
        sync.abort(MemoryError("too large"))
    else:
        assert told(lambda: reduce(sync, module)).startswith(FAILED_ELSEWHERE)
    assert step(sync, module, a=3.0) == {"a": [6.0]}
