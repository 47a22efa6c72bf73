"""Measures what it costs to compare what ranks were given, of a step that is host work alone.

python benchmarks/overhead/passed.py [--steps 400] [--ranks 4]

Two stages, the other ranks are replicas; four numbers a row, 8 microbatches. Steps with and without
the numbers of tensors take turns in one run: "without" every rank says that it was given nothing.
The time of the numbers alone is measured beside it, for batches of several sizes.
"""

import argparse
import statistics
import time
import timeit

import torch
import torch.distributed as dist
from torch import nn

from pipegrad import Scheduler, Stage, Topology
from pipegrad.pipeline.microbatch import Batches
from pipegrad.pipeline.trees import number_of
from pipegrad.testing import run_ranks

MICROBATCHES = 8
SHAPES = {
    "8 x 4 float32": (8, 4),
    "8 x 2048 int64": (8, 2048),
    "8 x 3 x 224 x 224": (8, 3, 224, 224),
}


def measured(steps: int) -> tuple[float, float]:
    """Returns the median seconds of a step with and without."""
    topology = Topology.create(pipeline=2)
    stage, replica = topology.coordinate("pp"), topology.coordinate("dp")
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in range(2)]
    scheduler = Scheduler(
        [Stage(layers[stage], stage)],
        topology,
        schedule="1f1b",
        num_microbatches=MICROBATCHES,
        loss_fn=nn.functional.mse_loss,
    )
    optimizer = scheduler.optimizer(torch.optim.SGD, lr=1e-3)
    note = Batches._number_passed
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for number in range(2 * steps):
        compares = bool(number % 2)
        Batches._number_passed = note if compares else _nothing  # type: ignore[method-assign]
        torch.manual_seed(2 * number + replica)
        x, y = torch.randn(MICROBATCHES, 4), torch.randn(MICROBATCHES, 4)
        dist.barrier()
        began = time.perf_counter()
        loss = scheduler.step(x, target=y).loss
        seconds[compares].append(time.perf_counter() - began)
        assert loss >= 0
        optimizer.step()
        optimizer.zero_grad()
    scheduler.close()
    return statistics.median(seconds[True][20:]), statistics.median(seconds[False][20:])


def _nothing(*_: object) -> None:
    pass


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--ranks", type=int, default=4)
    options = parser.parse_args()
    found = run_ranks(measured, options.ranks, options.steps, timeout_seconds=600)
    with_, without = (statistics.mean(pair[i] for pair in found) for i in range(2))
    print(f"a step {without * 1e3:.2f} ms; with, by without {with_ / without:.4f}")
    for name, shape in SHAPES.items():
        value = torch.ones(shape, dtype=torch.int64 if "int" in name else torch.float32)
        number_of(value)
        best = min(timeit.repeat(lambda value=value: number_of(value), number=20, repeat=9)) / 20
        print(f"a number of {name}: {best * 1e6:.0f} us, {best / without:.2%} of that step")


if __name__ == "__main__":
    main()
