"""What does Muon take on several ranks? One copy of a model for each way, which take turns.

torchrun --standalone --nproc-per-node 4 benchmarks/owned/step_time.py [--rounds 6]
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

from pipegrad import GradientSync, Topology, Work
from pipegrad.comm import collectives

STEPS = 3  # of a turn; the first one is not timed
VOCABULARY, LENGTH = 512, 64


class Block(nn.Module):
    """A block of a GPT, with four matrices of three shapes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm(x)).unflatten(-1, (-1, 64)).transpose(1, 2).chunk(3, 1)
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.after(x))))  # type: ignore[no-any-return]


def build(width: int, blocks: int) -> nn.Sequential:
    """Returns the uncut model, the same on every rank."""
    torch.manual_seed(0)
    layers = [Block(width) for _ in range(blocks)]
    head = nn.Sequential()
    head.add_module("lm_head", nn.Linear(width, VOCABULARY, bias=False))
    return nn.Sequential(nn.Embedding(VOCABULARY, width), *layers, head)


class Way:
    """A model, and how it is trained.

    Args:
        model: Trained by this way alone.
        handler: Of the gradients; None: nothing is reduced and nothing stepped.
        make: Makes the optimizer.
    """

    def __init__(
        self,
        model: nn.Module,
        handler: str | None,
        make: Callable[[GradientSync], torch.optim.Optimizer] | None = None,
    ) -> None:
        self.model, self.optimizer = model, None
        self.sync = None
        if handler is not None and make is not None:
            topology = Topology.create(pipeline=1)
            self.sync = GradientSync({0: model}, topology, handlers=[handler], check_every=0)
            self.optimizer = make(self.sync)

    def step(self, tokens: torch.Tensor) -> float:
        """Returns the loss of this rank's part of the batch, before the update."""
        sync, optimizer = self.sync, self.optimizer
        if sync is None or optimizer is None:
            self.model.zero_grad()
            return self._backward(tokens)
        sync.prepare()
        sync.stage_first_use(0)
        sync.stage_last_backward(0)
        loss = self._backward(tokens)
        sync.stage_final(0)
        sync.finish()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def _backward(self, tokens: torch.Tensor) -> float:
        logits = self.model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        return loss.item()

    def wait(self) -> None:
        if self.sync is not None:
            self.sync.wait_parameters()

    def close(self) -> None:
        """Ends the threads of the gradient layer."""
        if self.sync is not None:
            self.sync.close()

    @property
    def state_bytes(self) -> int:
        states = [] if self.optimizer is None else self.optimizer.state.values()
        return sum(v.nbytes for s in states for v in s.values() if isinstance(v, torch.Tensor))


def ways(width: int, blocks: int) -> dict[str, Way]:
    """Returns every way by name."""
    others = partial(torch.optim.AdamW, lr=1e-3)
    muon = {"lr": 0.01, "others": others}
    model = partial(build, width, blocks)
    return {
        "owned": Way(model(), "owned", lambda s: s.optimizer(torch.optim.Muon, **muon)),
        "data-parallel": Way(
            model(), "data-parallel", lambda s: s.optimizer(torch.optim.Muon, **muon)
        ),
        "sharded AdamW": Way(model(), "sharded", lambda s: s.optimizer(torch.optim.AdamW, lr=1e-3)),
        "nothing": Way(model(), None),
    }


def batch(step: int, rows: int) -> torch.Tensor:
    """Returns this rank's tokens of a step."""
    made = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randint(VOCABULARY, (rows, LENGTH + 1), generator=made)


def turn(way: Way, first: int, rows: int) -> tuple[float, list[float]]:
    """Returns seconds of a step of the slowest rank, and losses, means of all ranks."""
    losses = [way.step(batch(first, rows))]
    dist.barrier()
    start = time.perf_counter()
    losses += [way.step(batch(first + number, rows)) for number in range(1, STEPS)]
    if way.sync is not None:
        way.sync.stage_first_use(0)  # what a step leaves under way, the next one waits for
    found = torch.tensor([(time.perf_counter() - start) / (STEPS - 1)])
    way.wait()
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    means = torch.tensor(losses)
    dist.all_reduce(means)
    return found.item(), (means / dist.get_world_size()).tolist()


def sent_bytes(way: Way, rows: int) -> int:
    """Returns the bytes that this rank sends in a step, by messages; all-reduces do not count."""
    sent, send = [0], collectives.send

    def counted(tensor: torch.Tensor, peer: int, group: dist.ProcessGroup | None, tag: int) -> Work:
        sent[0] += tensor.nbytes
        return send(tensor, peer, group, tag)

    with mock.patch.object(collectives, "send", counted):
        way.step(batch(0, rows))
        way.wait()
    return sent[0]


def gathered(number: int) -> list[int]:
    """Returns a number of each rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, number)
    return found


def main() -> None:
    """Times all ways in one run, and prints a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--rows", type=int, default=4)
    given = parser.parse_args()
    dist.init_process_group("gloo")
    every, order = ways(given.width, given.blocks), random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in every}
    losses: dict[str, list[float]] = {name: [] for name in every}
    for number in range(given.rounds + 1):
        for name in order.sample([*every], len(every)):
            took, seen = turn(every[name], number * STEPS, given.rows)
            losses[name] += seen
            seconds[name] += [took] if number else []  # the first round is not counted
    for one, other in zip(losses["owned"], losses["data-parallel"], strict=True):
        assert abs(one - other) < 1e-2 * abs(one), (one, other)  # steps of Muon are in bf16
    report(every, seconds, given.rows)
    for way in every.values():
        way.close()
    dist.destroy_process_group()


def report(every: dict[str, Way], seconds: dict[str, list[float]], rows: int) -> None:
    """Prints the table on rank 0."""
    ranks = dist.get_world_size()
    model = every["nothing"].model
    payload = sum(parameter.nbytes for parameter in model.parameters())
    rows_of_table = []
    for name, way in every.items():
        states, sent = gathered(way.state_bytes), gathered(sent_bytes(way, rows))
        ratios = [own / base for own, base in zip(seconds[name], seconds["owned"], strict=True)]
        low, high = sorted(ratios)[len(ratios) // 10], sorted(ratios)[-1 - len(ratios) // 10]
        middle, ms = statistics.median(ratios), 1000 * statistics.median(seconds[name])
        rows_of_table.append(
            f"| {name} | {middle:.2f} ({low:.2f}-{high:.2f}) | {ms:.0f} ms "
            f"| {min(states) / 2**20:.1f}-{max(states) / 2**20:.1f} "
            f"| {sum(sent) / 2**20:.1f} | {max(sent) / 2**20:.1f} |"
        )
    if dist.get_rank() == 0:
        ring = 2 * (ranks - 1) * payload / 2**20
        print(f"parameters {payload / 2**20:.1f} MiB, {ranks} ranks; a ring sends {ring:.1f} MiB")
        print("| way | of owned | step | state, MiB a rank | sent, all ranks | most on a rank |")
        print("|---|---|---|---|---|---|")
        print("\n".join(rows_of_table))


if __name__ == "__main__":
    main()
