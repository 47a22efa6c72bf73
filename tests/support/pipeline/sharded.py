"""A tied model that FSDP2 shards unevenly, its batches, and a step of it in bf16."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

from tests.support.pipeline import models
from tests.support.pipeline.pipelines import loss_of

VOCAB, WIDTH, TOKENS, ROWS = 33, 6, 5, 2  # of 33 rows the second of two ranks has 16


class Embed(models.Head):
    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full((1,), 0.7))  # a rank but the first has none of it
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * torch.tanh(self.linear(self.norm(x)))


class Head(models.Head):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__(weight)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


def build() -> nn.Sequential:
    torch.manual_seed(3)
    weight = nn.Parameter(torch.randn(VOCAB, WIDTH) * 0.3)
    return nn.Sequential(Embed(weight), Block(), Block(), Head(weight))


def batch(seed: int, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens, target = torch.randint(VOCAB, (2, rows, TOKENS), generator=generator)
    return tokens, target


def low_step(model: nn.Sequential, tokens: Tensor, target: Tensor, parts: int) -> Tensor:
    """Forward and backward in bf16, gradients of the parts and of both uses summed in fp32."""
    total = torch.zeros(())
    for mine, goal in zip(tokens.chunk(parts), target.chunk(parts), strict=True):
        low: Any = copy.deepcopy(model).bfloat16()
        low[3].weight = nn.Parameter(low[0].weight.detach().clone())
        low.zero_grad()
        loss = loss_of(low(mine), goal)
        loss.backward()
        total += loss.detach().float() / parts
        true = dict(model.named_parameters(remove_duplicate=False))
        for name, parameter in low.named_parameters():
            if parameter.grad is not None:
                before = true[name].grad
                found = parameter.grad.to(true[name].dtype) / parts
                true[name].grad = found if before is None else before + found
    return total
