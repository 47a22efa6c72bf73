"""Compares the gain of moved layers that a recording predicts with that of a run of the other cut.

torchrun --nproc-per-node 4 benchmarks/auto/moved_layers.py [--rounds 8]
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import pipegrad

sys.path.insert(0, str(Path(__file__).parents[1] / "network"))
from stages import Batch, SleepingStage, split_seconds

RANKS, MICROBATCHES, KIB = 4, 16, 4
LAYERS, HEAVY = 12, (9, 10, 11)  # the last three take twice as long
EVEN = [3, 6, 9]


def layer(index: int) -> SleepingStage:
    """Returns a layer that sleeps."""
    factor = 2 if index in HEAVY else 1
    return SleepingStage(split_seconds(0.004 * factor, 0.008 * factor))


class Run:
    """A model that is cut at some boundaries."""

    def __init__(self, boundaries: Sequence[int], batch: Batch) -> None:
        model = nn.Sequential(*map(layer, range(LAYERS)))
        self.cut = pipegrad.cut(
            model,
            RANKS,
            by=[2.0 if index in HEAVY else 1.0 for index in range(LAYERS)],
            boundaries=boundaries,
            how="structural",
            example={"input": batch.x[:1]},
        )
        self.scheduler = pipegrad.Scheduler(
            self.cut,
            pipegrad.Topology.create(pipeline=RANKS),
            schedule="1f1b",
            num_microbatches=MICROBATCHES,
            loss_fn=batch.loss,
            handlers=["noop"],
        )
        self.seconds: list[float] = []

    def step(self, batch: Batch) -> None:
        """Makes a step, and notes what it took on this rank."""
        dist.barrier()
        begin = time.perf_counter()
        self.scheduler.step(input=batch.x, target=batch.target).loss.item()
        self.seconds.append(time.perf_counter() - begin)


def main() -> None:
    """Prints both gains, on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    given = parser.parse_args()
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    batch = Batch(MICROBATCHES, KIB)
    before = Run(EVEN, batch)
    with pipegrad.record(before.scheduler) as recording:
        for _ in range(4):
            before.step(batch)
    (found,) = (a for a in recording.explain().advice if a.change.startswith("move"))
    after = Run(json.loads(found.change.partition(" = ")[2].removesuffix(")")), batch)
    for _ in range(given.rounds + 2):  # the first two learn
        for run in (before, after):
            run.step(batch)
    slowest = torch.tensor([run.seconds[-given.rounds :] for run in (before, after)])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        old, new = (statistics.median(seconds) for seconds in slowest.tolist())
        print(f"{found.change}\npredicted: {found.gain:.1%}; measured: {1 - new / old:.1%}")
        print(f"{1e3 * old:.0f} ms, then {1e3 * new:.0f} ms")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
