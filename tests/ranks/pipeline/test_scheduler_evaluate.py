"""Scheduler.evaluate: the loss and the outputs of one process, and nothing else changes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.support.gradients.cases import Case, Replies, on, outcome, replies
from tests.support.pipeline.pipelines import loss_of
from tests.support.pipeline.schedulers import MOST, batch, digest, error, named, wrong
from tests.support.pipeline.twins import Twins, tied

PIPELINE: list[Case] = []
pipeline = replies(2, PIPELINE)


def with_dropout() -> nn.Sequential:
    """Random in training, and some of its parts are in evaluation mode all the time."""
    model = tied()
    for layer in (2, 5):
        model[layer] = nn.Sequential(model[layer], nn.Dropout(0.5), nn.Dropout(0.5).eval())
    return model


class Evaluated(Twins):
    """Has dropout, which one process leaves out; keeps the last outputs."""

    def __init__(self) -> None:
        super().__init__(with_dropout)
        self.true.eval()
        self.outputs: tuple[Tensor, ...] = ()

    def evaluate(self, seed: int, *, told: bool = True) -> Tensor:
        """Evaluates a batch of another size than in training; returns the loss."""
        tokens, target = batch(seed, 12)
        with torch.no_grad():
            out = self.true(tokens)
        result = self.scheduler.evaluate(tokens, target=target if told else None)
        self.outputs = result.outputs
        if told:
            self.errors[f"loss {seed}"] = error(result.loss, loss_of(out, target))
        if result.outputs:
            self.errors[f"outputs {seed}"] = error(result.outputs[0], out)
        return result.loss

    @property
    def flags(self) -> list[list[bool]]:
        return [[part.training for part in stage.module.modules()] for stage in self.stages]

    @property
    def gradients(self) -> dict[str, Tensor | None]:
        return {name: parameter.grad for name, parameter in named(self.stages).items()}


@on(PIPELINE)
def evaluation() -> dict[str, Any]:
    twins = Evaluated()
    flags = twins.flags
    twins.evaluate(0)  # learned first
    tokens, target = batch(1, 8)
    trained = twins.scheduler.step(tokens, target=target).loss
    twins.evaluate(2)
    twins.scheduler.sync.clip_grad_norm_(float("inf"))
    gradients = twins.gradients
    bits = {name: digest(gradient) for name, gradient in gradients.items()}
    twins.evaluate(3)
    untold = outcome(lambda: twins.evaluate(4, told=False).item())
    kept = all(gradient is gradients[name] for name, gradient in twins.gradients.items())
    after = {name: digest(gradient) for name, gradient in twins.gradients.items()}
    with torch.no_grad():
        apart = error(trained, loss_of(twins.true(tokens), target))
    return {
        "errors": twins.close(),
        "num outputs": len(twins.outputs),
        "training is random": apart > 0.001,
        "flags kept": flags == twins.flags,
        "flags differ": any(len(set(found)) == 2 for found in flags),
        "gradients kept": kept and bits == after and "None" not in bits.values(),
        "untold": untold,
    }


def test_evaluation_has_the_loss_and_the_outputs_of_one_process(pipeline: Replies) -> None:
    losses = {"loss 0", "loss 2", "loss 3"}
    first, last = (found["evaluation"]["errors"] for found in pipeline)

    assert wrong(first, MOST) == wrong(last, MOST) == {}
    assert first.keys() == losses
    assert last.keys() - {"outputs 4"} == losses | {f"outputs {seed}" for seed in (0, 2, 3)}
    assert all(found["evaluation"]["training is random"] for found in pipeline), "shows nothing"
    assert [found["evaluation"]["num outputs"] for found in pipeline] == [0, 1]


def test_evaluation_leaves_gradients_and_training_flags(pipeline: Replies) -> None:
    for found in pipeline:
        assert found["evaluation"]["gradients kept"]
        assert found["evaluation"]["flags kept"]
        assert found["evaluation"]["flags differ"], "shows nothing"


def test_evaluation_without_a_target_has_no_loss(pipeline: Replies) -> None:
    assert [found["evaluation"]["untold"] for found in pipeline] == ["nan", "nan"]
    assert "outputs 4" in pipeline[1]["evaluation"]["errors"]
