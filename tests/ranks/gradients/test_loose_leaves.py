"""Tensors that get a gradient and that no stage holds: refused, or inputs as in one process."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import pipegrad
from pipegrad import Topology
from tests.support.gradients.cases import outcome, rank, scheduled
from tests.support.pipeline.schedulers import error
from tests.support.ranked import gathered
from tests.support.rounding import rounding

MOST = rounding(64)


class Loose(nn.Module):
    """A layer, and a tensor or another layer that no parameter list of the module has."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.layer, self.what = nn.Linear(4, 4), what
        self.factor, self.others = torch.ones(4, requires_grad=True), [nn.Linear(4, 4)]

    def forward(self, x: Tensor) -> Tensor:
        probe = torch.zeros(4, requires_grad=True)  # of this forward alone
        out: Tensor = self.layer(x) + probe
        if self.what == "tensor":
            return out * self.factor
        other: Tensor = self.others[0](out)
        return other if self.what == "layer" else out


class Temperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.full((), 2.0))

    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = nn.functional.mse_loss(out * self.factor, target)
        return loss


def batch(number: int) -> tuple[Tensor, Tensor]:
    x, target = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(number))
    return x, target


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("pipeline", "what"), [(2, "tensor"), (2, "layer"), (2, "loss"), (2, "later"), (1, "layer")]
)
def test_they_are_refused_on_all_ranks(pipeline: int, what: str) -> None:
    """Their gradients were as many times too large as there are microbatches, without a word."""
    module, loss, given = Loose(what), Temperature(), list[nn.Parameter]()

    def loss_fn(out: Tensor, target: Tensor) -> Tensor:
        if what == "loss":
            return loss(out, target)  # type: ignore[no-any-return]
        return nn.functional.mse_loss(out * (given[-1] if given else 1.0), target)

    options: dict[str, Any] = {"loss_fn": loss_fn, "num_microbatches": 4, "schedule": "gpipe"}
    with closing(scheduled(module, pipeline=pipeline, **options)) as scheduler:
        x, target = batch(0)

        def train() -> Any:
            module.zero_grad()
            return scheduler.step(x, target=target).loss.item()

        if what == "later":
            assert "Error" not in outcome(train)
            given.append(nn.Parameter(torch.ones(())))
        for words in gathered(outcome(train)):
            assert "or its loss, has a tensor of shape (" in words
        if what == "later":
            given.clear()
            assert "Error" not in outcome(train)


@pytest.mark.ranks(2)
def test_inputs_of_a_torch_schedule_have_the_gradients_of_one_process() -> None:
    """torch divides those of parameters alone."""
    modules, here = [Loose(""), Loose("")], rank()
    topology, loss = Topology.create(pipeline=2), nn.MSELoss()
    group = topology.group_along("pp")
    stage = PipelineStage(modules[here], here, 2, torch.device("cpu"), group=group)
    grid: Any = ScheduleGPipe(stage, 4, loss)
    with closing(pipegrad.attach(grid, topology=topology)) as sync:
        for number in range(2):
            x, target = batch(number)
            x.requires_grad_()
            (true,) = torch.autograd.grad(loss(modules[1](modules[0](x)), target), [x])
            with sync.accumulate():
                grid.step(*([] if here else [x]), target=target if here else None)
            losses = list[Tensor]()
            grid.step(*([] if here else [x]), target=target if here else None, losses=losses)
            assert len(losses) == 4 * here  # torch fills it
            if here == 0:
                assert error(x.grad, 2 * true) <= MOST
            for parameter in modules[here].parameters():
                parameter.grad = None
