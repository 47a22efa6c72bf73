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
    rank, everybody = dist.get_rank(), dist.get_world_size()
    stage = PipelineStage(cut.stages[0].submod, rank, everybody, CPU)
    attach(cut, ScheduleGPipe(stage, 4, loss_fn=loss_of))


def placed_elsewhere(topology: Topology) -> None:
    cut = one_stage_each(topology)
    attach(cut, topology=topology.with_stages([1, 0]))


def wrapped_by_ddp(topology: Topology) -> None:
    attach(one_stage_each(topology, wrapper="ddp"))


def wrapped_by_fsdp(topology: Topology) -> None:
    cut = one_stage_each(topology)
    assert topology.mesh is not None
    fully_shard(cut.stages[0].submod, mesh=topology.mesh["dp"])
    attach(cut)


def wrapped_by_fsdp_on_one_stage(topology: Topology) -> None:
    cut = one_stage_each(topology)
    assert topology.mesh is not None
    if topology.coordinate("pp") == 1:
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


def undeclared_tie(topology: Topology) -> None:
    attach(one_stage_each(topology), tied=())


def uncovered_tie(topology: Topology) -> None:
    attach(one_stage_each(topology), handlers=("data-parallel",))


def misnamed_tie(topology: Topology) -> None:
    attach(one_stage_each(topology), tied=[["0.weight", "8.weight"]])


def another_handler_on_one_rank(topology: Topology) -> None:
    attach(one_stage_each(topology), handlers=BOTH[: 1 if dist.get_rank() == 3 else 2])


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


REFUSALS: list[tuple[Callable[[Topology], None], str, str]] = [
    (twice, "PlanError", "attached already"),
    (on_the_wrong_group, "AgreementError", "topology.group_along('pp')"),
    (placed_elsewhere, "TopologyError", "leave stage_to_rank out"),
    (wrapped_by_ddp, "PlanError", "reduced twice"),
    (wrapped_by_fsdp, "PlanError", "it would be reduced twice; drop the handler"),
    (wrapped_by_fsdp_on_one_stage, "PlanError", "(32, 16) by Shard(dim=0) over dp of 2"),
    (stages_of_another_torch, "PlanError", "does not know the pipeline stages of torch"),
    (split_backward_of_old, "PlanError", "torch 2.12.1 computes wrong gradients"),
    (undeclared_tie, "PlanError", "nobody declared them tied"),
    (uncovered_tie, "PlanError", "add 'pipeline-shared'"),
    (misnamed_tie, "PlanError", "no such parameter: ['8.weight']"),
    (another_handler_on_one_rank, "AgreementError", "ranks disagree on handlers"),
    (frozen_on_one_rank, "AgreementError", "ranks disagree on the parameters of stage 1"),
    (forgotten_zero_grad, "StepError", "call optimizer.zero_grad()"),
    (forgotten_zero_grad_of_clipped, "StepError", "call optimizer.zero_grad()"),
]


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("refused", "kind", "words"), REFUSALS, ids=[r[0].__name__ for r in REFUSALS]
)
def test_is_refused_on_all_ranks_in_the_same_words(
    refused: Callable[[Topology], None], kind: str, words: str
) -> None:
    with pytest.raises(PipegradError) as caught:
        refused(Topology.create(pipeline=2))
    assert type(caught.value).__name__ == kind
    assert words in str(caught.value)
    if kind != "StepError":  # which names what this rank holds
        assert len(set(gathered(str(caught.value)))) == 1
