"""Replicas that train alone and meet: on ranks, and simulated in one process."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

import pipegrad
from pipegrad import Scheduler, Topology
from pipegrad.errors import PipegradError
from tests.support.pipeline.models import TOKENS, VOCAB, Block, Embed, Head
from tests.support.rounding import ADAM_EPS

ROWS, MICROBATCHES = 4, 2


@dataclass(frozen=True)
class Run:
    """How replicas train.

    Attributes:
        steps: How many steps.
        every: Steps between two meetings.
        lr: Of the outer step.
        momentum: Of the outer step.
        replicas: How many.
        clip: Largest norm of a replica's gradients; None not to clip.
        beside: Other handlers.
        inner: Data ranks in a replica. If there are several, replicas lie along "out".
        options: Of the Scheduler.
        dtype: Of the parameters.
        is_published_by_hand: Whether the optimizer is the caller's own.
    """

    steps: int = 6
    every: int = 2
    lr: float = 0.7
    momentum: float = 0.9
    replicas: int = 2
    clip: float | None = None
    beside: Sequence[Any] = ("pipeline-shared",)
    inner: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    is_published_by_hand: bool = False

    @property
    def handlers(self) -> list[Any]:
        outer = {"name": "diloco", "every": self.every, "lr": self.lr, "momentum": self.momentum}
        return [*self.beside, outer if self.inner == 1 else outer | {"axis": "out"}]


@dataclass
class Seen:
    """What one rank saw.

    Attributes:
        weights: After each step, name in the uncut model -> parameter.
        losses: After each step, the mean over replicas.
        norms: After each step.
        met_bytes: After each step, bytes so far.
        reduced_bytes: Of one step.
    """

    weights: list[dict[str, Tensor]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    met_bytes: list[int] = field(default_factory=list)
    reduced_bytes: int = 0


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """An embedding that is tied to the head, and a frozen parameter."""
    torch.manual_seed(3)
    embed = Embed()
    first = Block()
    first.norm.bias.requires_grad_(False)
    return nn.Sequential(embed, first, Block(), Head(embed.weight)).to(dtype)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1).float(), target.flatten())


def batch(step: int, share: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(1000 * step + share)
    tokens = torch.randint(VOCAB, (ROWS, TOKENS), generator=made)
    return tokens, torch.randint(VOCAB, (ROWS, TOKENS), generator=made)


def make_scheduler(run: Run) -> Scheduler:
    dimensions = {} if run.inner == 1 else {"out": run.replicas}
    topology = Topology.create(
        pipeline=2, dimensions=dimensions, data=("dp", *dimensions), device_type="cpu"
    )
    return Scheduler(
        pipegrad.cut(model(run.dtype), 2),
        topology,
        schedule="1f1b",
        num_microbatches=MICROBATCHES,
        loss_fn=loss_of,
        handlers=run.handlers,
        **run.options,
    )


def make_optimizer(run: Run, scheduler: Scheduler) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "eps": ADAM_EPS}
    if run.is_published_by_hand:
        return torch.optim.AdamW(scheduler.sync.optimizer_parameters(), **options)
    return scheduler.optimizer(torch.optim.AdamW, **options)


def weights_of(scheduler: Scheduler) -> dict[str, Tensor]:
    sync = scheduler.sync
    return {
        record.key.partition(".")[2]: sync.parameter(record).detach().clone()
        for record in sync.records()
    }


def share_of(scheduler: Scheduler) -> int:
    return scheduler.topology.coordinate(scheduler.topology.data_axes)


def train_step(
    run: Run, scheduler: Scheduler, optimizer: torch.optim.Optimizer, step: int, seen: Seen
) -> None:
    sync = scheduler.sync
    tokens, target = batch(step, share_of(scheduler))
    result = scheduler.step(tokens, target=target)
    if run.clip is not None:
        seen.norms.append(sync.clip_grad_norm_(run.clip).item())
    optimizer.step()
    if run.is_published_by_hand:
        sync.publish()
    optimizer.zero_grad()
    sync.wait_parameters()
    seen.losses.append(result.loss.item())
    seen.weights.append(weights_of(scheduler))
    statistics = sync.statistics()
    seen.met_bytes.append(statistics.met_bytes)
    seen.reduced_bytes = statistics.reduced_bytes


def train(run: Run) -> Seen:
    """Trains on real ranks; returns what this rank saw."""
    scheduler, seen = make_scheduler(run), Seen()
    optimizer = make_optimizer(run, scheduler)
    for step in range(run.steps):
        train_step(run, scheduler, optimizer, step, seen)
        scheduler.sync.check_replicas()
    scheduler.close()
    return seen


def train_all(runs: Sequence[Run]) -> list[Seen | str]:
    """Trains one run after the other; a run that fails gives its error."""
    return list(_outcomes(runs))


def _outcomes(runs: Sequence[Run]) -> Iterator[Seen | str]:
    for run in runs:
        try:
            yield train(run)
        except PipegradError as error:
            yield f"{type(error).__name__}: {error}"


def simulate(run: Run) -> list[list[dict[str, Tensor]]]:
    """Trains the replicas in one process; returns replica -> step -> name -> parameter.

    This is DiLoCo as its paper has it, by torch's own optimizers.
    """
    anchor = model(run.dtype)
    replicas = [copy.deepcopy(anchor) for _ in range(run.replicas)]
    optimizers = [
        torch.optim.AdamW(r.parameters(), lr=0.02, weight_decay=0.1, eps=ADAM_EPS) for r in replicas
    ]
    trained = [p for p in anchor.parameters() if p.requires_grad]
    outer = torch.optim.SGD(trained, lr=run.lr, momentum=run.momentum, nesterov=run.momentum > 0)
    seen: list[list[dict[str, Tensor]]] = [[] for _ in replicas]
    for step in range(run.steps):
        for number, (replica, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            for share in range(number, run.replicas * run.inner, run.replicas):
                # Shares of the inner data ranks; "out" is the last dimension.
                tokens, target = batch(step, share)
                (loss_of(replica(tokens), target) / run.inner).backward()
            if run.clip is not None:
                nn.utils.clip_grad_norm_(replica.parameters(), run.clip)
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % run.every == 0:
            meet(trained, replicas, outer)
        for of_replica, replica in zip(seen, replicas, strict=True):
            of_replica.append({n: p.detach().clone() for n, p in replica.named_parameters()})
    return seen


def meet(
    trained: Sequence[nn.Parameter], replicas: Sequence[nn.Module], outer: torch.optim.Optimizer
) -> None:
    """Makes the outer step, and gives all replicas the result."""
    own = [[p for p in r.parameters() if p.requires_grad] for r in replicas]
    with torch.no_grad():
        for number, parameter in enumerate(trained):
            ways = [parameter - of_replica[number] for of_replica in own]
            parameter.grad = torch.stack(ways).mean(0)
        outer.step()
        for of_replica in own:
            for target, parameter in zip(of_replica, trained, strict=True):
                target.copy_(parameter)
