"""What `attach` leaves alone, and the precision in which gradients accumulate and travel."""

from __future__ import annotations

from collections.abc import Mapping
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

from pipegrad import Topology, attach
from pipegrad.testing import run_ranks
from tests.support.pipeline.pipelines import Case, Cut, TorchSchedule
from tests.support.pipeline.schedulers import error
from tests.support.pipeline.training import CountingData, CountingShared, launches
from tests.support.rounding import rounding

HANDLERS = (CountingShared, CountingData)


def forward_only(topology: Topology) -> dict[str, bool]:
    """Runs schedules without a loss; gradients, if any, and statistics stay as they are."""
    unchanged = {}
    for kind in (_ScheduleForwardOnly, ScheduleGPipe):
        cut = Cut(Case("GPipe"), topology)
        schedule = kind(cut.stages[0], 4)
        sync = attach(schedule, topology=topology, tied=cut.tied, handlers=HANDLERS)
        before, statistics = len(launches), sync.statistics()
        for gradient in (None, 0.5):
            for parameter in cut.parameters():
                parameter.grad = None if gradient is None else torch.full_like(parameter, gradient)
            output = schedule.step(*cut.inputs()["args"])
            kept = all(holds(p.grad, gradient) for p in cut.parameters())
            unchanged[f"{kind.__name__} {gradient}"] = (
                kept
                and (output is not None) == (topology.coordinate("pp") == 1)
                and before == len(launches)
                and statistics == sync.statistics()
            )
        sync.close()
    return unchanged


def holds(tensor: Tensor | None, value: float | None) -> bool:
    if tensor is None or value is None:
        return tensor is None and value is None
    return torch.equal(tensor, torch.full_like(tensor, value))


def step(schedule: TorchSchedule, cut: Cut) -> dict[str, Tensor]:
    inputs = cut.inputs()
    schedule.step(*inputs["args"], target=inputs["target"], losses=[])
    return {name: p.grad for name, p in cut.named() if p.grad is not None}


def differences(topology: Topology, *, fp32_gradients: bool) -> dict[str, Any]:
    """Compares the gradients of bf16 parameters with sums of all ranks' own ones, made in fp32."""
    alone = Cut(Case("1F1B", model="half-precision", scale_grads=False), topology)
    if fp32_gradients:
        for parameter in alone.parameters():
            parameter.grad_dtype = torch.float32
    raw = {name: gradient.float() / 4 for name, gradient in step(alone.schedule(), alone).items()}
    everywhere: list[Mapping[str, Tensor]] = [{} for _ in range(4)]
    dist.all_gather_object(everywhere, raw)  # ranks 0 and 1 hold stage 0, 2 and 3 stage 1

    cut = Cut(Case("1F1B", model="half-precision"), topology)
    schedule = cut.schedule()
    chosen = {} if fp32_gradients else {"reduce_dtype": torch.float32}
    for parameter in cut.parameters() if fp32_gradients else ():
        parameter.grad_dtype = torch.float32
    sync = attach(schedule, topology=topology, tied=cut.tied, handlers=HANDLERS, **chosen)
    gradients = step(schedule, cut)
    wrong, num_rounded = [], 0
    for name, gradient in gradients.items():
        names = next((tie for tie in cut.ties if name in tie), [name])
        means = [torch.stack([r[n] for r in everywhere if n in r]).mean(0) for n in names]
        true = torch.stack(means).sum(0)
        num_rounded += not torch.equal(true, true.bfloat16().float())
        if not torch.equal(gradient, true.to(gradient.dtype)):
            wrong.append(name)
    sync.close()
    return {
        "wrong": wrong,
        "rounded": num_rounded,
        "dtypes": {gradient.dtype for gradient in gradients.values()},
        "wire": {bucket.wire_dtype for bucket in sync.plan.buckets},
        "copies": sync.statistics().copies,
    }


class Table(nn.Module):
    """The gradients of its parameters are views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.a.view(-1) + self.b.view(-1))


def views() -> dict[str, float]:
    """Compares gradients of such parameters with those of one process, for each schedule."""
    topology = Topology.create(pipeline=2)
    own, group = topology.coordinate("pp"), topology.group_along("pp")
    found = {}
    for kind in (ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble):
        torch.manual_seed(0)
        modules = [Table() for _ in range(4)]
        x, target = torch.randn(2, 8, 8)
        stages: list[Any] = [
            PipelineStage(modules[index], index, 4, torch.device("cpu"), group=group)
            for index in (own, own + 2)
        ]
        schedule = kind(stages, 4, nn.functional.mse_loss)
        sync = attach(schedule, topology=topology, handlers=["data-parallel"])
        schedule.step(*([] if own else [x]), target=target if own else None)
        loss = nn.functional.mse_loss(nn.Sequential(*modules)(x), target)
        parameters = [p for module in modules for p in module.parameters()]
        true = dict(zip(parameters, torch.autograd.grad(loss, parameters), strict=True))
        held = [p for index in (own, own + 2) for p in modules[index].parameters()]
        found[kind.__name__] = max(error(p.grad, true[p]) for p in held)
        sync.close()
    return found


def behaviours() -> dict[str, Any]:
    topology = Topology.create(pipeline=2)
    return {
        "forward only": forward_only(topology),
        "fp32 wire": differences(topology, fp32_gradients=False),
        "fp32 gradients": differences(topology, fp32_gradients=True),
        "views": views(),
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(behaviours, 4)


def test_schedules_without_a_loss_are_left_alone(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert len(rank["forward only"]) == 4
        assert all(rank["forward only"].values())


def test_gradients_that_are_views_of_one_tensor_are_summed_apart(
    ranks: list[dict[str, Any]],
) -> None:
    """torch's split backward sets gradients itself: both parameters had the sum of both."""
    for rank in ranks:
        for name, found in rank["views"].items():
            assert found <= rounding(64), name


def test_reduce_dtype_sums_bf16_gradients_in_fp32_and_rounds_once(
    ranks: list[dict[str, Any]],
) -> None:
    for rank in ranks:
        found = rank["fp32 wire"]
        assert found["wrong"] == []
        assert found["rounded"] > 0, "the case shows nothing"
        assert found["dtypes"] == {torch.bfloat16}
        assert found["wire"] == {torch.float32}
        assert found["copies"] == 13


def test_float32_grad_accumulates_and_sums_in_fp32_without_a_copy(
    ranks: list[dict[str, Any]],
) -> None:
    for rank in ranks:
        found = rank["fp32 gradients"]
        assert found["wrong"] == []
        assert found["rounded"] > 0, "the case shows nothing"
        assert found["dtypes"] == {torch.float32}
        assert found["copies"] == 0
