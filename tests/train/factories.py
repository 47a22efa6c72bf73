"""Models that a configuration can name: right ones, and wrong ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def tied(*, width: int = 8, layers: int = 2, dropout: float = 0.0) -> nn.Sequential:
    embedding, head = nn.Embedding(256, width), nn.Linear(width, 256, bias=False)
    head.weight = embedding.weight
    blocks = [nn.Sequential(nn.Linear(width, width), nn.Dropout(dropout)) for _ in range(layers)]
    return nn.Sequential(embedding, *blocks, nn.LayerNorm(width), head)


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


not_callable = 3
