"""What a step is told, and what happens around it, against one process."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipegrad import Scheduler, Stage, Topology
from pipegrad.errors import StepError
from tests.support.gradients.cases import rank
from tests.support.pipeline.models import TOKENS
from tests.support.pipeline.pipelines import loss_of
from tests.support.pipeline.schedulers import MOST, batch, digest, error
from tests.support.pipeline.trained import Twins, held_by, tied

pytestmark = pytest.mark.ranks(2)


def test_batch_normalization_counts_the_microbatches_as_one_process_does() -> None:
    def with_norms() -> nn.Sequential:
        model = tied()
        for layer in (2, 6):
            model[layer] = nn.Sequential(model[layer], nn.BatchNorm1d(TOKENS))
        return model

    twins = Twins(with_norms)
    for step in range(3):
        twins.step(step, num_parts=4)
        tokens, target = batch(step, 8)
        twins.scheduler.evaluate(tokens, target=target)
        truth = dict(twins.true.named_buffers())
        for name, buffer in (n for stage in twins.stages for n in stage.module.named_buffers()):
            if "num_batches" in name:
                assert buffer == 4 * (step + 1)
            assert error(buffer.float(), truth[name].float()) <= MOST, name
    twins.close()


# Scheduler.evaluate: the loss and the outputs of one process, and nothing else changes.


def with_dropout() -> nn.Sequential:
    """Random in training, and some of its parts are in evaluation mode all the time."""
    model = tied()
    for layer in (2, 5):
        model[layer] = nn.Sequential(model[layer], nn.Dropout(0.5), nn.Dropout(0.5).eval())
    return model


class Evaluated(Twins):
    """Has dropout, which one process leaves out."""

    def __init__(self) -> None:
        super().__init__(with_dropout)
        self.true.eval()

    def evaluate(self, seed: int, *, told: bool = True) -> None:
        """Evaluates a batch of another size than in training, as one process does."""
        tokens, target = batch(seed, 12)
        with torch.no_grad():
            out = self.true(tokens)
        result = self.scheduler.evaluate(tokens, target=target if told else None)
        if told:
            assert error(result.loss, loss_of(out, target)) <= MOST
        else:
            assert math.isnan(result.loss.item())
        assert len(result.outputs) == rank()
        if not result.outputs:
            with pytest.raises(IndexError, match="ranks of the last stage have them, after evalu"):
                result.outputs[0]
            assert result.outputs[:1] == ()
        with pytest.raises(StepError, match=r"scheduler\.step\(\) has run forward and backward"):
            result.backward()
        assert all(error(found, out) <= MOST for found in result.outputs)

    @property
    def flags(self) -> list[list[bool]]:
        return [[part.training for part in stage.module.modules()] for stage in self.stages]

    @property
    def gradients(self) -> dict[str, Tensor | None]:
        return {name: parameter.grad for name, parameter in held_by(self.scheduler).items()}


def test_an_evaluation_is_that_of_one_process_and_leaves_gradients_and_training_flags() -> None:
    twins = Evaluated()
    flags = twins.flags
    assert any(len(set(found)) == 2 for found in flags), "shows nothing"
    twins.evaluate(0)  # learned first
    tokens, target = batch(1, 8)
    trained = twins.scheduler.step(tokens, target=target).loss
    with torch.no_grad():
        assert error(trained, loss_of(twins.true(tokens), target)) > 0.001, "shows nothing"
    twins.evaluate(2)
    twins.scheduler.sync.clip_grad_norm_(float("inf"))
    gradients = twins.gradients
    bits = [digest(gradient) for gradient in gradients.values()]
    twins.evaluate(3)
    twins.evaluate(4, told=False)
    assert all(gradient is gradients[name] for name, gradient in twins.gradients.items())
    assert [digest(gradient) for gradient in gradients.values()] == bits
    assert "None" not in bits
    assert twins.flags == flags
    twins.close()


# Under autocast its forwards and losses are in bf16, and nothing else.

HIDDEN, ROWS = 8, 4


def autocast(*, enabled: bool = True) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled)


class Layer(nn.Module):
    """Records whether its forwards, and the backwards of its weight, run under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(HIDDEN, HIDDEN), nn.LayerNorm(HIDDEN)
        self.seen = set[tuple[str, bool]]()
        self.linear.weight.register_hook(lambda _: self.look("backward"))

    def look(self, what: str) -> None:
        self.seen.add((what, torch.is_autocast_enabled("cpu")))

    def forward(self, x: Tensor) -> Tensor:
        self.look("forward")
        normed: Tensor = self.norm(torch.tanh(self.linear(x)))
        return normed


def loss_fn(x: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(x @ torch.ones(HIDDEN, 1), target)


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
        x, target = torch.randn(ROWS, HIDDEN), torch.randn(ROWS, 1)
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
