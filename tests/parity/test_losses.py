"""Losses of stages, weights and metrics against one process, under schedules and placements.

The model is tied, has experts, and its stages make losses. With ``token_mean`` one process calls
cross_entropy with ignore_index once, over the whole batch.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

from pipegrad import Scheduler, Stage, schedules
from tests.support.pairwise import pairwise
from tests.support.pipeline import trained
from tests.support.pipeline.models import TOKENS, WIDTH, Block, Embed, Head
from tests.support.pipeline.placements import HANDLERS
from tests.support.pipeline.schedulers import ROWS, batch, error, share, topology, wrong
from tests.support.pipeline.trained import (
    OnMesh,
    Seen,
    backward,
    bits,
    checked,
    held_by,
    on_ranks,
    once,
)
from tests.support.ranked import gathered
from tests.support.rounding import rounding

IGNORED = -100
LAYERS, EXPERTS, BALANCE = 4, 2, 0.5
TIED = [["0.weight", "3.weight"]]
LEARNING_RATE = 0.05
MOST_MICROBATCHES = 4 * 2  # of all replicas
MOST = rounding(MOST_MICROBATCHES * ROWS * TOKENS * 3)  # of three steps


class Experts(nn.Module):
    """A block of experts; returns a balance loss too, a sum over its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.blocks = nn.ModuleList(Block() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gates = self.gate(x).softmax(-1)
        out = sum(block(x) * gates[..., i : i + 1] for i, block in enumerate(self.blocks))
        load = gates.mean((0, 1))
        assert isinstance(out, Tensor)
        return out, BALANCE * EXPERTS * (load * load).sum() * (x.shape[0] * x.shape[1])


class Layers(nn.Sequential):
    """Layers under their names in the uncut model; returns a value, and its balance losses."""

    def forward(self, x: Tensor) -> Any:
        losses = list[Tensor]()
        for layer in self:
            x = layer(x)
            if isinstance(layer, Experts):
                x, loss = x
                losses.append(loss)
        return (x, torch.stack(losses).sum()) if losses else x


def build() -> Layers:
    """Returns the uncut model: the same bits in every process."""
    torch.manual_seed(5)
    embed = Embed()
    return Layers(embed, Experts(), Experts(), Head(embed.weight))


def cut(
    model: nn.Sequential, local: Sequence[int], num_stages: int, *, recompute: bool
) -> list[Stage]:
    """Returns this rank's stages, with the losses that they make."""
    number, stages = LAYERS // num_stages, list[Stage]()
    for stage in local:
        names = [str(i) for i in range(stage * number, (stage + 1) * number)]
        module = Layers()
        for name in names:
            module.add_module(name, model.get_submodule(name))
        makes_loss = any(isinstance(layer, Experts) for layer in module)
        losses = ("balance",) if makes_loss else ()
        stages.append(Stage(module, stage, losses=losses, recompute=recompute))
    return stages


def sums(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Mapping[str, Any]]:
    """Returns the sum of losses, what it counts, and metrics: as loss_fn with weights does."""
    valid = target != IGNORED
    loss = F.cross_entropy(
        logits.float().flatten(0, 1), target.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    right = (logits.argmax(-1) == target) & valid
    return loss, valid.sum(), {"rows": len(target), "accuracy": right.sum() / valid.sum()}


def means(logits: Tensor, target: Tensor) -> tuple[Tensor, Mapping[str, Any]]:
    """The same, of a loss that is a mean."""
    loss, weight, metrics = sums(logits, target)
    return loss / weight, metrics


@dataclass(frozen=True)
class Case(OnMesh):
    """A way to train the model."""

    schedule: str
    handlers: str = "replicate"
    mesh: str = "2x2"  # pipeline x data
    loss_reduction: str = "token_mean"
    recompute: bool = False

    def __str__(self) -> str:
        told = f"{self.loss_reduction} {self.schedule} {self.handlers} {self.mesh}"
        return f"{told} recomputed" if self.recompute else told

    @property
    def num_microbatches(self) -> int:
        return MOST_MICROBATCHES // self.data

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """Returns this rank's tokens and targets."""
        tokens, target = batch_of(self.loss_reduction, number)
        return share(tokens, topology(self.pipeline)), share(target, topology(self.pipeline))

    def scheduler(self) -> Scheduler:
        """Returns a Scheduler of this rank's stages."""
        at = topology(self.pipeline)
        made = schedules.build(
            self.schedule, num_ranks=self.pipeline, num_microbatches=self.num_microbatches
        )
        local = at.with_stages(made.stage_to_rank).local_stages
        return Scheduler(
            cut(build(), local, len(made.stage_to_rank), recompute=self.recompute),
            at,
            schedule=made,
            loss_fn=sums if self.loss_reduction == "token_mean" else means,
            loss_reduction=self.loss_reduction,
            tied=TIED,
            handlers=HANDLERS[self.handlers],
        )


def batch_of(loss_reduction: str, number: int) -> tuple[Tensor, Tensor]:
    """Returns tokens and targets over all data ranks, most of the first ones ignored.

    With weights a whole microbatch is ignored.
    """
    tokens, target = batch(300 + number, ROWS * MOST_MICROBATCHES)
    target[: 2 * ROWS + number, 1:] = IGNORED
    if loss_reduction == "token_mean":
        target[ROWS : 2 * ROWS] = IGNORED
    return tokens, target


@dataclass(frozen=True)
class Result:
    """What one process has: the loss, with its graph; metrics, and the outputs of the model."""

    loss: Tensor
    metrics: dict[str, float]
    outputs: Tensor


def alone(loss_reduction: str, model: nn.Module, *numbers: int) -> Result:
    """Runs one process over some batches.

    With weights cross_entropy itself takes the mean over all that is not ignored, in one call.
    """
    batches = [batch_of(loss_reduction, number) for number in numbers]
    tokens, target = (torch.cat(parts) for parts in zip(*batches, strict=True))
    losses, balances, accuracies, outputs = [], [], [], []
    for x, y in zip(tokens.split(ROWS), target.split(ROWS), strict=True):
        logits, balance = model(x)
        loss, metrics = means(logits, y)
        losses.append(loss)
        balances.append(balance)
        accuracies.append(metrics["accuracy"])
        outputs.append(logits)
    logits, number = torch.cat(outputs), len(losses)
    if loss_reduction == "token_mean":
        flat = logits.float().flatten(0, 1), target.flatten()
        mean = F.cross_entropy(*flat, ignore_index=IGNORED)
        valid = target != IGNORED
        accuracy = (logits.argmax(-1) == target)[valid].float().mean()
        balance = torch.stack(balances).sum() / valid.sum()
    else:
        mean, accuracy = torch.stack(losses).mean(), torch.stack(accuracies).mean()
        balance = torch.stack(balances).sum() / number
    found = {"balance": balance.item(), "rows": float(ROWS), "accuracy": accuracy.item()}
    return Result(mean + balance, found, logits.detach())


# The cases.

SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1")
PLACEMENTS = ("replicate", "sharded", "owner", "owner+sharded")
CASES = [
    *(
        Case(schedule, handlers, loss_reduction=reduction, recompute=again)
        for schedule, handlers, reduction, again in pairwise(
            SCHEDULES, PLACEMENTS, ("token_mean", "mean"), (False, True)
        )
    ),
    Case("1f1b", mesh="4x1"),
    Case("zb-h1", mesh="4x1", loss_reduction="mean"),
    Case("gpipe", mesh="4x1"),
    Case("1f1b", "sharded", mesh="1x4"),
    Case("zb-h1", "owner", mesh="2x1", loss_reduction="mean", recompute=True),
    Case("1f1b", mesh="2x1"),
]
# The first step learns the names of the metrics, and the last one accumulates two batches.
BATCHES, EVALUATED = ((0,), (1,), (10, 11)), 20
TRAINING: dict[str, Any] = {"steps": len(BATCHES), "parts": [len(parts) for parts in BATCHES]}


@once
def truth(reduction: str) -> tuple[Seen, list[Result]]:
    """Trains in one process, and evaluates; returns the results too."""
    model, results = build(), list[Result]()

    def step(number: int, part: int) -> Tensor:
        parts = BATCHES[number]
        found = alone(reduction, model, parts[part])
        results.append(replace(found, loss=found.loss.detach()))
        if reduction == "mean":
            return backward(found.loss)
        if part + 1 == len(parts):  # with weights a step is one batch of all
            backward(alone(reduction, model, *parts).loss)
        return found.loss

    held = dict(model.named_parameters(remove_duplicate=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    seen = trained.train(step, lambda: held, optimizer=optimizer, **TRAINING)
    with torch.no_grad():
        results.append(alone(reduction, model, EVALUATED))
    return seen, results


@pytest.mark.parametrize("case", on_ranks(CASES))
@checked(
    Case("1f1b", mesh="2x1"),
    Case("1f1b", "sharded", mesh="1x4"),
    Case("zb-h1", mesh="4x1", loss_reduction="mean"),
)
def test_loss_metrics_and_gradients_are_those_of_one_process(case: Case) -> None:
    at, scheduler = topology(case.pipeline), case.scheduler()
    sync, results, tied = scheduler.sync, list[Any](), list[dict[str, Tensor]]()
    mine = functools.partial(held_by, scheduler)

    def look() -> None:
        """Looks at what is tied, after the optimizer."""
        sync.wait_parameters()
        tied.append({n: p.detach().clone() for n, p in mine().items() if n in TIED[0]})

    def step(number: int, part: int) -> Tensor:
        if number > 0 and part == 0:
            look()
        tokens, target = case.batch(BATCHES[number][part])
        results.append(scheduler.step(tokens, target=target, outputs=True))
        return results[-1].loss  # type: ignore[no-any-return]

    optimizer = torch.optim.SGD(sync.optimizer_parameters(), lr=LEARNING_RATE)
    seen = trained.train(
        step, lambda: trained.stepped(sync), sync=sync, optimizer=optimizer, **TRAINING
    )
    look()
    tokens, target = case.batch(EVALUATED)
    results.append(scheduler.evaluate(tokens, target=target))

    true, true_results = truth(case.loss_reduction)
    for number, gradients in enumerate(seen.gradients):
        errors = trained.differences_of_stepped(sync, gradients, true.gradients[number])
        assert wrong(errors, MOST) == {}, f"step {number}"
        # Of two tied names the main parameter has the first.
        names = {TIED[0][0] if name in TIED[0] else name for name in true.parameters}
        assert set().union(*gathered({*errors})) >= names
    assert trained.differences(replace(seen, gradients=[]), true, MOST) == {}
    for result, true_result in zip(results, true_results, strict=True):
        apart = {"loss": error(result.loss, true_result.loss)}
        assert result.metrics.keys() == true_result.metrics.keys()
        for name, value in true_result.metrics.items():
            apart[name] = abs(result.metrics[name] - value) / (abs(value) or 1.0)
        for n, out in enumerate(result.outputs):
            apart[f"output {n}"] = error(out, share(true_result.outputs, at))
        assert wrong(apart, MOST) == {}
        assert bool(result.outputs) == (at.coordinate("pp") == at.size("pp") - 1)
    numbers = [(result.loss.item(), *result.metrics.values()) for result in results]
    assert len({tuple(others) for others in gathered(numbers)}) == 1, "they differ by rank"
    assert len({*numbers}) == len(numbers), "a step that was not run again would not show"
    for copies in tied:
        assert bits(copies, TIED).keys() == {TIED[0][0]}
    sync.check_replicas()
    scheduler.close()
