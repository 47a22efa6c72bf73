"""Times steps whose shapes change in each microbatch, against steps of equal shapes.

benchmarks/network/cluster.sh -r 1gbit benchmarks/variable_length/shapes.py [--rounds 20]
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipegrad
from pipegrad.schedules import build

sys.path.append(str(Path(__file__).parents[1] / "network"))
from stages import KIB, SleepingStage, ratios, split_seconds, time_in_turns

RANKS, MICROBATCHES = 4, 16
EQUAL = "equal shapes"
# For each microbatch its size in sixteenths of the mean. A step always has the same bytes, but for
# one element in some microbatches. That way shows what a change costs. The others are also uneven.
SIZES: dict[str, list[float]] = {
    EQUAL: [16] * MICROBATCHES,
    "every shape another one, by one element": [16, 16 + 2**-14] * (MICROBATCHES // 2),
    "by 1/8 up and down": [14, 18] * (MICROBATCHES // 2),
    "by up to 1/2 up and down": [8, 24, 12, 20] * (MICROBATCHES // 4),
}


class Batch:
    """Microbatches of one row and of different widths; the loss looks at the first column."""

    def __init__(self, widths: Sequence[int]) -> None:
        generator = torch.Generator().manual_seed(0)
        self.microbatches = [
            {
                "x": torch.randn(1, width, generator=generator),
                "target": torch.randn(1, generator=generator),
            }
            for width in widths
        ]

    @staticmethod
    def loss(output: Tensor, target: Tensor) -> Tensor:
        """Returns the mean loss of a microbatch."""
        return (output[:, 0] - target).square().mean()

    def check(self, module: nn.Module) -> None:
        """Raises unless a stage has the gradient of the whole batch; takes it away."""
        terms = [2 * (each["x"][:, 0] - each["target"]) for each in self.microbatches]
        torch.testing.assert_close(module.weight.grad, torch.cat(terms).mean().reshape(1, 1))
        module.weight.grad = None


def step(batch: Batch, scheduler: pipegrad.Scheduler, module: SleepingStage) -> list[SleepingStage]:
    """Takes a step, and compares its gradient with one process."""
    scheduler.step(microbatches=batch.microbatches)
    batch.check(module)
    return []


def main() -> None:
    """Prints the table of the README, on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    topology = pipegrad.Topology.create(pipeline=RANKS)
    for name in ("1f1b", "eager-1f1b"):
        module = SleepingStage(split_seconds(0.010, 0.020))
        scheduler = pipegrad.Scheduler(
            [pipegrad.Stage(module, topology.coordinate("pp"))],
            topology,
            schedule=build(name, num_ranks=RANKS, num_microbatches=MICROBATCHES),
            loss_fn=Batch.loss,
            handlers=["noop"],
        )
        steps = {
            way: partial(
                step, Batch([int(given.kib * KIB * s / 16) for s in sizes]), scheduler, module
            )
            for way, sizes in SIZES.items()
        }
        times = time_in_turns(steps, None, given.rounds)
        scheduler.close()
        if dist.get_rank() == 0:
            for way, taken in times.items():
                median = 1e3 * statistics.median(taken)
                print(f"| {name} | {way} | {ratios(taken, times[EQUAL])} | {median:.0f} |")
            sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
