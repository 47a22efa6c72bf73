"""What `attach` and a step refuse, they refuse on all ranks alike, and a later try works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
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
from tests.support.pipeline.pipelines import (
    CPU,
    Case,
    CountingData,
    CountingShared,
    Cut,
    TorchSchedule,
    launches,
    loss_of,
)
from tests.support.pipeline.schedulers import error
from tests.support.ranked import gathered
from tests.support.rounding import rounding

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


def wrapped_by_fsdp(topology: Topology, *, also_first: bool) -> None:
    cut = one_stage_each(topology)
    assert topology.mesh is not None
    if also_first or topology.coordinate("pp") == 1:
        fully_shard(cut.stages[0].submod, mesh=topology.mesh["dp"])
    attach(cut)


def wrapped_by_ddp(topology: Topology, *, inside: bool = False, **options: Any) -> None:
    """torch's own assertion failed in the second step, or gradients were 0.8 off."""
    cut = one_stage_each(topology)
    stage, group = cut.stages[0], topology.group_along("dp")
    wrapped = DistributedDataParallel(stage.submod, process_group=group, **options)
    stage.submod = nn.Sequential(wrapped) if inside else wrapped
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
        sync.clip_grad_norm_(0.1)  # also of clipped ones
        schedule.step(*inputs["args"], target=inputs["target"], losses=[])
    except PipegradError:
        for set_to_none in (False, True):  # and goes on when the gradients are gone
            for parameter in cut.parameters():
                parameter.grad = None if set_to_none else torch.zeros_like(parameter)
            schedule.step(*inputs["args"], target=inputs["target"], losses=[])
        raise
    finally:
        sync.close()


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
    (lambda at: wrapped_by_fsdp(at, also_first=True), PLAN, "be reduced twice; drop the handler"),
    (lambda at: wrapped_by_fsdp(at, also_first=False), PLAN, "(32, 16) by Shard(dim=0) over dp of"),
    (stages_of_another_torch, PLAN, "does not know the pipeline stages of torch"),
    (split_backward_of_old, PLAN, "torch 2.12.1 computes wrong gradients"),
    (lambda at: attach(one_stage_each(at), tied=()), PLAN, "nobody declared them tied"),
    (lambda at: attach(one_stage_each(at), handlers=BOTH[1:]), PLAN, "add 'pipeline-shared'"),
    (
        lambda at: attach(one_stage_each(at), tied=[["0.weight", "8.weight"]]),
        PLAN,
        "no such parameter: ['8.weight']",
    ),
    (
        lambda at: attach(one_stage_each(at), handlers=BOTH[: 1 if dist.get_rank() == 3 else 2]),
        DISAGREE,
        "ranks disagree on handlers",
    ),
    (frozen_on_one_rank, DISAGREE, "ranks disagree on the parameters of stage 1"),
    (forgotten_zero_grad, "StepError", "call optimizer.zero_grad()"),
]


@pytest.mark.parametrize(("refused", "kind", "words"), REFUSALS, ids=[row[2] for row in REFUSALS])
def test_is_refused_on_all_ranks_in_the_same_words(
    refused: Callable[[Topology], object], kind: str, words: str
) -> None:
    with pytest.raises(PipegradError) as caught:
        refused(Topology.create(pipeline=2))
    assert type(caught.value).__name__ == kind
    assert words in str(caught.value)
    if kind != "StepError":  # which names what this rank holds
        assert len(set(gathered(str(caught.value)))) == 1


# What `attach` leaves alone, and the precision in which gradients accumulate and travel.


HANDLERS = (CountingShared, CountingData)


def is_full(tensor: Tensor | None, value: float | None) -> bool:
    if tensor is None or value is None:
        return tensor is None and value is None
    return torch.equal(tensor, torch.full_like(tensor, value))


@pytest.mark.parametrize("kind", [_ScheduleForwardOnly, ScheduleGPipe])
@pytest.mark.parametrize("gradient", [None, 0.5])
def test_schedules_without_a_loss_are_left_alone(kind: Any, gradient: float | None) -> None:
    """Gradients, if any, and statistics stay as they are."""
    topology = Topology.create(pipeline=2)
    cut = Cut(Case("GPipe"), topology)
    schedule = kind(cut.stages[0], 4)
    sync = pipegrad.attach(schedule, topology=topology, tied=cut.tied, handlers=HANDLERS)
    before, statistics = len(launches), sync.statistics()
    for parameter in cut.parameters():
        parameter.grad = None if gradient is None else torch.full_like(parameter, gradient)
    output = schedule.step(*cut.inputs()["args"])
    assert all(is_full(p.grad, gradient) for p in cut.parameters())
    assert (output is not None) == (topology.coordinate("pp") == 1)
    assert (before, statistics) == (len(launches), sync.statistics())
    sync.close()


def step(schedule: TorchSchedule, cut: Cut) -> dict[str, Tensor]:
    inputs = cut.inputs()
    schedule.step(*inputs["args"], target=inputs["target"], losses=[])
    return {name: p.grad for name, p in cut.named() if p.grad is not None}


@pytest.mark.parametrize("accumulates", [False, True], ids=["on the wire", "and accumulates"])
def test_bf16_parameters_may_have_sums_of_fp32(accumulates: bool) -> None:
    """Compares with sums of all ranks' own gradients, made in fp32 and rounded once at most."""
    topology = Topology.create(pipeline=2)

    def made(**options: Any) -> Cut:
        cut = Cut(Case("1F1B", model="half-precision", **options), topology)
        for parameter in cut.parameters() if accumulates else ():
            parameter.grad_dtype = torch.float32
        return cut

    alone, cut = made(scale_grads=False), made()
    raw = {name: gradient.float() / 4 for name, gradient in step(alone.schedule(), alone).items()}
    everywhere = gathered(raw)  # ranks 0 and 1 hold stage 0, 2 and 3 stage 1
    schedule = cut.schedule()
    chosen: dict[str, Any] = {} if accumulates else {"reduce_dtype": torch.float32}
    sync = pipegrad.attach(schedule, topology=topology, tied=cut.tied, handlers=HANDLERS, **chosen)
    num_rounded = 0
    for name, gradient in step(schedule, cut).items():
        names = next((tie for tie in cut.ties if name in tie), [name])
        means = [torch.stack([r[n] for r in everywhere if n in r]).mean(0) for n in names]
        true = torch.stack(means).sum(0)
        num_rounded += not torch.equal(true, true.bfloat16().float())
        assert gradient.dtype == (torch.float32 if accumulates else torch.bfloat16)
        assert torch.equal(gradient, true.to(gradient.dtype)), name
    assert num_rounded > 0, "the case shows nothing"
    assert {bucket.wire_dtype for bucket in sync.plan.buckets} == {torch.float32}
    assert sync.statistics().copies == (0 if accumulates else 13)
    sync.close()


class Table(nn.Module):
    """The gradients of its parameters are views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.a.view(-1) + self.b.view(-1))


@pytest.mark.parametrize("kind", [ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble])
def test_gradients_that_are_views_of_one_tensor_are_summed_apart(kind: Any) -> None:
    """torch's split backward sets gradients itself: both parameters had the sum of both."""
    topology = Topology.create(pipeline=2)
    here, group = topology.coordinate("pp"), topology.group_along("pp")
    modules = [Table() for _ in range(4)]
    x, target = torch.randn(2, 8, 8)
    stages: list[Any] = [
        PipelineStage(modules[index], index, 4, torch.device("cpu"), group=group)
        for index in (here, here + 2)
    ]
    schedule = kind(stages, 4, nn.functional.mse_loss)
    sync = pipegrad.attach(schedule, topology=topology, handlers=["data-parallel"])
    schedule.step(*([] if here else [x]), target=target if here else None)
    loss = nn.functional.mse_loss(nn.Sequential(*modules)(x), target)
    parameters = [p for module in modules for p in module.parameters()]
    true = dict(zip(parameters, torch.autograd.grad(loss, parameters), strict=True))
    for index in (here, here + 2):
        for parameter in modules[index].parameters():
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
    group = topology.group_along("pp")
    number = 2 if kind is ScheduleGPipe else 4
    modules = [Halving(4, 4) for _ in range(number)]
    stages: list[Any] = [
        PipelineStage(modules[index], index, number, CPU, group=group)
        for index in range(here, number, 2)
    ]
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
