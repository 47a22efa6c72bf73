"""Models that a configuration can name: right ones, and wrong ones."""

from __future__ import annotations

import os
import random
import signal
import sys
from functools import cache

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, distribute_tensor

from pipegrad import Topology


def tied(*, width: int = 8, layers: int = 2, dropout: float = 0.0) -> nn.Sequential:
    embedding, head = nn.Embedding(256, width), nn.Linear(width, 256, bias=False)
    head.weight = embedding.weight
    blocks = [nn.Sequential(nn.Linear(width, width), nn.Dropout(dropout)) for _ in range(layers)]
    return nn.Sequential(embedding, *blocks, nn.LayerNorm(width), head)


class Draws(nn.Module):
    """Adds a number of each generator of random numbers to what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * (random.random() + np.random.rand() + float(torch.rand(())))


def drawing(*, width: int = 8) -> nn.Sequential:
    embedding, head = nn.Embedding(256, width), nn.Linear(width, 256, bias=False)
    head.weight = embedding.weight
    parts = [nn.Sequential(nn.Linear(width, width), Draws(), nn.Dropout(0.1)) for _ in range(2)]
    return nn.Sequential(embedding, *parts, nn.LayerNorm(width), head)


@cache
def table() -> Tensor:
    return torch.arange(256.0)


class Shifted(nn.Module):
    """Keeps a tensor of all calls as a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.table = table()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table


def cached() -> nn.Sequential:
    """Its last operator runs in the first call alone."""
    return nn.Sequential(nn.Embedding(256, 256), nn.Linear(256, 256), Shifted())


def bare() -> nn.Sequential:
    """Its last two layers have no parameters."""
    return nn.Sequential(nn.Embedding(256, 256), nn.Linear(256, 256), nn.GELU(), nn.Identity())


def needs(*, width: int) -> nn.Sequential:
    return tied(width=width)


def fails() -> nn.Sequential:
    raise RuntimeError("no such checkpoint")


def not_sequential() -> nn.Module:
    return nn.Linear(2, 2)


def few_logits() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 100))


def few_tokens() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 256))


class Broken(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) * torch.nan


def not_finite() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(256, 8), Broken(8, 256))


def no_tensor() -> nn.Sequential:
    class Tuple(nn.Module):
        def forward(self, hidden: Tensor) -> tuple[Tensor]:
            return (hidden,)

    return nn.Sequential(nn.Embedding(256, 8), Tuple())


def pooled() -> nn.Sequential:
    class Mean(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return hidden.mean(1)

    return nn.Sequential(nn.Embedding(256, 256), Mean())


def explodes() -> nn.Sequential:
    """Its gradients are not finite, though its logits are."""

    class Root(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return (hidden - hidden).sqrt() + hidden

    return nn.Sequential(nn.Embedding(256, 256), Root())


def reads_its_start() -> nn.Sequential:
    """Cannot be made on the meta device."""
    model = tied()
    model[0].weight.detach().mul_(model[0].weight.norm().item())  # type: ignore[operator]
    return model


class Meet(nn.Module):
    """All ranks meet in its forward."""

    def forward(self, hidden: Tensor) -> Tensor:
        dist.all_reduce(torch.zeros(()))
        return hidden


def lonely() -> nn.Sequential:
    if dist.get_rank() == 1:
        raise RuntimeError("mine alone")
    return nn.Sequential(nn.Embedding(256, 256), Meet())


def exits() -> nn.Sequential:
    sys.exit(0)


def exits_on_one() -> nn.Sequential:
    if dist.get_rank() == 1:
        sys.exit(3)
    return tied()


def exits_forward() -> nn.Sequential:
    class Exit(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            sys.exit("bye")

    return nn.Sequential(nn.Embedding(256, 256), Exit())


def exits_later() -> nn.Sequential:
    """Is tried out once, and exits in the first step."""

    class Exit(nn.Module):
        calls = 0

        def forward(self, hidden: Tensor) -> Tensor:
            self.calls += 1
            if self.calls > 1:
                sys.exit(0)
            return hidden

    return nn.Sequential(nn.Embedding(256, 256), Exit())


def differing() -> nn.Sequential:
    """Draws as many numbers before its last layer as its rank."""
    embedding = nn.Embedding(256, 8)
    torch.rand(dist.get_rank())
    return nn.Sequential(embedding, nn.Linear(8, 256))


def empty() -> nn.Sequential:
    return nn.Sequential()


def dtensors(*, topology: Topology) -> nn.Sequential:
    head = nn.Linear(8, 256, bias=False)
    assert topology.mesh is not None
    lying = distribute_tensor(head.weight, topology.mesh["dp"], [Replicate()])
    head.weight = nn.Parameter(lying)
    return nn.Sequential(nn.Embedding(256, 8), head)


not_callable = 3


class Pair(nn.Module):
    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return hidden, hidden


class Join(nn.Module):
    def forward(self, hidden: tuple[Tensor, Tensor]) -> Tensor:
        return hidden[0] + hidden[1]


def two_tensors() -> nn.Sequential:
    """Right in one piece, and cut anywhere but between its middle layers."""
    return nn.Sequential(nn.Embedding(256, 256), Pair(), Join())


def in_place() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(256, 256), nn.ReLU(inplace=True))


class Ids(nn.Module):
    def forward(self, tokens: Tensor) -> Tensor:
        return tokens + 0


def integers() -> nn.Sequential:
    return nn.Sequential(Ids(), nn.Embedding(256, 256))


def frozen() -> nn.Sequential:
    return tied().requires_grad_(requires_grad=False)


def frozen_start() -> nn.Sequential:
    """Its first layers are not trained."""
    model = nn.Sequential(nn.Embedding(256, 256), nn.Linear(256, 256), nn.Linear(256, 256))
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
    return nn.Sequential(
        nn.Embedding(256, 256), Counting(), nn.Dropout().eval(), nn.Linear(256, 256)
    )


class Scaled(nn.Sequential):
    """More than its layers in order; made like a factory."""

    def __init__(self) -> None:
        super().__init__(*tied())

    def forward(self, tokens: Tensor) -> Tensor:
        return 2 * super().forward(tokens)  # type: ignore[no-any-return, no-untyped-call]


class Late(nn.Module):
    """Fails in the third step of four microbatches; torch runs it once more, to learn shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = -1  # the trial is one of its own

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 9:
            raise ValueError("no more")
        return hidden


def late() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(256, 256), nn.Linear(256, 256), Late())


class Swap(nn.Module):
    """Swaps two dimensions; what it returns is not contiguous."""

    def __init__(self, *dims: int) -> None:
        super().__init__()
        self.dims = dims

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.transpose(*self.dims)


def sequence_first() -> nn.Sequential:
    """The batch is the second dimension between its stages."""
    inside = nn.Linear(256, 256)
    return nn.Sequential(
        nn.Embedding(256, 256), Swap(0, 1), inside, Swap(0, 1), nn.Linear(256, 256)
    )


def channels_first() -> nn.Sequential:
    """What crosses its boundary is not contiguous, forth and back."""
    layers = [
        nn.Embedding(256, 256),
        Swap(1, 2),
        nn.BatchNorm1d(256),
        Swap(1, 2),
        nn.Linear(256, 256),
    ]
    return nn.Sequential(*layers)


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
    return nn.Sequential(nn.Embedding(256, 256), Average(), nn.Linear(256, 256))


class Dying(nn.Module):
    """Kills its process, rank 1, in the sixth step."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 20 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return hidden


def dying() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(256, 256), nn.Linear(256, 256), Dying())
