"""A byte-level GPT in tensor-parallel blocks, whose sequence is cut outside of them.

Inside, between a column- and a row-parallel layer, a rank has some heads or hidden units of the
whole sequence; outside, in norms, residuals, embeddings and the head, all features of its part of
the sequence. So what lies outside is whole on every rank, and has the gradient of a part there:
the handler `sequence-parallel` sums these, by the patterns in tensor_parallel.toml.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from pipegrad import Topology

Group = dist.ProcessGroup


def gathered(part: Tensor, group: Group) -> Tensor:
    """Returns all ranks' parts of the sequence, in order."""
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, 1)


def own(whole: Tensor, group: Group) -> Tensor:
    """Returns this rank's part of the sequence."""
    return whole.chunk(group.size(), 1)[group.rank()]


def summed(whole: Tensor, group: Group) -> Tensor:
    """Returns this rank's part of the sum; gloo has no better than an all-reduce for that."""
    total = whole.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return own(total, group).contiguous()


class Enter(torch.autograd.Function):
    """Parts of the sequence to the whole, for layers that each rank has a part of."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return gathered(part, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return summed(gradient, ctx.group), None


class Leave(torch.autograd.Function):
    """Sums what the ranks have made of the whole sequence; back to a part of it."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return summed(whole, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gathered(gradient, ctx.group), None


class Show(torch.autograd.Function):
    """Parts to the whole, of which every rank computes the same loss: no sum on the way back."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return gathered(part, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return own(gradient, ctx.group), None


class Cut(nn.Module):
    """A layer that knows its place among tensor-parallel ranks."""

    def __init__(self, topology: Topology) -> None:
        super().__init__()
        self.topology = topology
        self.size, self.place = topology.size("tp"), topology.coordinate("tp")

    def shard(self, whole: Tensor, dim: int) -> nn.Parameter:
        return nn.Parameter(whole.chunk(self.size, dim)[self.place].clone())

    def across(self, step: type[torch.autograd.Function], x: Tensor) -> Tensor:
        return x if self.size == 1 else step.apply(x, self.topology.group_along("tp"))


class Embedding(Cut):
    """Tokens ``(batch, sequence)`` to ``(batch, sequence / ranks, width)``."""

    def __init__(self, topology: Topology, width: int, context: int) -> None:
        super().__init__(topology)
        self.weight = nn.Parameter(torch.randn(256, width) * 0.02)
        self.position = nn.Parameter(torch.randn(context, width) * 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1] // self.size
        mine = slice(self.place * length, (self.place + 1) * length)
        return functional.embedding(tokens[:, mine], self.weight) + self.position[mine]


class Column(Cut):
    """Gathers the sequence, and has some of the output's features, in groups of equal meaning."""

    def __init__(self, topology: Topology, width: int, *shape: int) -> None:
        super().__init__(topology)
        self.weight = self.shard(torch.randn(*shape, width) * width**-0.5, dim=-2)

    def forward(self, part: Tensor) -> Tensor:
        return functional.linear(self.across(Enter, part), self.weight.flatten(0, -2))


class Row(Cut):
    """Has some of the input's features; the bias is added to a part of the sequence."""

    def __init__(self, topology: Topology, features: int, width: int) -> None:
        super().__init__(topology)
        self.weight = self.shard(torch.randn(width, features) * features**-0.5, dim=1)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, whole: Tensor) -> Tensor:
        return self.across(Leave, functional.linear(whole, self.weight)) + self.bias


class Block(nn.Module):
    def __init__(self, topology: Topology, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads // topology.size("tp")
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.heads_in = Column(topology, width, 3, width)  # queries, keys, values
        self.heads_out = Row(topology, width, width)
        self.up = Column(topology, width, 4 * width)
        self.down = Row(topology, 4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.heads_out(self.attention(self.heads_in(self.norm1(x))))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))

    def attention(self, found: Tensor) -> Tensor:
        """From ``(batch, sequence, 3 * some features)``, of this rank's heads."""
        q, k, v = (t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in found.chunk(3, 2))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)


class Head(Cut):
    """Logits of a part of the sequence, then of all of it, on every rank."""

    def __init__(self, topology: Topology, weight: nn.Parameter) -> None:
        super().__init__(topology)
        self.weight = weight

    def forward(self, part: Tensor) -> Tensor:
        return self.across(Show, functional.linear(part, self.weight))


def tensor_parallel_gpt(
    *, topology: Topology, layers: int = 2, width: int = 32, heads: int = 4, context: int = 64
) -> nn.Sequential:
    """Returns the uncut model; of blocks, what belongs to this rank along ``tp``."""
    embedding = Embedding(topology, width, context)
    blocks = [(f"block{i}", Block(topology, width, heads)) for i in range(layers)]
    head = Head(topology, embedding.weight)  # tied: one parameter, at both ends of the pipeline
    named = [("embedding", embedding), *blocks, ("norm", nn.LayerNorm(width)), ("head", head)]
    return nn.Sequential(OrderedDict(named))
