"""Times training on text of real lengths: padded to the maximum, to the longest, and packed.

python benchmarks/variable_length/text.py [--rounds 5]
"""

import argparse
import statistics
import time
from itertools import islice
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import pipegrad
from pipegrad.testing import run_ranks

RANKS, MICROBATCHES, ROWS, CONTEXT, WIDTH, HEADS, LAYERS = 4, 8, 8, 1024, 128, 4, 8
PAD = -100  # of targets; torch's cross_entropy ignores it
MAXIMUM, LONGEST, PACKED = "padded to the maximum", "padded to the longest", "packed"
WAYS = (MAXIMUM, LONGEST, PACKED)


def paragraphs() -> list[bytes]:
    """Returns the paragraphs of Python's language reference, which comes with Python, shuffled."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    found = [part.encode()[: CONTEXT + 1] for part in text.split("\n\n") if len(part) > 1]
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0))
    return [found[i] for i in order]


class Embedding(nn.Module):
    """Bytes and their positions in their paragraph to ``(rows, length, WIDTH)``."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(256, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        out: Tensor = self.token(tokens) + self.position(positions)
        return out


class Block(nn.Module):
    """Causal attention inside of each paragraph, and a feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor, lengths: list[int] | None) -> Tensor:
        rows, length, _ = x.shape
        heads = self.qkv(self.norms[0](x)).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        # A packed row has several paragraphs, and each sees itself alone.
        parts = heads.split(lengths or [length], dim=3)
        seen = [functional.scaled_dot_product_attention(*part, is_causal=True) for part in parts]
        joined = torch.cat(seen, dim=2).transpose(1, 2).reshape(rows, length, WIDTH)
        x = x + self.out(joined)
        return x + self.mlp(self.norms[1](x))


class Part(nn.Module):
    """A stage: the embedding first, the head last, and two blocks."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        torch.manual_seed(stage)
        self.embedding = Embedding() if stage == 0 else None
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS // RANKS)])
        self.head = nn.Linear(WIDTH, 256) if stage == RANKS - 1 else None

    def forward(
        self, x: Tensor, lengths: list[int] | None, positions: Tensor | None = None
    ) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x, positions)
        for block in self.blocks:
            x = block(x, lengths)
        return x if self.head is None else self.head(x)


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    """Returns the mean loss of the bytes that are no padding."""
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PAD)


def microbatch(texts: list[bytes], way: str) -> dict[str, Any]:
    """Returns the inputs and the target of some paragraphs."""
    rows = [torch.frombuffer(bytearray(text), dtype=torch.uint8).long() for text in texts]
    lengths = [len(row) - 1 for row in rows]
    if way == PACKED:
        return {
            "x": torch.cat([row[:-1] for row in rows])[None],
            "positions": torch.cat([torch.arange(n) for n in lengths])[None],
            "lengths": lengths,
            "target": torch.cat([row[1:] for row in rows])[None],
        }
    longest = CONTEXT if way == MAXIMUM else max(lengths)
    x, target = torch.zeros(len(rows), longest).long(), torch.full((len(rows), longest), PAD)
    for i, row in enumerate(rows):
        x[i, : lengths[i]], target[i, : lengths[i]] = row[:-1], row[1:]
    positions = torch.arange(longest).expand_as(x)
    return {"x": x, "positions": positions, "lengths": None, "target": target}


def run(rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Returns for each way tokens a second and the loss of each round, all ways in turns."""
    rank = dist.get_rank()
    topology, module = pipegrad.Topology.create(pipeline=RANKS), Part(rank)
    inputs = ("x", "lengths", "positions") if rank == 0 else ("x", "lengths")
    scheduler = pipegrad.Scheduler(
        [pipegrad.Stage(module, rank, inputs=inputs)],
        topology,
        schedule="1f1b",
        num_microbatches=MICROBATCHES,
        loss_fn=loss_fn,
        handlers=["noop"],
    )
    texts, found = iter(paragraphs()), {way: list[tuple[float, float]]() for way in WAYS}
    for number in range(rounds + 1):
        batch = [list(islice(texts, ROWS)) for _ in range(MICROBATCHES)]
        tokens = sum(len(text) - 1 for texts_of_one in batch for text in texts_of_one)
        for way in WAYS:
            made = [microbatch(texts_of_one, way) for texts_of_one in batch]
            dist.barrier()
            begin = time.perf_counter()
            loss = float(scheduler.step(microbatches=made).loss)
            dist.barrier()
            seconds = time.perf_counter() - begin
            module.zero_grad()
            if number:
                found[way].append((tokens / seconds, loss))
    scheduler.close()
    return found


def main() -> None:
    """Prints the table of the README."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    lengths = [len(text) - 1 for text in paragraphs()]
    mean = statistics.mean(lengths)
    print(
        f"{len(lengths)} paragraphs, mean {mean:.0f} bytes, {statistics.quantiles(lengths, n=10)}"
    )
    found = run_ranks(run, RANKS, rounds, timeout_seconds=1200)[0]
    for i in range(rounds):  # all ways compute the same loss of each paragraph
        losses = [found[way][i][1] for way in WAYS]
        assert max(losses) - min(losses) < 1e-3, losses
    for way in WAYS:
        speeds = [speed for speed, _ in found[way]]
        against = [speed / base for speed, (base, _) in zip(speeds, found[MAXIMUM], strict=True)]
        print(f"| {way} | {statistics.median(against):.2f} | {statistics.median(speeds):.0f} |")


if __name__ == "__main__":
    main()
