"""Models that a configuration can name: right ones, and wrong ones."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn


class Does(nn.Module):
    """A layer that computes a function of its input, and counts its calls from 0."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function, self.calls = function, -1

    def forward(self, hidden: Any) -> Any:
        self.calls += 1
        takes_calls = self.function.__code__.co_argcount == 2
        return self.function(hidden, self.calls) if takes_calls else self.function(hidden)


def embedded(*layers: nn.Module | Callable[..., Any]) -> nn.Sequential:
    """Returns an embedding of 256 numbers a token, and layers; functions become `Does`."""
    made = [layer if isinstance(layer, nn.Module) else Does(layer) for layer in layers]
    return nn.Sequential(nn.Embedding(256, 256), *made)


def square() -> nn.Linear:
    return nn.Linear(256, 256)


def tied(*, width: int = 8, layers: int = 2, dropout: float = 0.0) -> nn.Sequential:
    embedding, head = nn.Embedding(256, width), nn.Linear(width, 256, bias=False)
    head.weight = embedding.weight
    blocks = [nn.Sequential(nn.Linear(width, width), nn.Dropout(dropout)) for _ in range(layers)]
    return nn.Sequential(embedding, *blocks, nn.LayerNorm(width), head)


def drawing(*, width: int = 8) -> nn.Sequential:
    """Adds a number of each generator of random numbers to what it is given."""

    def draw(x: Tensor) -> Tensor:
        return x + 0.1 * (random.random() + np.random.rand() + float(torch.rand(())))

    embedding, head = nn.Embedding(256, width), nn.Linear(width, 256, bias=False)
    head.weight = embedding.weight
    parts = [nn.Sequential(nn.Linear(width, width), Does(draw), nn.Dropout(0.1)) for _ in range(2)]
    return nn.Sequential(embedding, *parts, nn.LayerNorm(width), head)


def bare() -> nn.Sequential:
    """Its last two layers have no parameters."""
    return embedded(square(), nn.GELU(), nn.Identity())


def needs(*, width: int) -> nn.Sequential:
    return tied(width=width)


def fails() -> nn.Sequential:
    raise RuntimeError("no such checkpoint")


def no_module() -> int:
    return 3


def few_logits() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 100))


def few_tokens() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 256))


class Broken(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) * torch.nan


def not_finite() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(256, 8), Broken(8, 256))


def explodes() -> nn.Sequential:
    """Its gradients are not finite, though its logits are."""
    return embedded(lambda hidden: (hidden - hidden).sqrt() + hidden)


def reads_its_start() -> nn.Sequential:
    """Cannot be made on the meta device."""
    model = tied()
    model[0].weight.detach().mul_(model[0].weight.norm().item())  # type: ignore[operator]
    return model


def lonely() -> nn.Sequential:
    """Fails on one rank; the others meet in its forward."""
    if dist.get_rank() == 1:
        raise RuntimeError("mine alone")
    return embedded(lambda hidden: dist.all_reduce(torch.zeros(())) or hidden)


def exits() -> nn.Sequential:
    sys.exit(0)


def exits_forward() -> nn.Sequential:
    return embedded(lambda _: sys.exit("bye"))


def exits_later() -> nn.Sequential:
    """Is tried out with four microbatches, and exits in the first step."""
    return embedded(lambda hidden, calls: sys.exit(0) if calls > 3 else hidden)


def differing() -> nn.Sequential:
    """Draws before its last layer on one rank alone."""
    embedding = nn.Embedding(256, 8)
    if dist.get_rank():
        torch.rand(3)
    return nn.Sequential(embedding, nn.Linear(8, 256))


def differing_buffer() -> nn.Sequential:
    """Draws only a buffer of its last layer otherwise on one rank."""
    made = nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 256))
    made[1].register_buffer("drawn", torch.rand(3 + dist.get_rank())[-3:])
    return made


def empty() -> nn.Sequential:
    return nn.Sequential()


class Net(nn.Module):
    """No nn.Sequential: its layers are called by its own code, which reads the tokens for each."""

    def __init__(self, *, width: int = 8, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Any:
        hidden, even = self.embedding(tokens), (tokens % 2 == 0)[..., None]
        for layer in self.layers:
            hidden = torch.where(even, hidden, hidden + layer(hidden).tanh())
        return self.head(hidden)


class Masked(Net):
    """It takes two tensors."""

    def forward(self, tokens: Tensor, mask: Tensor) -> Any:  # type: ignore[override]
        return super().forward(tokens) * mask[..., None]


not_callable = 3


def frozen() -> nn.Sequential:
    return tied().requires_grad_(requires_grad=False)


def frozen_start() -> nn.Sequential:
    """Its first layers are not trained."""
    model = embedded(square(), square())
    model[0].requires_grad_(requires_grad=False)
    return model


class Counting(nn.Module):
    """Counts its forwards; and is in evaluation mode where the factory says so."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    count: Tensor

    def forward(self, hidden: Tensor) -> Tensor:
        self.count += 1
        return hidden


def counting() -> nn.Sequential:
    return embedded(Counting(), nn.Dropout().eval(), square())


def sequence_first() -> nn.Sequential:
    """The batch is the second dimension between its stages."""
    return embedded(lambda x: x.transpose(0, 1), square(), lambda x: x.transpose(0, 1), square())


def channels_first() -> nn.Sequential:
    """What crosses its boundary is not contiguous, forth and back."""
    norm = nn.BatchNorm1d(256)
    return embedded(lambda x: x.transpose(1, 2), norm, lambda x: x.transpose(1, 2), square())


class Average(nn.Module):
    """Keeps a running average, in a new tensor each time; and a note that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(()))
        self.register_buffer("mask", torch.ones(1, 4).expand(3, 4))

    average: Tensor

    def forward(self, hidden: Tensor) -> Tensor:
        self.average = 0.9 * self.average + 0.1 * hidden.detach().mean()
        return hidden * (1 + self.average)

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}

    def set_extra_state(self, state: object) -> None: ...


def averaging() -> nn.Sequential:
    return embedded(Average(), square())


def dying() -> nn.Sequential:
    """Kills its process, rank 1, at the end of the fifth step of four microbatches."""

    def die(hidden: Tensor, calls: int) -> Tensor:
        if calls > 22 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return hidden

    return embedded(square(), die)
