"""Stages that are functions, in float64: what a step is given, and what a stage keeps of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from pipegrad import Scheduler, Stage, Topology
from pipegrad.comm import sync_points
from tests.support.gradients.cases import rank
from tests.support.pipeline.scales import ELSEWHERE

WIDTH, NUM_MICROBATCHES = 3, 4


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


def make(*modules: nn.Module, names: Mapping[int, Any] | None = None, **options: Any) -> Scheduler:
    """Returns a pipeline of a stage a rank, or of all stages on each."""
    here = [rank()] if len(modules) == 2 else [0]
    if len(modules) == 1:
        options = {"handlers": ["data-parallel"], **options}
    stages = [
        Stage(modules[i], i, *(names or {}).get(i, ()), recompute=options.pop("recompute", False))
        for i in here
    ]
    options = {
        "schedule": "1f1b",
        "num_microbatches": NUM_MICROBATCHES,
        "loss_fn": mean_square,
        "handlers": ["noop"],
        **options,
    }
    return Scheduler(stages, Topology.create(pipeline=len(modules)), **options)


def train(scheduler: Scheduler, *inputs: Any, **named: Any) -> float:
    """Takes a step from gradients of None; returns the loss."""
    for record in scheduler.sync.records():
        scheduler.sync.parameter(record).grad = None
    return float(scheduler.step(*inputs, **named).loss)


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
def counted() -> Iterator[list[int]]:
    """Notes the bytes of each message that is sent."""
    sent, send = list[int](), sync_points.Backend.send

    def noted(self: Any, group: Any, tensor: Tensor, peer: int, tag: int) -> Any:
        sent.append(tensor.nbytes)
        return send(self, group, tensor, peer, tag)

    with mock.patch.object(sync_points.Backend, "send", noted):
        yield sent
