"""GradScaler with a Scheduler, which scales by itself, and with attach, whose loss does."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
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
    losses, scales, norms = [], [], []
    for step in range(STEPS):
        x, y = batch(step)
        for rows, wanted in zip(x.chunk(2), y.chunk(2), strict=True):
            loss = nn.functional.mse_loss(whole(rows), wanted)
            scaler.scale(loss / 2).backward()
            losses.append(loss.item() / 2)
        overflow(whole, step)
        scaler.unscale_(optimizer)
        norms.append(nn.utils.clip_grad_norm_(whole.parameters(), 0.1).item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    losses = [sum(pair) for pair in zip(losses[::2], losses[1::2], strict=True)]
    return losses, scales, norms, {k: v.tolist() for k, v in whole.state_dict().items()}


def staged() -> Any:
    """Two stages of the same model: with a Scheduler, then on a schedule of torch."""
    return {
        "Scheduler": with_scheduler(scales=False),
        "Scheduler and loss_fn": with_scheduler(scales=True),
        "attach": with_attach(),
    }


def with_scheduler(*, scales: bool) -> Any:
    """Whether loss_fn scales or not, gradients are scaled once."""
    rank, scalers = torch.distributed.get_rank(), list[pipegrad.GradScaler]()

    def loss_fn(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.mse_loss(y, t)
        return scalers[0].scale(loss) if scales else loss

    part = model()[2 * rank : 2 * rank + 2]
    scheduler = pipegrad.Scheduler(
        [pipegrad.Stage(part, rank)],
        pipegrad.Topology.create(pipeline=2),
        schedule="1f1b",
        num_microbatches=2,
        loss_fn=loss_fn,
    )
    scalers.append(pipegrad.GradScaler(scheduler.sync, init_scale=SCALE, growth_interval=2))

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        loss = scheduler.step(x, target=y).loss.item()
        return loss if scales else loss * scalers[0].get_scale()

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
) -> tuple[list[float], list[float], list[float], dict[str, Any]]:
    optimizer = sync.optimizer(torch.optim.SGD, lr=0.1)
    losses, scales, norms = [], [], []
    for step in range(STEPS):
        losses.append(run(*batch(step)) / scaler.get_scale())
        overflow(part, step)
        norms.append(sync.clip_grad_norm_(0.1).item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return losses, scales, norms, {k: v.tolist() for k, v in part.state_dict().items()}


@pytest.fixture(scope="module")
def replies() -> list[dict[str, Any]]:
    return run_ranks(staged, 2)


@pytest.mark.parametrize("kind", ["Scheduler", "Scheduler and loss_fn", "attach"])
def test_a_scaled_step_is_that_of_one_process(replies: list[dict[str, Any]], kind: str) -> None:
    """Issue 16, point 5. An overflow on the first stage alone; the second one stepped."""
    losses, scales, norms, whole = one_process()
    assert scales == [4.0, 8.0, 4.0, 4.0]
    # Sums of 32 terms at most, some roundings a step.
    most = 8 * STEPS * torch.finfo(torch.float32).eps * 32**0.5
    found: dict[str, Any] = {}
    for rank, (got, got_scales, got_norms, state, _) in enumerate(r[kind] for r in replies):
        assert got_scales == scales
        assert got_norms == pytest.approx(norms, rel=most)
        found |= state
        if rank == 1 or kind != "attach":
            assert got == pytest.approx(losses, rel=most)
    assert found.keys() == whole.keys()
    for name, value in whole.items():
        assert torch.tensor(found[name]).sub(torch.tensor(value)).abs().max() <= most, name
    if kind != "attach":
        x, y = batch(STEPS - 1)
        trained = model()
        trained.load_state_dict({k: torch.tensor(v) for k, v in whole.items()})
        expected = nn.functional.mse_loss(trained(x), y).item()
        assert [reply[kind][4] for reply in replies] == pytest.approx([expected] * 2, rel=most)


# --- fp16


class Half(nn.Linear):
    """A layer whose products, and their gradients, are float16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.bias is not None
        found = nn.functional.linear(x.half(), self.weight.half(), self.bias.half())
        return found.float()


MANY = 50
FP16: dict[str, Any] = {"init_scale": 2.0**20, "growth_interval": 3}


def fp16_model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(Half(4, 8), nn.Tanh(), Half(8, 8), nn.Tanh(), Half(8, 4), nn.Tanh())


def fp16_alone() -> tuple[list[float], dict[str, Any]]:
    """One process, the batch in microbatches, as torch's documentation writes the loop."""
    whole, scales = fp16_model(), []
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", **FP16)
    for step in range(MANY):
        x, y = batch(step)
        for rows, wanted in zip(x.chunk(2), y.chunk(2), strict=True):
            scaler.scale(nn.functional.mse_loss(whole(rows), wanted) / 2).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales, {name: value.tolist() for name, value in whole.state_dict().items()}


def fp16_staged() -> Any:
    """The same in two stages, for each way to place; and what a scaled loss_fn is told."""
    rank, found = torch.distributed.get_rank(), {}
    for schedule in ("1f1b", "zb-h1"):
        for handlers in (["data-parallel"], ["sharded"]):
            whole = fp16_model()
            part = whole[:2] if rank == 0 else whole[2:]
            scheduler = pipegrad.Scheduler(
                [pipegrad.Stage(part, rank)],
                pipegrad.Topology.create(pipeline=2),
                schedule=schedule,
                num_microbatches=2,
                loss_fn=nn.functional.mse_loss,
                handlers=handlers,
            )
            optimizer = scheduler.optimizer(torch.optim.AdamW, lr=0.01)
            scaler, scales = pipegrad.GradScaler(scheduler.sync, **FP16), []
            for step in range(MANY):
                x, y = batch(step)
                scheduler.step(x, target=y)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                scales.append(scaler.get_scale())
            scheduler.sync.wait_parameters()
            state = {name: value.tolist() for name, value in part.state_dict().items()}
            found[schedule, handlers[0]] = (scales, state)
            scheduler.close()
    return found


@pytest.fixture(scope="module")
def fp16_replies() -> list[dict[Any, Any]]:
    return run_ranks(fp16_staged, 2)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("handler", ["data-parallel", "sharded"])
def test_fifty_fp16_steps_have_the_bits_of_one_process(
    fp16_replies: list[dict[Any, Any]], schedule: str, handler: str
) -> None:
    """Issue 18, point 4. Gradients overflow by themselves; scales are powers of two."""
    scales, whole = fp16_alone()
    halved = sum(after < before for before, after in pairwise(scales))
    assert 5 < halved < MANY - 5
    found: dict[str, Any] = {}
    for reply in fp16_replies:
        got_scales, state = reply[schedule, handler]
        assert got_scales == scales
        found |= state
    assert found == whole


class WithLoss(nn.Linear):
    """A stage with a loss of its own."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        found = super().forward(x)
        return {"x": found, "aux": found.square().mean()}


def with_losses() -> Any:
    """Losses of every stage, and a mean over rows: without a scaler, with it, and scaled twice."""
    rank, scalers = torch.distributed.get_rank(), list[pipegrad.GradScaler]()
    found, norms = list[Any](), list[float]()

    def loss_fn(y: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, int]:
        loss = (y - t).square().sum()
        return (scalers[0].scale(loss) if len(found) == 2 else loss), len(y)

    for enabled in (False, True, True):
        torch.manual_seed(rank)
        scheduler = pipegrad.Scheduler(
            [pipegrad.Stage(WithLoss(4, 4), rank, losses=("aux",))],
            pipegrad.Topology.create(pipeline=2),
            schedule="1f1b",
            num_microbatches=2,
            loss_fn=loss_fn,
            loss_reduction="token_mean",
        )
        optimizer = scheduler.optimizer(torch.optim.SGD, lr=0.1)
        scalers[:] = [pipegrad.GradScaler(scheduler.sync, enabled=enabled)]
        try:
            for number in range(3):
                x, y = batch(number)
                scheduler.step(x, target=y)
                norms.append(scheduler.sync.clip_grad_norm_(1.0).item())
                scalers[0].step(optimizer)
                scalers[0].update()
                optimizer.zero_grad()
            found.append(norms[-1])
        except pipegrad.errors.StepError as error:
            found.append(str(error))
        scheduler.close()
    return found


def test_losses_of_stages_are_scaled_and_a_mean_over_rows_is_divided() -> None:
    for plain, scaled, said in run_ranks(with_losses, 2):
        assert scaled == pytest.approx(plain, rel=8 * 3 * torch.finfo(torch.float32).eps * 32**0.5)
        assert "does not scale the losses that a stage beside it makes" in said


def half_loss() -> Any:
    """A loss of float16: the gradient that backward begins with overflows, as in torch."""
    rank = torch.distributed.get_rank()
    own = Half(4, 4)
    scheduler = pipegrad.Scheduler(
        [pipegrad.Stage(own, rank)],
        pipegrad.Topology.create(pipeline=2),
        schedule="1f1b",
        num_microbatches=1,
        loss_fn=lambda y, t: nn.functional.mse_loss(y.half(), t.half()),
    )
    optimizer = scheduler.optimizer(torch.optim.SGD, lr=1.0)
    scaler, scales = pipegrad.GradScaler(scheduler.sync), []
    for step in range(3):
        x, y = batch(step)
        scheduler.step(x, target=y)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


def test_a_loss_of_float16_may_overflow_by_the_scale() -> None:
    for scales in run_ranks(half_loss, 2):
        assert scales[0] == 2.0**15
        assert scales == sorted(scales, reverse=True)


def without_scaler() -> str:
    """An optimizer that is stepped without its scaler; the loss is on the last rank alone."""
    rank = torch.distributed.get_rank()
    scheduler = pipegrad.Scheduler(
        [pipegrad.Stage(model()[2 * rank : 2 * rank + 2], rank)],
        pipegrad.Topology.create(pipeline=2),
        schedule="1f1b",
        num_microbatches=2,
        loss_fn=nn.functional.mse_loss,
    )
    optimizer = scheduler.optimizer(torch.optim.SGD, lr=0.1)
    scaler = pipegrad.GradScaler(scheduler.sync)
    x, y = batch(0)
    scheduler.step(x, target=y)
    try:
        optimizer.step()
    except pipegrad.errors.StepError as error:
        return str(error)
    return f"stepped with gradients times {scaler.get_scale()}"


def test_a_step_without_the_scaler_is_refused_on_ranks_without_a_loss() -> None:
    for said in run_ranks(without_scaler, 2):
        assert "gradients that a GradScaler has scaled" in said
