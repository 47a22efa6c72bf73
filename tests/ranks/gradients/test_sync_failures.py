"""What fails on one rank is every rank's error, soon: in a comm stream, at the start, mid-step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch

from pipegrad import (
    GradientSync,
    ParameterRecord,
    Reduction,
    Topology,
)
from pipegrad.testing import run_ranks
from pipegrad_handlers.pipeline_shared import PipelineShared
from tests.support.gradients.cases import (
    DATA,
    SHARED,
    give,
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
@pytest.mark.smoke
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


@pytest.mark.ranks(2)
def test_a_refused_prepare_does_not_part_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 has to prepare twice; the failure notice must still be the same step's."""
    module = stage(a=(1,))
    sync = tied(module, "a")
    step(sync, module, a=1.0)
    if rank() == 0:
        for _ in range(2):
            assert outcome(sync.prepare).startswith("StepError: ")
    module.zero_grad()
    refuse_launches(monkeypatch)
    assert "no route to host" in outcome(lambda: step(sync, module, a=1.0))


class Optioned(PipelineShared):
    def __init__(self, *, size: int = 1, path: str = "") -> None:
        if path and rank():
            raise FileNotFoundError(f"no such file: {path}")
        self.size = size


class Impure(PipelineShared):
    """Says on each rank that only this rank's process averages."""

    def reductions(
        self, parameters: Sequence[ParameterRecord], topology: Topology
    ) -> Iterable[Reduction]:
        op = "mean" if rank() else "sum"
        return [Reduction(p, topology.ranks_of(p.holders), op) for p in parameters]  # type: ignore[arg-type]


class Raises(PipelineShared):
    def reductions(
        self, parameters: Sequence[ParameterRecord], topology: Topology
    ) -> Iterable[Reduction]:
        if rank():
            raise KeyError("dp")
        return super().reductions(parameters, topology)


# What all ranks say, in parts; and what each is given.
WRONG: list[tuple[str, Callable[[int], dict[str, Any]]]] = [
    ("AgreementError: ranks disagree on handlers ... ranks [0] ... data-parallel",
     lambda r: {"handlers": [Optioned] if r else [Optioned, DATA]}),
    ("AgreementError: ranks disagree on handlers ... 'size', '0' ... 'size', '1'",
     lambda r: {"handlers": [{"name": Optioned, "size": r}]}),
    ("ranks disagree on bucket_bytes ... ranks [0]: 100 ... ranks [1]: 101",
     lambda r: {"bucket_bytes": 100 + r}),
    ("ranks disagree on reduce_dtype ... None ... torch.float32",
     lambda r: {"reduce_dtype": torch.float32 if r else None}),
    ("ranks disagree on comm_streams ... ranks [1]: 2", lambda r: {"comm_streams": 1 + r}),
    ("ranks disagree on allow_unsynced", lambda r: {"allow_unsynced": ["x"] * r}),
    ("ranks disagree on stage_ticks", lambda r: {"stage_ticks": [1, r]}),
    ("ranks disagree on tied",
     lambda r: {"tied": [["a"], {0: "b", 1: "b"}] if r else [["a"], ["b"]]}),
    ("AgreementError ... rank 1: PluginOptionError ... no such file: groups.toml",
     lambda _: {"handlers": [{"name": Optioned, "path": "groups.toml"}]}),
    ("AgreementError ... rank 1: PluginLoadError ... no_module_1",
     lambda r: {"handlers": ["no_module_1:Handler"] if r else [SHARED]}),
    ("PluginNotFoundError: no plug-in ... 'pipeline-shred' ... pipeline-shared",
     lambda _: {"handlers": ["pipeline-shred"]}),
    ("AgreementError: ranks disagree on what the handlers reduce",
     lambda _: {"handlers": [Impure]}),
    ("AgreementError ... rank 1: PlanError: handler ... KeyError('dp') (test_sync_failures.py:",
     lambda _: {"handlers": [Raises]}),
    ("PlanError: 'a' on stage 0 and 'a' on stage 1 ... pipeline-shared",
     lambda _: {"handlers": [DATA]}),
    ("AgreementError ... rank 1: PlanError ... comm_streams=0",
     lambda r: {"comm_streams": 2 - 2 * r}),
    ("AgreementError ... rank 1: ", lambda r: {"tied": None if r else [["a"], ["b"]]}),
    ("AgreementError ... rank 1: ", lambda r: {"allow_unsynced": None if r else ()}),
    ("PlanError ... no such parameter: ['z']", lambda _: {"tied": [["z"]]}),
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
def test_shapes_that_differ_are_every_ranks_error() -> None:
    module = stage(a=(2 + rank(),), b=(2,))
    for make, parts in (
        (lambda: tied(module, "a"), ["PlanError", "shape is (3,) and the other's (2,)"]),
        (
            lambda: replicated(module),
            ["AgreementError: ranks disagree on the parameters of stage 0", "a (3,)"],
        ),
    ):
        refused = outcome(make)
        assert [part for part in parts if part not in refused] == []
        assert gathered(refused) == [refused] * 2


def never_arrives() -> str:
    return "" if rank() else outcome(lambda: tied(stage(a=(1,)), "a", agree_seconds=0.5))


def test_a_rank_that_never_arrives_is_named() -> None:
    """In ranks of its own: behind it they have agreed differently often."""
    refused, _ = run_ranks(never_arrives, 2, timeout_seconds=120)
    assert "AgreementError: GradientSync: nothing heard" in refused
    assert "nothing heard from ranks [1] within 0.5 s" in refused
