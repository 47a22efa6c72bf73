"""`attach` refuses schedules and wrappers on all ranks alike, and leaves others as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    _ScheduleForwardOnly,
)
from torch.nn.parallel import DistributedDataParallel
from torch.torch_version import TorchVersion

import pipegrad
from pipegrad import Topology
from pipegrad.errors import PipegradError
from tests.support.pipeline.pipelines import CPU, Case, Cut, loss_of
from tests.support.pipeline.schedulers import error
from tests.support.ranked import gathered
from tests.support.rounding import rounding
from tests.support.versions import needs_2_13

pytestmark = pytest.mark.ranks(4)
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


def wrapped_by_ddp(topology: Topology, *, inside: bool = False, **options: Any) -> None:
    """torch's own assertion failed in the second step, or gradients were 0.8 off."""
    cut = one_stage_each(topology)
    stage, group = cut.stages[0], topology.group_along("dp")
    wrapped = DistributedDataParallel(stage.submod, process_group=group, **options)
    stage.submod = nn.Sequential(wrapped) if inside else wrapped
    attach(cut)


def stages_of_another_torch(topology: Topology) -> None:
    """torch 2.15.0 renamed this attribute, and `attach` failed in the first step."""
    cut = one_stage_each(topology)
    schedule = cut.schedule()
    for name in ("fwd_cache", "_forward_chunk_states"):
        vars(cut.stages[0]).pop(name, None)
    attach(cut, schedule)


def split_backward_of_old(topology: Topology) -> None:
    version, torch.__version__ = torch.__version__, TorchVersion("2.12.1")
    try:
        attach(one_stage_each(topology)).close()
        attach(Cut(Case("ZBVZeroBubble"), topology))
    finally:
        torch.__version__ = version


PLAN, DISAGREE = "PlanError", "AgreementError"
REFUSALS: list[tuple[Callable[[Topology], object], str, str]] = [
    (twice, PLAN, "attached already"),
    (on_the_wrong_group, DISAGREE, "topology.group_along('pp')"),
    (
        lambda at: attach(one_stage_each(at), topology=at.with_stages([1, 0])),
        "TopologyError",
        "leave stage_to_rank out",
    ),
    (lambda at: attach(one_stage_each(at, wrapper="ddp")), PLAN, "reduced twice"),
    (wrapped_by_ddp, DISAGREE, "0 has a DistributedDataParallel that reduces wrong"),
    (
        lambda at: wrapped_by_ddp(at, find_unused_parameters=True, static_graph=True),
        DISAGREE,
        "find_unused_parameters=True and without static_graph",
    ),
    (
        lambda at: wrapped_by_ddp(at, find_unused_parameters=True, inside=True),
        DISAGREE,
        "or wrap the whole stage",
    ),
    (stages_of_another_torch, PLAN, "does not know the pipeline stages of torch"),
    (split_backward_of_old, PLAN, "torch 2.12.1 computes wrong gradients"),
    (lambda at: attach(one_stage_each(at), tied=()), PLAN, "nobody declared them tied"),
]


@pytest.mark.parametrize(("refused", "kind", "words"), REFUSALS, ids=[row[2] for row in REFUSALS])
def test_is_refused_on_all_ranks_in_the_same_words(
    refused: Callable[[Topology], object], kind: str, words: str
) -> None:
    with pytest.raises(PipegradError) as caught:
        refused(Topology.create(pipeline=2))
    assert type(caught.value).__name__ == kind
    assert words in str(caught.value)
    assert len(set(gathered(str(caught.value)))) == 1


# What `attach` leaves alone, and what torch's schedules do to gradients and hooks.


@pytest.mark.parametrize("kind", [_ScheduleForwardOnly, ScheduleGPipe])
def test_schedules_without_a_loss_are_left_alone(kind: Any) -> None:
    """Gradients, if any, and statistics stay as they are."""
    topology = Topology.create(pipeline=2)
    cut = one_stage_each(topology)
    schedule = kind(cut.stages[0], 4)
    sync = attach(cut, schedule)
    statistics = sync.statistics()
    first, *others = cut.parameters()
    first.grad = torch.full_like(first, 0.5)
    output = schedule.step(*cut.inputs()["args"])
    assert torch.equal(first.grad, torch.full_like(first, 0.5))
    assert [parameter.grad for parameter in others] == [None] * len(others)
    assert (output is not None) == (topology.coordinate("pp") == 1)
    assert sync.statistics() == statistics
    sync.close()


def stages_of(modules: list[Any], topology: Topology) -> list[Any]:
    """Returns this rank's stages, every second one."""
    own = range(topology.coordinate("pp"), len(modules), 2)
    group = topology.group_along("pp")
    return [PipelineStage(modules[i], i, len(modules), CPU, group=group) for i in own]


class Table(nn.Module):
    """The gradients of its parameters are views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.a.view(-1) + self.b.view(-1))


@pytest.mark.parametrize(
    "kind",
    [ScheduleInterleaved1F1B, pytest.param(ScheduleInterleavedZeroBubble, marks=needs_2_13)],
)
def test_gradients_that_are_views_of_one_tensor_are_summed_apart(kind: Any) -> None:
    """torch's split backward sets gradients itself: both parameters had the sum of both."""
    topology = Topology.create(pipeline=2)
    modules = [Table() for _ in range(4)]
    here, stages = topology.coordinate("pp"), stages_of(modules, topology)
    x, target = torch.randn(2, 8, 8)
    schedule = kind(stages, 4, nn.functional.mse_loss)
    sync = pipegrad.attach(schedule, topology=topology, handlers=["data-parallel"])
    schedule.step(*([] if here else [x]), target=target if here else None)
    loss = nn.functional.mse_loss(nn.Sequential(*modules)(x), target)
    parameters = [p for module in modules for p in module.parameters()]
    true = dict(zip(parameters, torch.autograd.grad(loss, parameters), strict=True))
    for parameter in (p for stage in stages for p in stage.submod.parameters()):
        assert error(parameter.grad, true[parameter]) <= rounding(64)
    sync.close()


class Halving(nn.Linear):
    """Halves the gradient of its input, by a hook of its own."""

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 0.5)
        return super().forward(x)


@pytest.mark.parametrize("kind", [ScheduleGPipe, ScheduleInterleaved1F1B])
def test_a_hook_on_an_input_is_that_of_its_microbatch(kind: Any) -> None:
    """torch hands out one tensor in every step, so from the second step on hooks piled up."""
    topology = Topology.create(pipeline=2)
    here, replica = topology.coordinate("pp"), topology.coordinate("dp")
    modules = [Halving(4, 4) for _ in range(2 if kind is ScheduleGPipe else 4)]
    stages = stages_of(modules, topology)
    schedule = kind(stages[0] if kind is ScheduleGPipe else stages, 2, nn.functional.mse_loss)
    sync = pipegrad.attach(schedule, topology=topology, handlers=["data-parallel"])
    for _ in range(3):
        x, target = torch.randn(2, 2, 4, 4)
        schedule.step(*([] if here else [x[replica]]), target=target[replica] if here else None)
        whole = nn.Sequential(*modules)
        parameters = list(whole.parameters())
        loss = nn.functional.mse_loss(whole(x.flatten(0, 1)), target.flatten(0, 1))
        true = dict(zip(parameters, torch.autograd.grad(loss, parameters), strict=True))
        for parameter in (p for stage in stages for p in stage.submod.parameters()):
            assert error(parameter.grad, true[parameter]) <= rounding(64)
            parameter.grad = None
    sync.close()
