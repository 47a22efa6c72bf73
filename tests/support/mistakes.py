"""The commonest mistakes of scripts under torchrun, and how many lines each of them prints.

    python -m tests.support.mistakes [NAME]... [--show] [--launch]

prints a table. To compare with another version of pipegrad, let PYTHONPATH name its folder first.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.train.launched import Launched, pipegrad, torchrun

NO_TEST = {"PYTEST_CURRENT_TEST": ""}  # under pytest tracebacks stay as they are
SCRIPT = """
import sys

import torch
import torch.distributed as dist
from torch import nn

import pipegrad

mistake, tokens = sys.argv[1], 16


class Block(nn.Linear):
    def forward(self, x):
        if mistake == "forward" and rank == 2 and number == 3:
            raise ValueError("this block has no weights")
        return super().forward(x)


class Loss(nn.CrossEntropyLoss):
    def forward(self, logits, target):
        if mistake == "loss":
            target = target[: len(target) - 1]
        return super().forward(logits, target)


def batches():
    for i in range(5):
        torch.manual_seed(i * 100 + (rank if mistake == "batches" else 0))
        if mistake == "loader" and rank == 1 and i == 2:
            raise FileNotFoundError("shard-2.bin")
        if mistake == "early" and rank == 2 and i == 3:
            return
        yield torch.randint(300 if mistake == "tokens" else 256, (tokens,))


dist.init_process_group("gloo")
rank, number = dist.get_rank(), 0
topology = pipegrad.Topology.create(pipeline=3 if mistake == "world" else 4)
torch.manual_seed(0)
embedding, head = nn.Embedding(256, 64), nn.Linear(64, 256, bias=False)
head.weight = embedding.weight
model = nn.Sequential(embedding, Block(64, 64), Block(64, 64), head)
index = 3 - rank if mistake == "stage" else rank
stage = pipegrad.Stage(model[index : index + 1], index)
scheduler = pipegrad.Scheduler(
    [stage],
    topology,
    schedule="gpipe" if mistake == "schedule" and rank == 1 else "1f1b",
    num_microbatches=8 if mistake == "microbatches" and rank == 2 else 4,
    loss_fn=Loss(),
    tied=pipegrad.find_tied(model),
    handlers=["data-paralel" if mistake == "handler" else "data-parallel", "pipeline-shared"],
)
lr = 0.1 * (1 + rank) if mistake == "rate" else 0.1
groups = [[{"params": model.parameters()}]] if mistake == "groups" else []
optimizer = scheduler.optimizer(torch.optim.AdamW, *groups, lr=lr)
for number, batch in enumerate(batches(), start=1):
    target = None if mistake == "target" else batch
    result = scheduler.step(batch, target=target)
    loss = result.loss.item()
    if mistake == "backward":
        result.loss.backward()
    if mistake == "clip":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""
MISTAKES = {  # what a script does wrong, and what one of the first lines must say
    "world": ("4 ranks, `Topology.create(pipeline=3)`", "a world of 4 ranks cannot be cut into"),
    "batches": ("every rank draws its own batch", "were given different tensors as"),
    "microbatches": ("8 microbatches on rank 2, 4 elsewhere", "4 microbatches on ranks [0, 1, 3]"),
    "schedule": ("`gpipe` on rank 1, `1f1b` elsewhere", "1f1b on ranks [0, 2, 3], gpipe on rank 1"),
    "rate": ("a learning rate for each rank", "lr"),
    "forward": ("a forward raises on rank 2", "rank 2: ValueError('this block has no weights')"),
    "loss": ("the loss raises", "rank 3: ValueError('Expected input batch_size"),
    "loader": ("a data loader raises on rank 1", "rank 1: FileNotFoundError('shard-2.bin')"),
    "early": ("rank 2 makes two steps less", "rank 2 has ended after scheduler.step() 3"),
    "target": ("no target", "needs target="),
    "stage": ("stages in another order", "stage"),
    "handler": ("a wrong name of a handler", "data-paralel"),
    "tokens": ("tokens above the vocabulary", "rank 0: IndexError"),
    "backward": ("`loss.backward()` of a step's loss", "does not require grad"),
    "groups": ("groups given to `scheduler.optimizer`", "use group_of="),
    "clip": ("torch's `clip_grad_norm_`", "clip"),
}


@dataclass(frozen=True)
class Outcome:
    """What a mistake prints, and how it ends.

    Attributes:
        code: Of torchrun.
        ours: The lines of the ranks.
        noise: The lines of torchrun behind them.
        seconds: From the begin to the end.
    """

    code: int
    ours: list[str]
    noise: list[str]
    seconds: float


def made(name: str, folder: Path, *, launch: bool = False) -> Outcome:
    """Makes a mistake on four ranks; returns what is printed."""
    (folder / "train.py").write_text(SCRIPT)
    began = time.monotonic()
    if launch:
        words: tuple[Any, ...] = (pipegrad, "launch", "-n", "4", "train.py", name)
    else:
        words = (torchrun, "--nproc-per-node", "4", "train.py", name)
    run = Launched(folder, *words, variables=NO_TEST)
    code, lines = run.wait(), _without_own_frames(str(run).splitlines())
    first = next((i for i, line in enumerate(lines) if _is_launchers(line)), len(lines))
    return Outcome(code, lines[:first], lines[first:], time.monotonic() - began)


def _without_own_frames(lines: list[str]) -> list[str]:
    """Returns lines without those of the process that stands in for torchrun's."""
    own = ("multiprocessing/process.py", "support/train/launched.py")
    drop = {i for i, line in enumerate(lines) if any(file in line for file in own)}
    drop |= {i + 1 for i in drop}
    return [x for i, x in enumerate(lines) if i not in drop and not x.startswith("Process Fork")]


def _is_launchers(line: str) -> bool:
    return "Sending process" in line or "torch/distributed/elastic" in line or "[api.py" in line


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(MISTAKES))
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--launch", action="store_true")
    options = parser.parse_args()
    for name in options.names:
        with tempfile.TemporaryDirectory() as folder:
            done = made(name, Path(folder), launch=options.launch)
        total = len(done.ours) + len(done.noise)
        print(  # noqa: T201
            f"| {name} | {MISTAKES[name][0]} | {len(done.ours)} | {total} | exit {done.code} "
            f"| {done.seconds:.1f} s |",
            flush=True,
        )
        if options.show:
            print("\n".join([*done.ours, "-- launcher", *done.noise]), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
