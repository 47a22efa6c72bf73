"""What a step is told, and what happens around it, against one process."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

from tests.support.gradients.cases import rank
from tests.support.pipeline.models import TOKENS
from tests.support.pipeline.pipelines import loss_of
from tests.support.pipeline.schedulers import (
    MOST,
    batch,
    compare,
    digest,
    error,
    most_buffers,
    named,
    share,
    topology,
    wrong,
)
from tests.support.pipeline.twins import Twins, tied
from tests.support.ranked import gathered
from tests.support.rounding import ADAM_EPS, rounding

pytestmark = pytest.mark.ranks(2)

BFLOAT16 = torch.autocast("cpu", dtype=torch.bfloat16)


def alike(*tensors: Tensor) -> bool:
    """Returns whether they have the same bits on all ranks."""
    own = [digest(tensor) for tensor in tensors]
    return all(bits == own for bits in gathered(own))


def sum_of_losses(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")


@pytest.mark.ranks(4)
def test_losses_that_are_sums_are_divided_by_what_they_count() -> None:
    """Half of the targets of one replica are ignored: a mean of means would be wrong."""
    twins, at = Twins(loss_fn=sum_of_losses), topology(2)
    for step in range(2):
        tokens, target = batch(step, 16)
        target[:6, 1:] = -100
        number = int((target >= 0).sum())
        mine = share(tokens, at), share(target, at)
        result = twins.scheduler.step(mine[0], target=mine[1], loss_divisor=number / 2)
        twins.errors[f"loss {step}"] = error(result.loss, twins.alone(tokens, target))
        twins.compare(step)
    errors = twins.close()
    assert len(errors) > 2 * 12
    assert wrong(errors, MOST) == {}


def test_float64_one_element_and_batch_normalization_are_as_in_one_process() -> None:
    """Three microbatches: a third is not exact, and in float32 far from it."""
    twins = Twins(lambda: tied().double(), 3)
    for step in range(2):
        tokens, target = batch(step, 6)
        twins.scheduler.step(tokens, target=target)
        twins.alone(tokens, target)
        twins.compare(step)
    assert wrong(twins.close(), rounding(6 * TOKENS, dtype=torch.float64)) == {}
    # A loss of one element may have a dimension.
    twins = Twins(loss_fn=lambda *given: loss_of(*given).reshape(1))
    tokens, target = batch(0, 8)
    assert twins.scheduler.step(tokens, target=target).loss.shape == ()
    twins.close()

    # Batch normalization counts the microbatches and no more.
    def with_norms() -> nn.Sequential:
        model = tied()
        for layer in (2, 6):
            model[layer] = nn.Sequential(model[layer], nn.BatchNorm1d(TOKENS))
        return model

    twins = Twins(with_norms)
    for step in range(3):
        twins.step(step, num_parts=4)
        twins.compare(step)
        tokens, target = batch(step, 8)
        twins.scheduler.evaluate(tokens, target=target)
        truth = dict(twins.true.named_buffers())
        for name, buffer in (n for stage in twins.stages for n in stage.module.named_buffers()):
            if "num_batches" in name:
                assert buffer == 4 * (step + 1)
            twins.errors[f"step {step} {name}"] = error(buffer.float(), truth[name].float())
    assert wrong(twins.close(), MOST) == {}


@pytest.mark.parametrize("schedule", ["1f1b", "eager-1f1b", "zb-h1"])
def test_around_a_step_all_is_as_in_one_process(schedule: str) -> None:
    """Accumulates, clips, evaluates, divides by other numbers, and steps."""
    twins = Twins(schedule=schedule)
    mine, sync = named(twins.stages), twins.scheduler.sync
    optimizers = [
        torch.optim.AdamW(dict.fromkeys(parameters), lr=1e-2, eps=ADAM_EPS)
        for parameters in (mine.values(), twins.true.parameters())
    ]
    for step in range(3):
        for part in range(3):
            with sync.accumulate() if part < 2 else nullcontext():
                tokens, target = batch(10 * step + part, 8)
                loss = twins.scheduler.step(tokens, target=target, loss_divisor=8.0).loss
                true_loss = loss_of(twins.true(tokens), target) / 2  # of four microbatches
                true_loss.backward()
                twins.errors[f"{step} loss {part}"] = error(loss, true_loss.detach())
        norm = sync.clip_grad_norm_(0.1)
        true_norm = nn.utils.clip_grad_norm_(twins.true.parameters(), 0.1)
        assert true_norm > 0.1
        assert alike(norm)
        twins.errors[f"{step} norm"] = error(norm, true_norm)
        tokens, target = batch(step, 8)
        evaluated = twins.scheduler.evaluate(tokens, target=target).loss
        twins.errors[f"{step} evaluated"] = error(evaluated, loss_of(twins.true(tokens), target))
        for optimizer in optimizers:
            optimizer.step()
        twins.compare(step)
    theirs = dict(twins.true.named_parameters(remove_duplicate=False))
    for name, parameter in mine.items():
        twins.errors[name] = error(parameter.detach(), theirs[name].detach())
    sync.check_replicas()
    assert alike(*[p for name, p in mine.items() if name in ("0.weight", "7.weight")])
    assert wrong(twins.close(), MOST) == {}


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_autocast_around_a_step_is_autocast_around_one_process(schedule: str) -> None:
    twins, apart = Twins(schedule=schedule), dict[str, float]()
    for step in range(2):
        with BFLOAT16:
            twins.step(step, num_parts=4)
        twins.compare(step)
    tokens, target = batch(0, 8)
    twins.scheduler.step(tokens, target=target)
    with BFLOAT16:
        twins.alone(tokens, target, 4)
    compare(apart, 0, named(twins.stages), twins.true)
    assert max(apart.values()) > 1e-3, "float32 is as good"
    assert wrong(twins.close(), MOST) == {}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager-1f1b"])
def test_buffers_are_made_once(schedule: str) -> None:
    """In steps of both kinds, in turns."""
    twins, found = Twins(num_microbatches=8, schedule=schedule), list[int]()
    for step in range(5):
        tokens, target = batch(step, 8)
        twins.scheduler.step(tokens, target=target)
        twins.scheduler.evaluate(tokens, target=target)
        for parameter in named(twins.stages).values():
            parameter.grad = None
        found.append(twins.scheduler.receive_buffers)
    learning, later, *rest = found
    assert 0 < learning <= later <= most_buffers(twins.scheduler)
    assert rest == [later] * 3
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
        assert all(error(found, out) <= MOST for found in result.outputs)

    @property
    def flags(self) -> list[list[bool]]:
        return [[part.training for part in stage.module.modules()] for stage in self.stages]

    @property
    def gradients(self) -> dict[str, Tensor | None]:
        return {name: parameter.grad for name, parameter in named(self.stages).items()}


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
