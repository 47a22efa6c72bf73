"""A step that the caller runs under autocast: its forwards and losses are in bf16, nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipegrad import Scheduler, Stage, Topology
from tests.support.gradients.cases import rank

WIDTH, ROWS = 8, 4
pytestmark = pytest.mark.ranks(2)


def autocast(*, enabled: bool = True) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled)


class Layer(nn.Module):
    """Records whether its forwards, and the backwards of its weight, run under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.seen = set[tuple[str, bool]]()
        self.linear.weight.register_hook(lambda _: self.look("backward"))

    def look(self, what: str) -> None:
        self.seen.add((what, torch.is_autocast_enabled("cpu")))

    def forward(self, x: Tensor) -> Tensor:
        self.look("forward")
        normed: Tensor = self.norm(torch.tanh(self.linear(x)))
        return normed


def loss_fn(x: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(x @ torch.ones(WIDTH, 1), target)


def trained(
    schedule: str, *, recompute: bool, inside: bool, around: Callable[[], Any]
) -> tuple[list[float], dict[str, Tensor], Layer]:
    """Returns the losses, the parameters and the layer of a short run.

    Args:
        schedule: Its name.
        recompute: Whether stages run their forwards again.
        inside: Whether autocast is inside of the stage and the loss.
        around: What encloses each evaluation and step.
    """
    torch.manual_seed(rank())
    layer, function = Layer(), loss_fn
    if inside:
        vars(layer)["forward"], function = autocast()(layer.forward), autocast()(loss_fn)
    scheduler = Scheduler(
        [Stage(layer, rank(), recompute=recompute)],
        Topology.create(pipeline=2),
        schedule=schedule,
        num_microbatches=2,
        loss_fn=function,
    )
    optimizer = scheduler.optimizer(torch.optim.SGD, lr=0.1)
    torch.manual_seed(7)
    losses = list[float]()
    for _ in range(3):
        x, target = torch.randn(ROWS, WIDTH), torch.randn(ROWS, 1)
        with around():
            losses.append(scheduler.evaluate(x, target=target).loss.item())
            losses.append(scheduler.step(x, target=target).loss.item())
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())
        optimizer.step()
        optimizer.zero_grad()
    scheduler.close()
    return losses, layer.state_dict(), layer


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_autocast_around_a_step_is_that_of_its_forwards(schedule: str, recompute: bool) -> None:
    run: dict[str, Any] = {"schedule": schedule, "recompute": recompute}
    losses, values, _ = trained(**run, inside=True, around=contextlib.nullcontext)
    ours, our_values, layer = trained(**run, inside=False, around=autocast)
    exact, _, _ = trained(**run, inside=False, around=contextlib.nullcontext)
    assert ours == losses != exact
    for name, value in values.items():
        assert torch.equal(our_values[name], value), name
    assert layer.seen == {("forward", True), ("backward", False)}


def test_autocast_around_a_whole_loop_uses_the_new_parameters() -> None:
    """torch's cache has casts of an evaluation, without a graph, and of old parameters."""
    with autocast():
        ours, _, _ = trained("1f1b", recompute=False, inside=False, around=contextlib.nullcontext)
    losses, _, _ = trained("1f1b", recompute=False, inside=False, around=autocast)
    assert ours == losses
    assert ours[1] != ours[3] != ours[5]


def test_autocast_that_is_off_inside_of_another_stays_off() -> None:
    exact, _, _ = trained("1f1b", recompute=False, inside=False, around=contextlib.nullcontext)
    with autocast():
        ours, _, _ = trained(
            "1f1b", recompute=False, inside=False, around=lambda: autocast(enabled=False)
        )
    assert ours == exact
