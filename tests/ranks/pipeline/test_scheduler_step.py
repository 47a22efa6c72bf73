"""What a step is told, and what happens around it, against one process."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from pipegrad.errors import StepError
from tests.support.gradients.cases import rank
from tests.support.pipeline.models import TOKENS
from tests.support.pipeline.pipelines import loss_of
from tests.support.pipeline.schedulers import MOST, batch, digest, error
from tests.support.pipeline.trained import Twins, held_by, tied
from tests.support.rounding import rounding

pytestmark = pytest.mark.ranks(2)

BFLOAT16 = torch.autocast("cpu", dtype=torch.bfloat16)


def test_float64_one_element_and_batch_normalization_are_as_in_one_process() -> None:
    """Three microbatches: a third is not exact, and in float32 far from it."""
    twins = Twins(lambda: tied().double(), 3, most=rounding(6 * TOKENS, dtype=torch.float64))
    for step in range(2):
        twins.step(step)
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
        tokens, target = batch(step, 8)
        twins.scheduler.evaluate(tokens, target=target)
        truth = dict(twins.true.named_buffers())
        for name, buffer in (n for stage in twins.stages for n in stage.module.named_buffers()):
            if "num_batches" in name:
                assert buffer == 4 * (step + 1)
            assert error(buffer.float(), truth[name].float()) <= MOST, name
    twins.close()


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_autocast_around_a_step_is_autocast_around_one_process(schedule: str) -> None:
    twins = Twins(schedule=schedule)
    for step in range(2):
        with BFLOAT16:
            twins.step(step, num_parts=4)
    tokens, target = batch(0, 8)
    twins.scheduler.step(tokens, target=target)
    with BFLOAT16:
        twins.alone(tokens, target, 4)
    assert max(twins.apart().values()) > 1e-3, "float32 is as good"
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
