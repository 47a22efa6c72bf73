"""What `attach` and a step refuse, they refuse on all ranks alike, and a later try works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleGPipe
from torch.torch_version import TorchVersion

import pipegrad
from pipegrad import Topology
from pipegrad.errors import PipegradError
from tests.support.pipeline.pipelines import CPU, Case, Cut, loss_of
from tests.support.ranked import gathered

BOTH = ("pipeline-shared", "data-parallel")


def attach(cut: Cut, schedule: Any = None, **options: Any) -> pipegrad.GradientSync:
    options = {"tied": cut.tied, "topology": cut.placed, "handlers": BOTH, **options}
    return pipegrad.attach(schedule or cut.schedule(), **options)


def one_stage_each(topology: Topology, **changes: Any) -> Cut:
    return Cut(Case("1F1B", **changes), topology)


def twice(topology: Topology) -> None:
    cut = one_stage_each(topology)
    schedule = cut.schedule()
    sync = attach(cut, schedule)
    try:
        attach(cut, schedule)
    finally:
        sync.close()


def on_the_wrong_group(topology: Topology) -> None:
    cut = one_stage_each(topology)
    stage = PipelineStage(cut.stages[0].submod, dist.get_rank(), dist.get_world_size(), CPU)
    attach(cut, ScheduleGPipe(stage, 4, loss_fn=loss_of))


def wrapped_by_fsdp(topology: Topology, *, also_first: bool) -> None:
    cut = one_stage_each(topology)
    assert topology.mesh is not None
    if also_first or topology.coordinate("pp") == 1:
        fully_shard(cut.stages[0].submod, mesh=topology.mesh["dp"])
    attach(cut)


def stages_of_another_torch(topology: Topology) -> None:
    """torch 2.15.0 has stages without this attribute, and `attach` failed in the first step."""
    cut = one_stage_each(topology)
    schedule = cut.schedule()
    del cut.stages[0].fwd_cache
    attach(cut, schedule)


def split_backward_of_old(topology: Topology) -> None:
    version, torch.__version__ = torch.__version__, TorchVersion("2.12.1")
    try:
        attach(one_stage_each(topology)).close()
        attach(Cut(Case("ZBVZeroBubble"), topology))
    finally:
        torch.__version__ = version


def frozen_on_one_rank(topology: Topology) -> None:
    cut = one_stage_each(topology)
    if dist.get_rank() == 2:
        cut.parameters()[1].requires_grad = False
    attach(cut)


def forgotten_zero_grad(topology: Topology) -> None:
    cut = one_stage_each(topology)
    schedule = cut.schedule()
    sync, inputs = attach(cut, schedule), cut.inputs()
    try:
        schedule.step(*inputs["args"], target=inputs["target"], losses=[])
        schedule.step(*inputs["args"], target=inputs["target"], losses=[])
    except PipegradError:
        for set_to_none in (False, True):  # and goes on when the gradients are gone
            for parameter in cut.parameters():
                parameter.grad = None if set_to_none else torch.zeros_like(parameter)
            schedule.step(*inputs["args"], target=inputs["target"], losses=[])
        raise
    finally:
        sync.close()


def forgotten_zero_grad_of_clipped(topology: Topology) -> None:
    cut = one_stage_each(topology)
    schedule = cut.schedule()
    sync, inputs = attach(cut, schedule), cut.inputs()
    schedule.step(*inputs["args"], target=inputs["target"], losses=[])
    sync.clip_grad_norm_(0.1)
    with sync.accumulate():
        schedule.step(*inputs["args"], target=inputs["target"], losses=[])


REFUSALS: dict[str, tuple[Callable[[Topology], object], str, str]] = {
    "twice": (twice, "PlanError", "attached already"),
    "on the wrong group": (on_the_wrong_group, "AgreementError", "topology.group_along('pp')"),
    "placed elsewhere": (
        lambda at: attach(one_stage_each(at), topology=at.with_stages([1, 0])),
        "TopologyError",
        "leave stage_to_rank out",
    ),
    "DDP": (lambda at: attach(one_stage_each(at, wrapper="ddp")), "PlanError", "reduced twice"),
    "FSDP": (
        lambda at: wrapped_by_fsdp(at, also_first=True),
        "PlanError",
        "it would be reduced twice; drop the handler",
    ),
    "FSDP on one stage": (
        lambda at: wrapped_by_fsdp(at, also_first=False),
        "PlanError",
        "(32, 16) by Shard(dim=0) over dp of 2",
    ),
    "stages of another torch": (
        stages_of_another_torch,
        "PlanError",
        "does not know the pipeline stages of torch",
    ),
    "split backward of old": (
        split_backward_of_old,
        "PlanError",
        "torch 2.12.1 computes wrong gradients",
    ),
    "an undeclared tie": (
        lambda at: attach(one_stage_each(at), tied=()),
        "PlanError",
        "nobody declared them tied",
    ),
    "an uncovered tie": (
        lambda at: attach(one_stage_each(at), handlers=("data-parallel",)),
        "PlanError",
        "add 'pipeline-shared'",
    ),
    "a misnamed tie": (
        lambda at: attach(one_stage_each(at), tied=[["0.weight", "8.weight"]]),
        "PlanError",
        "no such parameter: ['8.weight']",
    ),
    "another handler on one rank": (
        lambda at: attach(one_stage_each(at), handlers=BOTH[: 1 if dist.get_rank() == 3 else 2]),
        "AgreementError",
        "ranks disagree on handlers",
    ),
    "frozen on one rank": (
        frozen_on_one_rank,
        "AgreementError",
        "ranks disagree on the parameters of stage 1",
    ),
    "no zero_grad": (forgotten_zero_grad, "StepError", "call optimizer.zero_grad()"),
    "no zero_grad of clipped": (
        forgotten_zero_grad_of_clipped,
        "StepError",
        "call optimizer.zero_grad()",
    ),
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("refused", "kind", "words"), REFUSALS.values(), ids=REFUSALS)
def test_is_refused_on_all_ranks_in_the_same_words(
    refused: Callable[[Topology], object], kind: str, words: str
) -> None:
    with pytest.raises(PipegradError) as caught:
        refused(Topology.create(pipeline=2))
    assert type(caught.value).__name__ == kind
    assert words in str(caught.value)
    if kind != "StepError":  # which names what this rank holds
        assert len(set(gathered(str(caught.value)))) == 1
