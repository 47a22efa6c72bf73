"""GradScaler with a Scheduler, which scales by itself, and with attach, whose loss does."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import mse_loss

import pipegrad
from tests.support.gradients.cases import outcome, rank
from tests.support.pipeline.layers import one_stage_each
from tests.support.ranked import gathered

SCALE, STEPS, ROWS = 4.0, 4, 4
# Sums of 32 terms at most, some roundings a step.
MOST = 8 * STEPS * torch.finfo(torch.float32).eps * 32**0.5
pytestmark = pytest.mark.ranks(2)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def batch(step: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, 4, generator=drawn), torch.randn(ROWS, 4, generator=drawn)


def pipeline(part: nn.Module, **options: Any) -> pipegrad.Scheduler:
    return one_stage_each(part, part, **{"num_microbatches": 2, "loss_fn": mse_loss, **options})


def overflow(module: nn.Module, step: int) -> None:
    """Makes an element of the first layer's gradient infinite, in one step."""
    if step == 2:
        for name, parameter in module.named_parameters():
            if name == "0.bias" and parameter.grad is not None:
                parameter.grad[0] = float("inf")


def one_process(
    whole: nn.Module, make: Any, steps: int, clip: float = float("inf"), **options: Any
) -> tuple[list[float], list[float], list[float]]:
    """Trains, the batch in microbatches, as torch's documentation does; returns losses, scales and
    norms."""
    optimizer, scaler = make(whole.parameters()), torch.amp.GradScaler("cpu", **options)
    losses, scales, norms = [], [], []
    for step in range(steps):
        x, y = batch(step)
        losses.append(0.0)
        for rows, wanted in zip(x.chunk(2), y.chunk(2), strict=True):
            loss = mse_loss(whole(rows), wanted)
            scaler.scale(loss / 2).backward()
            losses[-1] += loss.item() / 2
        if math.isfinite(clip):
            overflow(whole, step)
            scaler.unscale_(optimizer)
            norms.append(nn.utils.clip_grad_norm_(whole.parameters(), clip).item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return losses, scales, norms


@pytest.mark.parametrize("kind", ["Scheduler", "Scheduler and loss_fn", "attach"])
def test_a_scaled_step_is_that_of_one_process(kind: str) -> None:
    """Issue 16, point 5. An overflow on the first stage alone; the second one stepped.

    Whether loss_fn of a Scheduler scales or not, gradients are scaled once.
    """
    whole = model()
    options: dict[str, Any] = {"init_scale": SCALE, "growth_interval": 2}
    sgd = partial(torch.optim.SGD, lr=0.1)
    losses, scales, norms = one_process(whole, sgd, STEPS, 0.1, **options)
    assert scales == [4.0, 8.0, 4.0, 4.0]
    part, scalers = model()[2 * rank() : 2 * rank() + 2], list[pipegrad.GradScaler]()

    def loss_fn(y: Tensor, t: Tensor) -> Tensor:
        return mse_loss(y, t) if kind == "Scheduler" else scalers[0].scale(mse_loss(y, t))

    run: Callable[[Tensor, Tensor], float]
    scheduler: Any = None
    if kind == "attach":
        topology = pipegrad.Topology.create(pipeline=2)
        group = topology.group_along("pp")
        stage = PipelineStage(part, rank(), 2, torch.device("cpu"), group=group)
        schedule = Schedule1F1B(stage, 2, loss_fn)
        sync = pipegrad.attach(schedule, topology=topology)

        def run(x: Tensor, y: Tensor) -> float:
            told: list[Tensor] = []
            schedule.step(*([] if rank() else [x]), target=y, losses=told)
            return sum(each.item() for each in told) / 2 / scaler.get_scale()
    else:
        scheduler = pipeline(part, loss_fn=loss_fn)
        sync = scheduler.sync

        def run(x: Tensor, y: Tensor) -> float:
            return float(scheduler.step(x, target=y).loss)

    scaler = pipegrad.GradScaler(sync, **options)
    scalers.append(scaler)
    optimizer = sync.optimizer(torch.optim.SGD, lr=0.1)
    for step in range(STEPS):
        loss = run(*batch(step))
        assert loss == pytest.approx(losses[step], rel=MOST) or (kind == "attach" and not rank())
        overflow(part, step)
        assert sync.clip_grad_norm_(0.1).item() == pytest.approx(norms[step], rel=MOST)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == scales[step]
    true = whole.state_dict()
    for name, value in part.state_dict().items():
        assert (value - true[name]).abs().max() <= MOST, name
    if scheduler is not None:
        x, y = batch(STEPS - 1)
        expected = mse_loss(whole(x), y).item()
        assert scheduler.evaluate(x, target=y).loss.item() == pytest.approx(expected, rel=MOST)


class Half(nn.Linear):
    """A layer whose products, and their gradients, are float16."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.bias is not None
        found = nn.functional.linear(x.half(), self.weight.half(), self.bias.half())
        return found.float()


MANY = 50
FP16: dict[str, Any] = {"init_scale": 2.0**20, "growth_interval": 3}


def fp16_model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(Half(4, 8), nn.Tanh(), Half(8, 8), nn.Tanh(), Half(8, 4), nn.Tanh())


def fp16_steps(
    scheduler: pipegrad.Scheduler, optimizer: Any, scaler: pipegrad.GradScaler, steps: int
) -> list[float]:
    """Trains; returns the scale after each step."""
    scales = []
    for step in range(steps):
        x, y = batch(step)
        scheduler.step(x, target=y)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "v-half", "v-min"])
@pytest.mark.parametrize("handler", ["data-parallel", "sharded"])
def test_fifty_fp16_steps_have_the_bits_of_one_process(schedule: str, handler: str) -> None:
    """Issue 18, point 4. Gradients overflow by themselves; scales are powers of two."""
    whole = fp16_model()
    _, scales, _ = one_process(whole, partial(torch.optim.AdamW, lr=0.01), MANY, **FP16)
    halved = sum(after < before for before, after in pairwise(scales))
    assert 5 < halved < MANY - 5
    made = pipegrad.schedules.build(schedule, num_ranks=2, num_microbatches=2)
    topology = pipegrad.Topology.create(pipeline=2, stage_to_rank=made.stage_to_rank)
    ends = (0, 2, 6) if len(made.stage_to_rank) == 2 else (0, 2, 3, 4, 6)
    part = {stage: fp16_model()[ends[stage] : ends[stage + 1]] for stage in topology.local_stages}
    scheduler = pipegrad.Scheduler(
        [pipegrad.Stage(module, stage) for stage, module in part.items()],
        topology,
        schedule=schedule,
        handlers=[handler],
        num_microbatches=2,
        loss_fn=mse_loss,
    )
    optimizer = scheduler.optimizer(torch.optim.AdamW, lr=0.01)
    scaler = pipegrad.GradScaler(scheduler.sync, **FP16)
    assert fp16_steps(scheduler, optimizer, scaler, MANY) == scales
    scheduler.sync.wait_parameters()
    true = whole.state_dict()
    mine = {n: value for module in part.values() for n, value in module.state_dict().items()}
    assert [n for n, value in mine.items() if not torch.equal(value, true[n])] == []
    scheduler.close()


class WithLoss(nn.Linear):
    """A stage with a loss of its own."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        found = super().forward(x)
        return {"x": found, "aux": found.square().mean()}


AUX = [{"losses": ("aux",)}] * 2


def test_losses_of_stages_are_scaled_and_a_mean_over_rows_is_divided() -> None:
    """Losses of every stage: without a scaler, with it, and with a loss_fn that scales, too."""
    scalers, norms = list[pipegrad.GradScaler](), list[float]()

    def trained(*, enabled: bool = True, twice: bool = False) -> None:
        def loss_fn(y: Tensor, t: Tensor) -> tuple[Tensor, int]:
            loss = (y - t).square().sum()
            return (scalers[0].scale(loss) if twice else loss), len(y)

        torch.manual_seed(rank())
        scheduler = pipeline(
            WithLoss(4, 4), of_stage=AUX, loss_fn=loss_fn, loss_reduction="token_mean"
        )
        optimizer = scheduler.optimizer(torch.optim.SGD, lr=0.1)
        scalers[:] = [pipegrad.GradScaler(scheduler.sync, enabled=enabled)]
        for number in range(3):
            x, y = batch(number)
            scheduler.step(x, target=y)
            norms.append(scheduler.sync.clip_grad_norm_(1.0).item())
            scalers[0].step(optimizer)
            scalers[0].update()
            optimizer.zero_grad()
        scheduler.close()

    trained(enabled=False)
    trained()
    assert norms[5] == pytest.approx(norms[2], rel=8 * 3 * torch.finfo(torch.float32).eps * 32**0.5)
    trained(twice=True)
    assert norms[6:] == norms[3:6]


def test_a_loss_of_float16_may_overflow_by_the_scale() -> None:
    """The gradient that backward begins with overflows, as in torch."""
    scheduler = pipeline(
        Half(4, 4), num_microbatches=1, loss_fn=lambda y, t: mse_loss(y.half(), t.half())
    )
    optimizer = scheduler.optimizer(torch.optim.SGD, lr=1.0)
    scales = fp16_steps(scheduler, optimizer, pipegrad.GradScaler(scheduler.sync), 3)
    assert scales[0] == 2.0**15
    assert scales == sorted(scales, reverse=True)
    assert gathered(scales) == [scales] * 2
    scheduler.close()


def test_a_step_without_the_scaler_is_refused_on_ranks_without_a_loss() -> None:
    """The loss is on the last rank alone."""
    scheduler = pipeline(model()[2 * rank() : 2 * rank() + 2])
    optimizer = scheduler.optimizer(torch.optim.SGD, lr=0.1)
    scaler = pipegrad.GradScaler(scheduler.sync)
    x, y = batch(0)
    scheduler.step(x, target=y)
    said = outcome(optimizer.step)
    assert said.startswith("StepError: "), scaler.get_scale()
    assert "gradients that a GradScaler has scaled" in said
