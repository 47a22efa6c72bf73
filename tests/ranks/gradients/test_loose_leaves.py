"""Tensors that get a gradient and that no stage holds: as in one process, or refused."""

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
    """A layer, a tensor and another layer that no parameter list of the module has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.factor = nn.Linear(4, 4), torch.ones(4, requires_grad=True)
        self.others = [nn.Linear(4, 4)]

    def forward(self, x: Tensor) -> Tensor:
        probe = torch.zeros(4, requires_grad=True)  # of this forward alone
        other = self.others[0]
        out: Tensor = self.layer(x) * self.factor @ other.weight + other.bias + probe
        return out

    @property
    def leaves(self) -> list[Tensor]:
        return [*self.parameters(), self.factor, *self.others[0].parameters()]


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
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "torch"])
def test_leaves_that_no_stage_holds_have_the_gradients_of_one_process(schedule: str) -> None:
    """They were as many times too large as there are microbatches, without a word."""
    modules, loss = [Loose(), Loose()], Temperature()
    here = rank()
    step: Any
    if schedule == "torch":
        topology = Topology.create(pipeline=2)
        group = topology.group_along("pp")
        stage = PipelineStage(modules[here], here, 2, torch.device("cpu"), group=group)
        grid = ScheduleGPipe(stage, 4, loss)
        engine: Any = pipegrad.attach(grid, topology=topology)
        sync = engine

        def step(x: Tensor, target: Tensor) -> None:
            grid.step(*([] if here else [x]), target=target if here else None)
    else:
        options: dict[str, Any] = {"schedule": schedule, "num_microbatches": 4, "loss_fn": loss}
        engine = scheduled(modules[here], pipeline=2, **options)
        sync = engine.sync

        def step(x: Tensor, target: Tensor) -> None:
            engine.step(x, target=target)

    leaves = [*modules[here].leaves, *([loss.factor] if here else [])]
    with closing(engine):
        for number in range(3):
            x, target = batch(number)
            x.requires_grad_(schedule == "torch")
            mine = [*leaves, *([x] if schedule == "torch" and here == 0 else [])]
            true = [*torch.autograd.grad(loss(modules[1](modules[0](x)), target), mine)]
            if number == 2:  # accumulated, and there was something before
                for leaf in leaves[2:]:
                    leaf.grad = torch.ones_like(leaf)
                true = [g * 2 + (i >= 2) * (i < len(leaves)) for i, g in enumerate(true)]
                with sync.accumulate():
                    step(x, target)
            step(x, target)
            for leaf, gradient in zip(mine, true, strict=True):
                assert error(leaf.grad, gradient) <= MOST
                leaf.grad = None


@pytest.mark.ranks(2)
@pytest.mark.parametrize("over", ["microbatch", "batch", "tokens"])
@pytest.mark.parametrize("first", [1, 3])
def test_leaves_that_a_loss_makes_anew_have_the_gradients_of_one_process(
    first: int, over: str
) -> None:
    """In the steps 1, 2, 4, 8 alone they were divided."""
    module, factors = nn.Linear(4, 4), list[nn.Parameter]()

    def loss_fn(out: Tensor, target: Tensor) -> Any:
        loss: Tensor = nn.functional.mse_loss(out, target)
        loss = loss * factors[-1] if factors else loss
        return (loss * out.numel(), torch.tensor(out.numel())) if over == "tokens" else loss

    options: dict[str, Any] = {"num_microbatches": 4, "loss_fn": loss_fn, "schedule": "gpipe"}
    options |= {"loss_reduction": "token_mean"} if over == "tokens" else {"loss_over": over}
    with closing(scheduled(module, pipeline=2, **options)) as scheduler:
        for number in range(1, 8):
            if number >= first:
                factors.append(nn.Parameter(torch.ones(())))
            x, target = batch(number)
            loss = scheduler.step(x, target=target).loss.item()
            module.zero_grad()
            if factors and rank():
                assert error(factors[-1].grad, torch.tensor(loss)) <= MOST


@pytest.mark.ranks(2)
@pytest.mark.parametrize("late", [False, True], ids=["from the start", "added later"])
def test_over_replicas_they_are_refused_on_all_ranks(*, late: bool) -> None:
    """Nobody averages them: each replica would train others, and no check compares them."""
    module: Any = nn.Sequential(nn.Linear(4, 4))
    scheduler = scheduled(module, pipeline=1, schedule="gpipe", handlers=["data-parallel"])
    if not late:
        module.append(Loose())
    x, target = batch(rank())

    def train() -> Any:
        module.zero_grad()
        return scheduler.step(x, target=target).loss.item()

    with closing(scheduler):
        if late:
            assert "Error" not in outcome(train)  # step 1
            module.append(nn.Linear(4, 4))
        told = gathered(outcome(train))
        assert all("stage 0, or its loss, has a tensor of shape (4," in words for words in told)
        del module[-1]
        assert "Error" not in outcome(train)


@pytest.mark.ranks(2)
def test_a_step_that_fails_drops_what_they_have() -> None:
    loss, fails = Temperature(), [True]

    def loss_fn(out: Tensor, target: Tensor) -> Any:
        if fails and loss.factor.grad is not None:  # in the second microbatch
            raise ValueError("as told")
        return loss(out, target)

    with closing(scheduled(nn.Linear(4, 4), pipeline=2, loss_fn=loss_fn)) as scheduler:
        x, target = batch(0)
        assert "as told" in outcome(lambda: scheduler.step(x, target=target))
        assert loss.factor.grad is None
        fails.clear()
        scheduler.step(x, target=target)
        assert (loss.factor.grad is None) == (rank() == 0)
        # What was there before a step that does not use it stays.
        loss.factor.grad = torch.ones(())
        loss.factor.requires_grad_(False)
        scheduler.step(x, target=target)
        assert loss.factor.grad == 1.0
