"""Measures what the watch of ranks costs a step: steps with and without it take turns.

python benchmarks/overhead/watch.py [--steps 600] [--ranks 2]

The watch is always on. Here "without" is with activities that note nothing. Its two threads run in
both, and their time of the processor is measured alone. Four numbers a stage, 8 microbatches: a
step is host work alone, so this is the largest share that the watch can have.
"""

import argparse
import threading
import time
import timeit
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from pipegrad import Scheduler, Stage, Topology
from pipegrad.comm.activity import Activity
from pipegrad.comm.watch import Bounded
from pipegrad.testing import run_ranks

MICROBATCHES = 8


class Switch:
    """Lets activities note nothing, and counts them."""

    def __init__(self) -> None:
        self.number = 0
        self._own = {
            kind: (kind.__dict__.get("__enter__"), kind.__dict__.get("__exit__"))
            for kind in (Activity, Bounded)
        }

    def turn(self, *, on: bool) -> None:
        """Lets activities note, or note nothing."""
        for kind, (enter, leave) in self._own.items():
            if enter is not None:
                kind.__enter__ = enter if on else _self  # type: ignore[method-assign]
            kind.__exit__ = leave if on else _nothing  # type: ignore[method-assign]

    def count(self) -> None:
        """Counts the activities from here on."""
        enter = self._own[Activity][0]

        def counted(activity: Activity) -> Activity:
            self.number += 1
            return enter(activity)

        Activity.__enter__ = counted  # type: ignore[method-assign]


def _self(activity: Activity) -> Activity:
    return activity


def _nothing(*_: object) -> None:
    pass


def measured(steps: int) -> dict[str, float]:
    """Returns what a step takes with and without activities, and what the threads take."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    batch = torch.ones(MICROBATCHES, 4)
    scheduler = Scheduler(
        [Stage(nn.Linear(4, 4), rank)],
        Topology.create(pipeline=dist.get_world_size()),
        schedule="1f1b",
        num_microbatches=MICROBATCHES,
        loss_fn=lambda out, target: (out - target).square().mean(),
    )
    optimizer = scheduler.optimizer(torch.optim.SGD, lr=1e-3)

    def step() -> float:
        dist.barrier()
        began = time.perf_counter()
        result = scheduler.step(batch, target=batch)
        scheduler.sync.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        result.loss.item()
        return time.perf_counter() - began

    for _ in range(20):
        step()
    switch, pairs = Switch(), list[tuple[float, float]]()
    for _ in range(steps):
        switch.turn(on=False)
        without = step()
        switch.turn(on=True)
        pairs.append((without, step()))
    switch.count()
    step()
    with_it, without = (sorted(p[i] for p in pairs)[steps // 4] for i in (1, 0))
    return {
        "activities": switch.number,
        "step_ms": with_it * 1e3,
        "ratio": with_it / without,
        "activity_us": timeit.timeit(_one, number=100_000) / 100_000 * 1e6,
        "threads_percent": _threads_percent(),
    }


def _one() -> None:
    with Activity("something", (0, 1)):
        pass


def _threads_percent(seconds: float = 10.0) -> float:
    """Returns the share of a core that the threads of the watch use."""
    threads = [thread for thread in threading.enumerate() if "pipegrad watch" in thread.name]
    assert len(threads) == 2
    before, began = _cpu_seconds(threads), time.monotonic()
    time.sleep(seconds)
    return (_cpu_seconds(threads) - before) / (time.monotonic() - began) * 100


def _cpu_seconds(threads: list[threading.Thread]) -> float:
    """Returns the time of the processor that threads have used, as Linux counts it."""
    files = [Path(f"/proc/self/task/{thread.native_id}/schedstat") for thread in threads]
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


def main() -> None:
    """Prints what rank 0 has measured."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--steps", type=int, default=600)
    arguments.add_argument("--ranks", type=int, default=2)
    options = arguments.parse_args()
    found = run_ranks(measured, options.ranks, options.steps, timeout_seconds=500)[0]
    share = found["activities"] * found["activity_us"] / found["step_ms"] / 10
    print(f"a step: {found['step_ms']:.2f} ms (first quartile)")
    print(f"activities: {found['activities']} x {found['activity_us']:.2f} us: {share:.2f} % of it")
    print(f"with / without, in turns: {found['ratio']:.4f}")
    print(f"threads of the watch: {found['threads_percent']:.2f} % of a core")


if __name__ == "__main__":
    main()
