"""What fails on one rank is every rank's error, soon: in a comm stream, at the start, mid-step."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipegrad import (
    FlatBucket,
    GradientSync,
    ParameterRecord,
    Reduction,
    ReductionStep,
    Topology,
    Work,
)
from pipegrad_handlers.pipeline_shared import PipelineShared
from tests.support.gradients.cases import (
    DATA,
    SHARED,
    Case,
    give,
    on,
    outcome,
    rank,
    replicated,
    replies,
    stage,
    step,
    tied,
)

TWO: list[Case] = []


two = replies(2, TWO)


class FailsOnOne(PipelineShared):
    """Fails on rank 1, for the bucket of `b` alone."""

    def launch(
        self, bucket: FlatBucket, reduction: ReductionStep, group: dist.ProcessGroup
    ) -> Work:
        if rank() == 1 and bucket.buffer[0] == 11:
            raise OSError("no route to host")
        return super().launch(bucket, reduction, group)


@on(TWO)
def comm_stream_failure() -> Any:
    """Values arrive in the first step. In the second, rank 1 cannot send `b`."""
    module = stage(a=(1,), b=(1,))
    sync = tied(module, "a", "b", handlers=[FailsOnOne], bucket_bytes=0, comm_streams=1)
    right = step(sync, module, a=1.0, b=2.0)
    module.zero_grad()
    if rank() == 0:  # a refusal that one rank alone meets does not part the ranks
        give(module, a=1.0)
        module.zero_grad()
    began = time.monotonic()
    said = outcome(lambda: step(sync, module, a=1.0, b=11.0))
    seconds = time.monotonic() - began
    return right, said, outcome(sync.prepare), outcome(sync.finish), seconds


class GivesNothing(PipelineShared):
    """Forgets to return what it launched."""

    def launch(
        self, bucket: FlatBucket, reduction: ReductionStep, group: dist.ProcessGroup
    ) -> Work:
        return None  # type: ignore[return-value]


@on(TWO)
def launch_without_work() -> Any:
    module = stage(a=(1,))
    sync = tied(module, "a", handlers=[GivesNothing])
    return outcome(lambda: step(sync, module, a=1.0))


def test_a_launch_that_returns_nothing_is_told(two: list[dict[str, Any]]) -> None:
    """Issue 16, point 18. It was "'NoneType' object has no attribute 'wait'"."""
    for reply in two:
        told = reply["launch_without_work"]
        assert told.startswith("ReduceError: ")
        assert "GivesNothing" in told
        assert "launch() returned None, expected a Work, with a wait()" in told


@pytest.mark.smoke
def test_a_failure_in_a_comm_stream_is_every_ranks_error(two: list[dict[str, Any]]) -> None:
    for reply in two:
        right, said, prepared, finished, seconds = reply["comm_stream_failure"]
        assert right == {"a": [2.0], "b": [4.0]}
        assert said.startswith("ReduceError: ")
        told = [
            "rank 1",
            "bucket 0 (0.b",
            "over ranks [0, 1]",
            "FailsOnOne",
            "no route to host",
        ]
        assert [part for part in told if part not in said] == []
        assert prepared.startswith("ReduceError: this GradientSync failed before")
        assert "no route to host" in prepared
        assert finished.startswith("StepError: finish() without prepare()")
        assert seconds < 20


@on(TWO)
def refused_on_one() -> Any:
    """Rank 0 has to prepare twice; the failure notice must still be the same step's."""
    module = stage(a=(1,))
    sync = tied(module, "a", handlers=[FailsOnOne])
    step(sync, module, a=1.0)
    if rank() == 1:
        module.zero_grad()
    else:
        outcome(sync.prepare)
        outcome(sync.prepare)
        module.zero_grad()
    began = time.monotonic()
    said = outcome(lambda: step(sync, module, a=11.0))
    return said, time.monotonic() - began


def test_a_refused_prepare_does_not_part_the_ranks(two: list[dict[str, Any]]) -> None:
    for said, seconds in (reply["refused_on_one"] for reply in two):
        assert "no route to host" in said
        assert seconds < 20


@on(TWO)
def abort_on_one() -> Any:
    """Rank 1's forward fails when rank 0 already waits for its gradients."""
    module = stage(a=(1,))
    sync = tied(module, "a")
    began = time.monotonic()
    if rank() == 1:
        sync.prepare()
        sync.abort(MemoryError("too large"))
        return "", 0.0
    return outcome(lambda: step(sync, module, a=1.0)), time.monotonic() - began


def test_a_step_aborted_on_one_rank_ends_on_those_that_wait(two: list[dict[str, Any]]) -> None:
    said, seconds = two[0]["abort_on_one"]
    assert said.startswith("ReduceError: ")
    assert "rank 1: MemoryError: too large" in said
    assert seconds < 20


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


def table(cls: type, **options: object) -> dict[str, object]:
    return {"name": cls, **options}


@on(TWO)
def disagree() -> Any:
    here = rank()
    cases: dict[str, Mapping[str, Any]] = {
        "handlers": {"handlers": [Optioned] if here else [Optioned, DATA]},
        "options": {"handlers": [table(Optioned, size=here)]},
        "bucket_bytes": {"bucket_bytes": 100 + here},
        "reduce_dtype": {"reduce_dtype": torch.float32 if here else None},
        "comm_streams": {"comm_streams": 1 + here},
        "allow_unsynced": {"allow_unsynced": ["x"] * here},
        "stage_ticks": {"stage_ticks": [1, here]},
        "tied": {"tied": [["a"], {0: "b", 1: "b"}] if here else [["a"], ["b"]]},
        "missing file": {"handlers": [table(Optioned, path="groups.toml")]},
        "import": {"handlers": [f"no_module_{here}:Handler"] if here else [SHARED]},
        "no handler": {"handlers": ["pipeline-shred"]},
        "impure": {"handlers": [Impure]},
        "raises": {"handlers": [Raises]},
        "uncovered": {"handlers": [DATA]},
        "arguments": {"comm_streams": 2 - 2 * here},
        "not a list": {"tied": None if here else [["a"], ["b"]]},
        "no patterns": {"allow_unsynced": None if here else ()},
        "missing name": {"tied": [["z"]]},
    }
    found = {}
    for name, options in cases.items():
        began = time.monotonic()
        given = {"tied": [["a"], ["b"]], "handlers": [Optioned], "agree_seconds": 5, **options}
        modules = {here: stage(a=(2,), b=(2,))}
        said = outcome(partial(GradientSync, modules, Topology.create(pipeline=2), **given))
        found[name] = (said, time.monotonic() - began)
    module = stage(a=(2 + here,), b=(2,))
    found["shapes"] = (outcome(lambda: tied(module, "a")), 0.0)
    found["copies"] = (outcome(lambda: replicated(module)), 0.0)
    began = time.monotonic()
    if here == 0:  # the other never arrives
        absent = outcome(lambda: tied(stage(a=(1,)), "a", agree_seconds=0.5))
        found["absent"] = (absent, time.monotonic() - began)
    return found


def test_ranks_that_disagree_all_end_with_the_same_error(two: list[dict[str, Any]]) -> None:
    first, second = (reply["disagree"] for reply in two)
    absent, seconds = first.pop("absent")
    assert "AgreementError: GradientSync: nothing heard" in absent
    assert "nothing heard from ranks [1] within 0.5 s" in absent
    assert seconds < 20
    expected = {
        "handlers": ["AgreementError: ranks disagree on handlers", "ranks [0]", "data-parallel"],
        "options": ["AgreementError: ranks disagree on handlers", "'size', '0'", "'size', '1'"],
        "bucket_bytes": ["ranks disagree on bucket_bytes", "ranks [0]: 100", "ranks [1]: 101"],
        "reduce_dtype": ["ranks disagree on reduce_dtype", "None", "torch.float32"],
        "comm_streams": ["ranks disagree on comm_streams", "ranks [1]: 2"],
        "allow_unsynced": ["ranks disagree on allow_unsynced"],
        "stage_ticks": ["ranks disagree on stage_ticks"],
        "tied": ["ranks disagree on tied"],
        "missing file": [
            "AgreementError",
            "rank 1: PluginOptionError",
            "no such file: groups.toml",
        ],
        "import": ["AgreementError", "rank 1: PluginLoadError", "no_module_1"],
        "no handler": ["PluginNotFoundError: no plug-in", "'pipeline-shred'", "pipeline-shared"],
        "impure": ["AgreementError: ranks disagree on what the handlers reduce"],
        "raises": [
            "AgreementError",
            "rank 1: PlanError: handler",
            "KeyError('dp') (test_sync_failures.py:",
        ],
        "uncovered": ["PlanError: 'a' on stage 0 and 'a' on stage 1", "pipeline-shared"],
        "arguments": ["AgreementError", "rank 1: PlanError", "comm_streams=0"],
        "not a list": ["AgreementError", "rank 1: "],
        "no patterns": ["AgreementError", "rank 1: "],
        "missing name": ["PlanError", "no such parameter: ['z']"],
        "shapes": ["PlanError", "shape is (3,) and the other's (2,)"],
        "copies": ["AgreementError: ranks disagree on the parameters of stage 0", "a (3,)"],
    }
    assert list(first) == list(second) == list(expected)
    for name, parts in expected.items():
        said, _ = first[name]
        assert said == second[name][0], name
        assert [part for part in parts if part not in said] == [], name
    assert max(seconds for _, seconds in (*first.values(), *second.values())) < 20
