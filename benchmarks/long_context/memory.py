"""Measures what ranks hold at most in a step, by schedule and length, and what fits into 2 GiB.

torchrun --nproc-per-node 4 benchmarks/long_context/memory.py [--lengths 1024 4096] [--only NAME]

The model is recurrent, so its work grows with the length alone: an embedding, eight layers of a
recurrence and an MLP, and a head. Peaks are those of resident memory (Linux), above what a rank
held before the step. MALLOC_MMAP_THRESHOLD_=65536 gives freed memory back at once.
"""

import argparse
import math
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

import pipegrad

RANKS, MICROBATCHES, LAYERS, WIDTH, VOCABULARY = 4, 4, 8, 256, 512
HEADS, BLOCK = 4, 64
LIMIT = 2 * 2**30
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Way(NamedTuple):
    """A schedule, and how it is used."""

    schedule: str
    chunks: int = 1
    recompute: bool = False


WAYS = {
    "gpipe": Way("gpipe"),
    "1f1b": Way("1f1b"),
    "zb-h1": Way("zb-h1"),
    "zbv": Way("zbv"),
    "v-half": Way("v-half"),
    "v-min": Way("v-min"),
    "1f1b, recompute": Way("1f1b", recompute=True),
    "chunked-1f1b, 8 chunks": Way("chunked-1f1b", 8),
    "chunked-1f1b, 32 chunks": Way("chunked-1f1b", 32),
    "chunked-1f1b, 32 chunks, recompute": Way("chunked-1f1b", 32, recompute=True),
}


class Recurrence(nn.Module):
    """A state that decays from token to token, another rate in each head; gated, as in RetNet."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("decay", 1 - 2.0 ** -torch.arange(5.0, 5.0 + HEADS))

    def forward(self, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        rows, length, _ = x.shape
        block = math.gcd(length, BLOCK)
        value, gate = self.into(x).chunk(2, -1)
        value = value.view(rows, length // block, block, HEADS, -1).transpose(2, 3)
        at = torch.arange(block)
        decay = self.decay[:, None, None]
        inside = torch.tril(decay ** (at[:, None] - at).clamp(min=0))
        within = inside @ value  # of the tokens of a block, (rows, blocks, heads, block, channels)
        state = value.new_zeros(rows, HEADS, value.shape[-1]) if state is None else state
        before = []
        for number in range(length // block):
            before.append(state)
            state = decay[:, 0] ** block * state + within[:, number, :, -1]
        since = decay ** (at + 1)[:, None]
        y = within + since * torch.stack(before, 1)[:, :, :, None]
        y = y.transpose(2, 3).reshape(rows, length, WIDTH)
        return self.out(y * gate.sigmoid()), state


class Layer(nn.Module):
    """A recurrence and an MLP, each beside a residual way."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.recurrence = Recurrence()
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:  # noqa: ANN401
        y, state = self.recurrence(self.norms[0](x), state)
        x = x + y
        return x + self.mlp(self.norms[1](x)), state


class Part(nn.Module):
    """Layers of a stage, with the embedding or the head if it is the first or the last one."""

    def __init__(self, index: int, num_stages: int) -> None:
        super().__init__()
        number = LAYERS // num_stages
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if index == 0 else nn.Identity()
        self.layers = nn.ModuleList(Layer() for _ in range(number))
        is_last = index == num_stages - 1
        self.head = nn.Linear(WIDTH, VOCABULARY) if is_last else nn.Identity()

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:  # noqa: ANN401
        x, states = self.embedding(x), []
        for layer, before in zip(self.layers, state or [None] * len(self.layers), strict=True):
            x, after = layer(x, before)
            states.append(after)
        return self.head(x), states


def loss(x: Tensor, target: Tensor) -> Tensor:
    """Returns the mean loss of a token."""
    return F.cross_entropy(x.flatten(0, 1), target.flatten())


def held(what: str) -> int:
    """Returns resident bytes: now (VmRSS), or the most since `CLEAR` was written (VmHWM)."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) * 2**10


def peak_and_seconds(way: Way, length: int) -> tuple[int, float]:
    """Returns the most bytes that a rank held in a step above what it held before, and its time."""
    sizes = {"num_ranks": RANKS, "num_microbatches": MICROBATCHES}
    made = pipegrad.schedules.build(way.schedule, **sizes)
    topology = pipegrad.Topology.create(pipeline=RANKS, stage_to_rank=made.stage_to_rank)
    torch.manual_seed(dist.get_rank())
    stages = [
        pipegrad.Stage(Part(i, topology.num_stages), i, carry=("state",), recompute=way.recompute)
        for i in topology.local_stages
    ]
    scheduler = pipegrad.Scheduler(
        stages, topology, schedule=way.schedule, num_microbatches=MICROBATCHES, loss_fn=loss
    )
    drawn = torch.Generator().manual_seed(1)  # every rank has the batch
    tokens = torch.randint(VOCABULARY, (MICROBATCHES, length), generator=drawn)
    scheduler.step(tokens[:, :64], target=tokens[:, :64], chunks=min(way.chunks, 64))
    before = held("VmRSS")
    CLEAR.write_text("5")
    begin = time.perf_counter()
    scheduler.step(tokens, target=tokens, chunks=way.chunks)
    numbers = torch.tensor([held("VmHWM") - before, time.perf_counter() - begin])
    dist.all_reduce(numbers, dist.ReduceOp.MAX)
    scheduler.close()
    return int(numbers[0]), float(numbers[1])


def main() -> None:
    """Prints a row for each way, on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384, 65536])
    parser.add_argument("--only", default="", help="ways whose name contains this")
    given = parser.parse_args()
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        sys.exit("set MALLOC_MMAP_THRESHOLD_=65536: freed memory would count as held")
    dist.init_process_group("gloo", timeout=timedelta(seconds=1200))
    known = {plugin.name for plugin in pipegrad.schedules.registry}
    if dist.get_rank() == 0:
        cells = [f"{length:,} tokens" for length in given.lengths]
        print("|", " | ".join(["", *cells, "a token more", "tokens in 2 GiB"]), "|")
        print("|---" * (len(cells) + 3) + "|")
    for name, way in WAYS.items():
        if given.only not in name or way.schedule not in known:
            continue
        cells, last, slope = [], (0, 0), math.inf
        for length in given.lengths:
            # What is far over the limit is not tried.
            if last[1] * length > 1.5 * LIMIT * max(last[0], 1):
                cells.append("")
                continue
            peak, seconds = peak_and_seconds(way, length)
            if last[0]:
                slope = (peak - last[1]) / (length - last[0])
            last = length, peak
            cells.append(f"{peak / 2**20:.0f} MiB ({seconds:.1f} s)")
        if dist.get_rank() == 0:
            fits = last[0] + (LIMIT - last[1]) / slope
            row = [name, *cells, f"{slope / 2**10:.1f} KiB", f"{fits:,.0f}"]
            print("|", " | ".join(row), "|", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
