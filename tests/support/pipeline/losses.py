"""A tied model with experts, whose stages make losses; and what one process makes of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

from pipegrad import Scheduler, Stage, schedules
from tests.support.pipeline.models import TOKENS, WIDTH, Block, Embed, Head
from tests.support.pipeline.placements import HANDLERS
from tests.support.pipeline.schedulers import ROWS, batch, share, topology
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


def build(dtype: torch.dtype = torch.float32) -> Layers:
    """Returns the uncut model: the same bits in every process."""
    torch.manual_seed(5)
    embed = Embed()
    return Layers(embed, Experts(), Experts(), Head(embed.weight)).to(dtype)


def cut(model: nn.Sequential, local: Sequence[int], num_stages: int, **options: Any) -> list[Stage]:
    """Returns this rank's stages, with the losses that they make."""
    number, stages = LAYERS // num_stages, list[Stage]()
    for stage in local:
        names = [str(i) for i in range(stage * number, (stage + 1) * number)]
        module = Layers()
        for name in names:
            module.add_module(name, model.get_submodule(name))
        makes_loss = any(isinstance(layer, Experts) for layer in module)
        losses = ("balance",) if makes_loss else ()
        stages.append(Stage(module, stage, losses=losses, **options))
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
class Case:
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
    def pipeline(self) -> int:
        return int(self.mesh[0])

    @property
    def data(self) -> int:
        return int(self.mesh[2])

    @property
    def num_ranks(self) -> int:
        return self.pipeline * self.data

    @property
    def num_microbatches(self) -> int:
        return MOST_MICROBATCHES // self.data

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """Returns this rank's tokens and targets."""
        tokens, target = batch_of(self.loss_reduction, number)
        return share(tokens, topology(self.pipeline)), share(target, topology(self.pipeline))

    def scheduler(self, model: nn.Sequential, **options: Any) -> Scheduler:
        """Returns a Scheduler of this rank's stages."""
        at = topology(self.pipeline)
        made = schedules.build(
            self.schedule, num_ranks=self.pipeline, num_microbatches=self.num_microbatches
        )
        local = at.with_stages(made.stage_to_rank).local_stages
        return Scheduler(
            cut(model, local, len(made.stage_to_rank), recompute=self.recompute),
            at,
            schedule=made,
            loss_fn=sums if self.loss_reduction == "token_mean" else means,
            loss_reduction=self.loss_reduction,
            tied=TIED,
            handlers=HANDLERS[self.handlers],
            **options,
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
