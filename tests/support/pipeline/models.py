"""Small language models, ties in all the places where they hurt, always eight layers uncut."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH, VOCAB, TOKENS, LAYERS = 16, 32, 5, 8


def matrix(rows: int = VOCAB, *, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, WIDTH, dtype=dtype) * 0.3)


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = matrix()

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Lookup(nn.Module):
    """Attends to the vocabulary: uses its matrix twice."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x + (x @ self.weight.T).softmax(-1) @ self.weight


class Head(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class TwinEmbed(nn.Module):
    """Two tables of one shape, which its head registers the other way round."""

    def __init__(self, second_dtype: torch.dtype) -> None:
        super().__init__()
        self.one = matrix()
        self.two = matrix(dtype=second_dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.one) - F.embedding(tokens, self.two).float()


class TwinHead(nn.Module):
    def __init__(self, embed: TwinEmbed) -> None:
        super().__init__()
        self.two = embed.two
        self.one = embed.one

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.one) + F.linear(x.to(self.two.dtype).sin(), self.two).float()


class HalfUsedEmbed(Embed):
    """Holds parameters that its head holds too: used here only, nowhere, and frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.here = matrix(1)
        self.nowhere = matrix(1)
        self.frozen = nn.Parameter(torch.randn(1, WIDTH), requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + self.here + self.frozen


class HalfUsedHead(Head):
    def __init__(self, embed: HalfUsedEmbed) -> None:
        super().__init__(embed.weight)
        self.here, self.nowhere, self.frozen = embed.here, embed.nowhere, embed.frozen

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.frozen)


class DoubleBlock(Block):
    """Computes in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.double()).float()


class CheckpointedBlock(Block):
    """Reentrant, each checkpoint adds its own part to the gradients: hooks fire several times."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self._reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(super().forward, x, use_reentrant=self._reentrant)
        return super().forward(x)


def tied(blocks: int = LAYERS - 2) -> nn.Sequential:
    embed = Embed()
    return nn.Sequential(embed, *(Block() for _ in range(blocks)), Head(embed.weight))


def three_way() -> nn.Sequential:
    model = tied()
    model[3] = Lookup(model[0].weight)  # type: ignore[arg-type]
    return model


def crossed(second_dtype: torch.dtype = torch.float32) -> nn.Sequential:
    model, embed = tied(), TwinEmbed(second_dtype)
    model[0], model[-1] = embed, TwinHead(embed)
    return model


def mixed_dtypes() -> nn.Sequential:
    model = crossed(torch.float64)
    model[2] = DoubleBlock()
    return model


def within() -> nn.Sequential:
    """Ties layers 2 and 3 too, neighbours in every cut into stages of two layers."""
    model = tied()
    model[3].linear.weight = model[2].linear.weight  # type: ignore[union-attr]
    return model


def half_used() -> nn.Sequential:
    model, embed = tied(), HalfUsedEmbed()
    model[0], model[-1] = embed, HalfUsedHead(embed)
    model[1].requires_grad_(requires_grad=False)
    model[4].unused = matrix(1)
    return model


def reentrant() -> nn.Sequential:
    model = tied()
    for layer in (2, 5, 6):
        model[layer] = CheckpointedBlock(reentrant=True)
    return model


def non_reentrant() -> nn.Sequential:
    model = tied()
    for layer in (2, 5, 6):
        model[layer] = CheckpointedBlock(reentrant=False)
    return model


MODELS: dict[str, Callable[[], nn.Sequential]] = {
    "tied": tied,
    "three-way": three_way,
    "crossed": crossed,
    "mixed-dtypes": mixed_dtypes,
    "within": within,
    "half-used": half_used,
    "reentrant": reentrant,
    "non-reentrant": non_reentrant,
}


def build(name: str) -> nn.Sequential:
    """Returns the uncut model: the same bits in every process."""
    torch.manual_seed(7)
    return MODELS[name]()
