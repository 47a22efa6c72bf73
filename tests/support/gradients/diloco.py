"""Replicas that train alone and meet: on ranks, and simulated in one process."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

import pipegrad
from pipegrad import GradientSync, Scheduler, Topology
from pipegrad_handlers.diloco import Meetings
from tests.support.gradients.cases import rank
from tests.support.pipeline.models import TOKENS, VOCAB, Block, Embed, Head
from tests.support.ranked import gathered
from tests.support.rounding import ADAM_EPS

ROWS, MICROBATCHES, REPLICAS = 4, 2, 2


@dataclass(frozen=True)
class Run:
    """How replicas train."""

    steps: int = 4
    every: int = 2  # steps between two meetings
    lr: float = 0.7  # of the outer step
    momentum: float = 0.9
    clip: float | None = None  # largest norm of a replica's gradients
    beside: Sequence[Any] = ("pipeline-shared",)  # other handlers
    inner: int = 1  # data ranks in a replica; if there are several, replicas lie along "out"
    options: dict[str, Any] = field(default_factory=dict)  # of the Scheduler
    dtype: torch.dtype = torch.float32
    is_published_by_hand: bool = False  # the optimizer is the caller's own

    @property
    def handlers(self) -> list[Any]:
        outer = {"name": "diloco", "every": self.every, "lr": self.lr, "momentum": self.momentum}
        return [*self.beside, outer if self.inner == 1 else outer | {"axis": "out"}]


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
    generator = torch.Generator().manual_seed(1000 * step + share)
    tokens = torch.randint(VOCAB, (ROWS, TOKENS), generator=generator)
    return tokens, torch.randint(VOCAB, (ROWS, TOKENS), generator=generator)


def meetings_of(sync: GradientSync) -> Meetings:
    assert isinstance(sync.outer_optimizer, Meetings)
    return sync.outer_optimizer


def weights_of(scheduler: Scheduler) -> dict[str, Tensor]:
    """Returns copies of this rank's parameters, by name in the uncut model."""
    sync = scheduler.sync
    return {
        record.key.partition(".")[2]: sync.parameter(record).detach().clone()
        for record in sync.records()
    }


def make_scheduler(
    run: Run, *, whole: nn.Sequential | None = None, handlers: Any = None
) -> Scheduler:
    """Returns one of two stages by replicas."""
    dimensions = {} if run.inner == 1 else {"out": REPLICAS}
    topology = Topology.create(
        pipeline=2, dimensions=dimensions, data=("dp", *dimensions), device_type="cpu"
    )
    return Scheduler(
        pipegrad.cut(whole or model(run.dtype), 2),
        topology,
        schedule="1f1b",
        num_microbatches=MICROBATCHES,
        loss_fn=loss_of,
        handlers=handlers or run.handlers,
        **run.options,
    )


class Trainer:
    """Trains on real ranks.

    Attributes:
        weights: After each step, as `weights_of`.
        losses: Of each step, the mean over replicas.
        norms: Of each step.
        met_bytes: After each step, bytes so far.
    """

    def __init__(
        self, run: Run, *, whole: nn.Sequential | None = None, handlers: Any = None
    ) -> None:
        self.run = run
        self.scheduler = make_scheduler(run, whole=whole, handlers=handlers)
        self.sync, topology = self.scheduler.sync, self.scheduler.topology
        self.share = topology.coordinate(topology.data_axes)
        options: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "eps": ADAM_EPS}
        self.optimizer: torch.optim.Optimizer
        if run.is_published_by_hand:
            self.optimizer = torch.optim.AdamW(self.sync.optimizer_parameters(), **options)
        else:
            self.optimizer = self.scheduler.optimizer(torch.optim.AdamW, **options)
        self.weights: list[dict[str, Tensor]] = []
        self.losses, self.norms, self.met_bytes = list[float](), list[float](), list[int]()

    def compute(self, step: int) -> Tensor:
        tokens, target = batch(step, self.share)
        loss = self.scheduler.step(tokens, target=target).loss
        assert loss is not None
        return loss

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, steps: Iterable[int]) -> None:
        for step in steps:
            loss = self.compute(step)
            if self.run.clip is not None:
                self.norms.append(self.sync.clip_grad_norm_(self.run.clip).item())
            self.optimizer.step()
            if self.run.is_published_by_hand:
                self.sync.publish()
            self.optimizer.zero_grad()
            self.sync.wait_parameters()
            self.losses.append(loss.item())
            self.weights.append(weights_of(self.scheduler))
            self.met_bytes.append(meetings_of(self.sync).met_bytes)

    def are_equal(self) -> bool:
        """Whether this rank's parameters are those of its copy in the other replica."""
        weights = gathered(weights_of(self.scheduler))
        return same(weights[rank()], weights[rank() ^ 1])

    def have_met(self) -> tuple[int, bool]:
        meetings = meetings_of(self.sync)
        return meetings._last // meetings._every, self.are_equal()


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def simulate(run: Run) -> list[list[dict[str, Tensor]]]:
    """Trains the replicas in one process; returns replica -> step -> name -> parameter.

    This is DiLoCo as its paper has it, by torch's own optimizers.
    """
    anchor = model(run.dtype)
    replicas = [copy.deepcopy(anchor) for _ in range(REPLICAS)]
    optimizers = [
        torch.optim.AdamW(r.parameters(), lr=0.02, weight_decay=0.1, eps=ADAM_EPS) for r in replicas
    ]
    trained = [p for p in anchor.parameters() if p.requires_grad]
    outer = torch.optim.SGD(trained, lr=run.lr, momentum=run.momentum, nesterov=run.momentum > 0)
    weights: list[list[dict[str, Tensor]]] = [[] for _ in replicas]
    for step in range(run.steps):
        for number, (replica, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            for share in range(number, REPLICAS * run.inner, REPLICAS):
                # Shares of the inner data ranks; "out" is the last dimension.
                tokens, target = batch(step, share)
                (loss_of(replica(tokens), target) / run.inner).backward()
            if run.clip is not None:
                nn.utils.clip_grad_norm_(replica.parameters(), run.clip)
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % run.every == 0:
            meet(trained, replicas, outer)
        for of_replica, replica in zip(weights, replicas, strict=True):
            of_replica.append({n: p.detach().clone() for n, p in replica.named_parameters()})
    return weights


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
