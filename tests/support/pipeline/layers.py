"""Stages that are functions, in float64: what a step is given, and what a stage keeps of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from pipegrad import Scheduler, Stage, Topology
from pipegrad.comm import sync_points
from tests.support.gradients.cases import outcome, rank
from tests.support.pipeline.scales import ELSEWHERE

WIDTH, NUM_MICROBATCHES = 3, 4
MOST = 1e-12  # float64; sums of some ten terms in another order


class Layer(nn.Module):
    """A stage: what it does is a function of its linear layer and of what it is given."""

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self._function = function or (lambda linear, x: linear(x).tanh())

    def forward(self, *values: Any) -> Any:
        return self._function(self.linear, *values)


def mean_square(x: Tensor, target: Tensor) -> Tensor:
    return (x - target).square().mean()


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def one_stage_each(
    *modules: nn.Module, of_stage: Sequence[Mapping[str, Any]] | None = None, **options: Any
) -> Scheduler:
    """Returns a pipeline whose stages are these modules, one on each of its ranks.

    Args:
        *modules: In order.
        of_stage: Options of each Stage.
        **options: Of the Scheduler.
    """
    at = Topology.create(pipeline=len(modules))
    here = at.coordinate("pp")
    stage = Stage(modules[here], here, **(of_stage[here] if of_stage else {}))
    defaults = {"schedule": "1f1b", "num_microbatches": NUM_MICROBATCHES, "loss_fn": mean_square}
    return Scheduler([stage], at, **{**defaults, **options})


def make(*modules: nn.Module, names: Mapping[int, Any] | None = None, **options: Any) -> Scheduler:
    """Returns a pipeline of a stage a rank, with names of what stages take and make."""
    recompute = options.pop("recompute", False)
    of_stage = [
        {
            "recompute": recompute,
            **dict(zip(("inputs", "outputs"), (names or {}).get(i, ()), strict=False)),
        }
        for i in range(len(modules))
    ]
    options = {"handlers": ["noop" if len(modules) > 1 else "data-parallel"], **options}
    return one_stage_each(*modules, of_stage=of_stage, **options)


def train(scheduler: Scheduler, *inputs: Any, **named: Any) -> float:
    """Takes a step from gradients of None; returns the loss."""
    for record in scheduler.sync.records():
        scheduler.sync.parameter(record).grad = None
    return float(scheduler.step(*inputs, **named).loss)


class Pipeline:
    """A layer a rank, and a copy of all of them in one process."""

    def __init__(self, num_stages: int = 2, **options: Any) -> None:
        self.layers, self.true = [[Layer() for _ in range(num_stages)] for _ in range(2)]
        self.own = self.layers[rank()]
        self.scheduler = one_stage_each(*self.layers, **{"handlers": ["noop"], **options})
        self.close = self.scheduler.close

    def step(self, rows: int, **options: Any) -> str:
        """Takes a step; returns what it raised, or that it was right."""
        return outcome(lambda: self._error(rows, **options) < MOST or "wrong")

    def evaluate(self, rows: int, **options: Any) -> str:
        x, y = batch(rows)
        return outcome(lambda: float(self.scheduler.evaluate(x, target=y, **options).loss) > 0)

    def _error(self, rows: int, *, seed: int = 0, **options: Any) -> float:
        x, y = batch(rows, seed)
        self._train(x, target=y, **options)
        for module in self.true:
            module.zero_grad()
        mean_square(nn.Sequential(*self.true)(x), y).backward()
        return farthest(self.own, self.true[rank()])

    def _train(self, x: Tensor, **options: Any) -> None:
        train(self.scheduler, x, **options)


def batch(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    return normal(rows, WIDTH, seed=seed), normal(rows, WIDTH, seed=seed + 1)


def distance(found: Tensor | None, true: Tensor | None) -> float:
    if found is None or true is None:
        return 0.0 if found is true else float("inf")
    return float((found - true).abs().max() / true.abs().max())


def farthest(module: nn.Module, twin: nn.Module) -> float:
    """Returns the largest distance between gradients of two modules."""
    pairs = zip(module.parameters(), twin.parameters(), strict=True)
    return max(distance(p.grad, q.grad) for p, q in pairs)


def blamed(source: int, why: str) -> str:
    """Returns how an error of a rank begins here: `why` there, or everywhere if it is -1."""
    return why if source in (-1, rank()) else f"{ELSEWHERE}rank {source}: {why}"


@contextmanager
def counted(verb: str = "send") -> Iterator[list[int]]:
    """Notes the bytes of each message that is sent, or of the memory of each receive."""
    sent, send = list[int](), getattr(sync_points.Backend, verb)

    def noted(self: Any, group: Any, tensor: Tensor, peer: int, tag: int) -> Any:
        sent.append(tensor.nbytes)
        return send(self, group, tensor, peer, tag)

    with mock.patch.object(sync_points.Backend, verb, noted):
        yield sent
