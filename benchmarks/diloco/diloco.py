"""Times, bytes and losses of replicas that train alone, beside data parallelism.

Run it by ../network/cluster.sh.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

import pipegrad
from pipegrad_handlers.diloco import Meetings

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))
from tied_gpt import tied_gpt  # noqa: E402

SHARE, CONTEXT, MICROBATCHES = 8, 64, 4
SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")


def handlers_of(way: str) -> list[Any]:
    """Returns the handlers of a way: ``data-parallel``, or ``diloco-N``, meeting every N steps."""
    name, _, every = way.partition("-")
    other = {"name": name, "every": int(every)} if name == "diloco" else way
    return ["pipeline-shared", other]


@dataclass
class Trained:
    """One way, and what it has shown.

    Attributes:
        scheduler: Of this rank.
        optimizer: Of this rank.
        seconds: Of a step, a mean for each round.
        sent: Bytes that this host has sent in a step, a mean for each round.
        losses: On held-out text, after each round.
    """

    scheduler: pipegrad.Scheduler
    optimizer: torch.optim.Optimizer
    number: int = 0
    seconds: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def corpus() -> tuple[Tensor, Tensor]:
    """Returns the pages of docs/ as bytes: those to train on, and the last tenth."""
    pages = sorted((ROOT / "docs").rglob("*.md"))
    text = torch.tensor(list(b"".join(page.read_bytes() for page in pages)), dtype=torch.long)
    return text[: -len(text) // 10], text[-len(text) // 10 :]


def batch_of(text: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Returns rows of bytes at random places, and the bytes that follow each."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - CONTEXT - 1, (SHARE,), generator=generator)
    rows = torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()])
    return rows[:, :-1], rows[:, 1:]


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    """Returns the mean cross-entropy."""
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def make(way: str, width: int, layers: int) -> Trained:
    """Makes the pipeline of a way; every rank calls it."""
    torch.manual_seed(0)
    model = tied_gpt(layers=layers, width=width, heads=4, context=CONTEXT)
    scheduler = pipegrad.Scheduler(
        pipegrad.cut(model, 2),
        pipegrad.Topology.create(pipeline=2, device_type="cpu"),
        schedule="1f1b",
        num_microbatches=MICROBATCHES,
        loss_fn=loss_of,
        handlers=handlers_of(way),
    )
    return Trained(scheduler, scheduler.optimizer(torch.optim.AdamW, lr=1e-3))


def train(trained: Trained, text: Tensor, steps: int) -> None:
    """Trains a round, and notes its time and its bytes; every rank calls it."""
    share = trained.scheduler.topology.coordinate("dp")
    dist.barrier()
    sent, began = int(SENT.read_text()), time.perf_counter()
    for _ in range(steps):
        inputs, target = batch_of(text, 2 * trained.number + share)
        trained.scheduler.step(inputs, target=target)
        trained.scheduler.sync.clip_grad_norm_(1.0)
        trained.optimizer.step()
        trained.optimizer.zero_grad()
        trained.number += 1
    dist.barrier()
    trained.seconds.append((time.perf_counter() - began) / steps)
    trained.sent.append((int(SENT.read_text()) - sent) / steps)


def evaluate(trained: Trained, text: Tensor) -> None:
    """Notes the loss on held-out text; every rank calls it."""
    share = trained.scheduler.topology.coordinate("dp")
    losses = []
    for number in range(4):
        inputs, target = batch_of(text, 10_000 + 2 * number + share)
        losses.append(trained.scheduler.evaluate(inputs, target=target).loss.item())
    trained.losses.append(statistics.mean(losses))


def report(every: Mapping[str, Trained], ways: Sequence[str], skipped: int) -> None:
    """Prints one row for each way, from the numbers of all hosts."""
    first = every[ways[0]]
    for way in ways:
        trained = every[way]
        own = statistics.mean(trained.sent[skipped:])
        sent: list[float] = [0.0] * dist.get_world_size()
        dist.all_gather_object(sent, own)
        ratios = [
            mine / of_first for mine, of_first in zip(trained.seconds, first.seconds, strict=True)
        ][skipped:]
        meetings = trained.scheduler.sync.outer_optimizer
        averaged = meetings.met_bytes if isinstance(meetings, Meetings) else 0
        if dist.get_rank() == 0:
            row = {
                "way": way,
                "step_ms": round(1000 * statistics.median(trained.seconds[skipped:]), 1),
                "ratio": round(statistics.median(ratios), 3),
                "ratio_least": round(min(ratios), 3),
                "ratio_most": round(max(ratios), 3),
                "sent_kib_by_host": [round(nbytes / 1024, 1) for nbytes in sent],
                "averaged_kib_a_step": round(averaged / trained.number / 1024, 1),
                "losses": [round(loss, 3) for loss in trained.losses],
            }
            print(json.dumps(row), flush=True)


def main() -> None:
    """Trains all ways in turns, and reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ways", nargs="+", default=["data-parallel", "diloco-10", "diloco-50"])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=50, help="of a round: a multiple of N")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    text, held_out = corpus()
    every = {way: make(way, options.width, options.layers) for way in options.ways}
    for trained in every.values():  # the first step of a Scheduler learns shapes
        evaluate(trained, held_out)
    for _ in range(options.rounds):
        for trained in every.values():
            train(trained, text, options.steps)
            evaluate(trained, held_out)
    report(every, options.ways, skipped=1)
    for trained in every.values():
        trained.scheduler.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
