"""GradScaler with a Scheduler and with attach: the loop that its docstring shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import pipegrad
from pipegrad.testing import run_ranks

SCALE, STEPS, ROWS = 4.0, 4, 4


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, 4, generator=drawn), torch.randn(ROWS, 4, generator=drawn)


def overflow(module: nn.Module, step: int) -> None:
    """Makes an element of the first layer's gradient infinite, in one step."""
    if step == 2:
        for name, parameter in module.named_parameters():
            if name == "0.bias" and parameter.grad is not None:
                parameter.grad[0] = float("inf")


def one_process() -> Any:
    whole = model()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=2)
    losses, scales = [], []
    for step in range(STEPS):
        x, y = batch(step)
        for rows, wanted in zip(x.chunk(2), y.chunk(2), strict=True):
            loss = nn.functional.mse_loss(whole(rows), wanted)
            scaler.scale(loss / 2).backward()
            losses.append(loss.item() / 2)
        overflow(whole, step)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    losses = [sum(pair) for pair in zip(losses[::2], losses[1::2], strict=True)]
    return losses, scales, {k: v.tolist() for k, v in whole.state_dict().items()}


def staged() -> Any:
    """Two stages of the same model: with a Scheduler, then on a schedule of torch."""
    return {"Scheduler": with_scheduler(), "attach": with_attach()}


def with_scheduler() -> Any:
    rank, scalers = torch.distributed.get_rank(), list[pipegrad.GradScaler]()
    part = model()[2 * rank : 2 * rank + 2]
    scheduler = pipegrad.Scheduler(
        [pipegrad.Stage(part, rank)],
        pipegrad.Topology.create(pipeline=2),
        schedule="1f1b",
        num_microbatches=2,
        loss_fn=lambda y, t: scalers[0].scale(nn.functional.mse_loss(y, t)),
    )
    scalers.append(pipegrad.GradScaler(scheduler.sync, init_scale=SCALE, growth_interval=2))

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        return scheduler.step(x, target=y).loss.item()

    x, y = batch(STEPS - 1)
    return *trained(scheduler.sync, scalers[0], part, step), scheduler.evaluate(
        x, target=y
    ).loss.item()


def with_attach() -> Any:
    rank, scalers = torch.distributed.get_rank(), list[pipegrad.GradScaler]()
    part = model()[2 * rank : 2 * rank + 2]
    topology = pipegrad.Topology.create(pipeline=2)
    group = topology.group_along("pp")
    stage = PipelineStage(part, rank, 2, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, 2, lambda y, t: scalers[0].scale(nn.functional.mse_loss(y, t)))
    sync = pipegrad.attach(schedule, topology=topology)
    scalers.append(pipegrad.GradScaler(sync, init_scale=SCALE, growth_interval=2))

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        told: list[torch.Tensor] = []
        schedule.step(*([x] if rank == 0 else []), target=y, losses=told)
        return sum(each.item() for each in told) / 2

    return *trained(sync, scalers[0], part, step), None


def trained(
    sync: pipegrad.GradientSync,
    scaler: pipegrad.GradScaler,
    part: nn.Module,
    run: Callable[[torch.Tensor, torch.Tensor], float],
) -> tuple[list[float], list[float], dict[str, Any]]:
    optimizer = torch.optim.SGD(sync.optimizer_parameters(), lr=0.1)
    losses, scales = [], []
    for step in range(STEPS):
        losses.append(run(*batch(step)) / scaler.get_scale())
        overflow(part, step)
        scaler.unscale_(optimizer)
        sync.clip_grad_norm_(0.1)
        scaler.step(optimizer)
        scaler.update()
        sync.publish()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return losses, scales, {k: v.tolist() for k, v in part.state_dict().items()}


@pytest.fixture(scope="module")
def replies() -> list[dict[str, Any]]:
    return run_ranks(staged, 2)


@pytest.mark.parametrize("kind", ["Scheduler", "attach"])
def test_a_scaled_step_is_that_of_one_process(replies: list[dict[str, Any]], kind: str) -> None:
    """Issue 16, point 5. An overflow on the first stage alone; the second one stepped."""
    losses, scales, whole = one_process()
    assert scales == [4.0, 8.0, 4.0, 4.0]
    # Sums of 32 terms at most, some roundings a step.
    most = 8 * STEPS * torch.finfo(torch.float32).eps * 32**0.5
    found: dict[str, Any] = {}
    for rank, (got, got_scales, state, _) in enumerate(reply[kind] for reply in replies):
        assert got_scales == scales
        found |= state
        if rank == 1 or kind == "Scheduler":
            assert got == pytest.approx(losses, rel=most)
    assert found.keys() == whole.keys()
    for name, value in whole.items():
        assert torch.tensor(found[name]).sub(torch.tensor(value)).abs().max() <= most, name
    if kind == "Scheduler":
        x, y = batch(STEPS - 1)
        trained = model()
        trained.load_state_dict({k: torch.tensor(v) for k, v in whole.items()})
        expected = nn.functional.mse_loss(trained(x), y).item()
        assert [reply[kind][3] for reply in replies] == pytest.approx([expected] * 2, rel=most)
