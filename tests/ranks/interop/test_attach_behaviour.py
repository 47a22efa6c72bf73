"""What `attach` leaves alone, and the precision in which gradients accumulate and travel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    _ScheduleForwardOnly,
)

from pipegrad import Topology, attach
from tests.support.pipeline.pipelines import Case, Cut, TorchSchedule
from tests.support.pipeline.schedulers import error
from tests.support.pipeline.training import CountingData, CountingShared, launches
from tests.support.ranked import gathered
from tests.support.rounding import rounding

HANDLERS = (CountingShared, CountingData)


def is_full(tensor: Tensor | None, value: float | None) -> bool:
    if tensor is None or value is None:
        return tensor is None and value is None
    return torch.equal(tensor, torch.full_like(tensor, value))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", [_ScheduleForwardOnly, ScheduleGPipe])
@pytest.mark.parametrize("gradient", [None, 0.5])
def test_schedules_without_a_loss_are_left_alone(kind: Any, gradient: float | None) -> None:
    """Gradients, if any, and statistics stay as they are."""
    topology = Topology.create(pipeline=2)
    cut = Cut(Case("GPipe"), topology)
    schedule = kind(cut.stages[0], 4)
    sync = attach(schedule, topology=topology, tied=cut.tied, handlers=HANDLERS)
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


@pytest.mark.ranks(4)
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
    sync = attach(schedule, topology=topology, tied=cut.tied, handlers=HANDLERS, **chosen)
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


@pytest.mark.ranks(4)
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
    sync = attach(schedule, topology=topology, handlers=["data-parallel"])
    schedule.step(*([] if here else [x]), target=target if here else None)
    loss = nn.functional.mse_loss(nn.Sequential(*modules)(x), target)
    parameters = [p for module in modules for p in module.parameters()]
    true = dict(zip(parameters, torch.autograd.grad(loss, parameters), strict=True))
    for index in (here, here + 2):
        for parameter in modules[index].parameters():
            assert error(parameter.grad, true[parameter]) <= rounding(64)
    sync.close()
