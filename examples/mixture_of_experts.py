"""A byte-level GPT with a mixture of experts in each block, spread over expert-parallel ranks.

Ranks along "ep" read different text. Each token goes to the expert that its router likes best,
wherever that lives, and comes back: an all-to-all there, one back. No token is dropped. So experts
have gradients of all these ranks' tokens, and everything else of the rank's own: the handler
`expert-parallel` takes either over the ranks, and by the divisor, that make them one model's.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from pipegrad import Topology


def exchanged(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Returns what the ranks sent here, in their order; rows go out in the order of ranks."""
    found = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(found, x.contiguous(), received, sent, group=group)
    return found


class Exchange(torch.autograd.Function):
    """Sends rows to ranks, and their gradients back."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.way = sent, received, group
        return exchanged(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received, group = ctx.way
        return exchanged(gradient, received, sent, group), None, None, None


class Experts(nn.Module):
    """This rank's experts; rows of ``(tokens, width)`` go to those that they chose."""

    def __init__(self, topology: Topology, number: int, width: int) -> None:
        super().__init__()
        self.topology = topology
        self.ranks, self.number = topology.size("ep"), number
        whole = (
            torch.randn(number, width, 4 * width) * width**-0.5,
            torch.randn(number, 4 * width, width) * (4 * width) ** -0.5,
        )
        mine = [w.chunk(self.ranks)[topology.coordinate("ep")].clone() for w in whole]
        self.up, self.down = map(nn.Parameter, mine)

    def forward(self, x: Tensor, choice: Tensor) -> Tensor:
        order = choice.argsort(stable=True)
        counts = choice.bincount(minlength=self.number)
        found = self.apart(x[order], counts) if self.ranks > 1 else self.here(x[order], counts)
        return found[order.argsort()]

    def apart(self, x: Tensor, counts: Tensor) -> Tensor:
        """Has rows, sorted by expert, computed where the experts live."""
        group = self.topology.group_along("ep")
        theirs = torch.empty_like(counts)  # by rank that sends, then by expert of this rank
        dist.all_to_all_single(theirs, counts, group=group)
        sent, received = (c.view(self.ranks, -1).sum(1).tolist() for c in (counts, theirs))
        rows = Exchange.apply(x, sent, received, group)
        local = torch.arange(len(theirs), device=x.device) % len(self.up)
        order = local.repeat_interleave(theirs).argsort(stable=True)
        made = self.here(rows[order], theirs.view(self.ranks, -1).sum(0))[order.argsort()]
        return Exchange.apply(made, received, sent, group)

    def here(self, x: Tensor, counts: Tensor) -> Tensor:
        """Computes rows that are sorted by this rank's experts; none is left out, even without."""
        parts = zip(x.split(counts.tolist()), self.up, self.down, strict=True)
        return torch.cat([functional.gelu(part @ up) @ down for part, up, down in parts])


class Block(nn.Module):
    def __init__(self, topology: Topology, width: int, heads: int, experts: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.heads_in = nn.Linear(width, 3 * width)
        self.heads_out = nn.Linear(width, width)
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = Experts(topology, experts, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.heads_out(self.attention(self.heads_in(self.norm1(x))))
        tokens = self.norm2(x).flatten(0, 1)
        weight, choice = self.router(tokens).softmax(1).max(1)
        return x + (weight[:, None] * self.experts(tokens, choice)).view_as(x)

    def attention(self, found: Tensor) -> Tensor:
        q, k, v = (t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in found.chunk(3, 2))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)


class Embedding(nn.Module):
    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(256, width) * 0.02)
        self.position = nn.Parameter(torch.randn(context, width) * 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        return functional.embedding(tokens, self.weight) + self.position[: tokens.shape[1]]


def mixture_of_experts(
    *,
    topology: Topology,
    layers: int = 2,
    width: int = 32,
    heads: int = 4,
    experts: int = 4,
    context: int = 64,
) -> nn.Sequential:
    """Returns the uncut model; of experts, those that live on this rank along ``ep``."""
    embedding = Embedding(width, context)
    blocks = [(f"block{i}", Block(topology, width, heads, experts)) for i in range(layers)]
    head = nn.Linear(width, 256, bias=False)
    head.weight = embedding.weight  # tied: one parameter, at both ends of the pipeline
    named = [("embedding", embedding), *blocks, ("norm", nn.LayerNorm(width)), ("head", head)]
    return nn.Sequential(OrderedDict(named))
