"""What agreements of two ranks take: of one number, and those of the start of a GradientSync.

python benchmarks/overhead/agreements.py [--base FOLDER]

With FOLDER, a clone of another version, both take turns, and the ratio is printed.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import click
import torch
from torch import nn

ROOT = Path(__file__).parents[2]
NUM_AGREEMENTS, NUM_LAYERS, TURNS = 2000, 1000, 6


def seconds() -> tuple[float, float]:
    """Returns what an agreement and what a start takes, on one rank."""
    import torch.distributed as dist

    from pipegrad import GradientSync, Topology
    from pipegrad.comm.agreement import agree

    rank = dist.get_rank()
    agree("the begin", int)
    began = time.perf_counter()
    for _ in range(NUM_AGREEMENTS):
        agree("a number", lambda: rank)
    each = (time.perf_counter() - began) / NUM_AGREEMENTS
    topology = Topology.create(pipeline=2)
    torch.manual_seed(rank)
    module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(NUM_LAYERS)))
    agree("the start", int)
    began = time.perf_counter()
    sync = GradientSync({rank: module}, topology, handlers=["pipeline-shared"])
    agree("the end", int)
    start = time.perf_counter() - began
    sync.close()
    return each, start


def one_turn() -> None:
    """Prints the times of rank 0, of the version that is imported."""
    from pipegrad.testing import run_ranks

    print(*run_ranks(seconds, 2)[0])


@click.command()
@click.option("--base", type=Path, help="A clone of another version.")
@click.option("--turn", is_flag=True, hidden=True)
def main(base: Path | None, *, turn: bool) -> None:
    """Measure agreements, and print them."""
    if turn:
        one_turn()
        return
    folders = [ROOT, *([] if base is None else [base])]
    taken: dict[Path, list[tuple[float, float]]] = {folder: [] for folder in folders}
    for _ in range(TURNS):
        for folder in folders:
            path = os.pathsep.join([str(folder), str(folder / "handlers")])
            run = [sys.executable, __file__, "--turn"]
            found = subprocess.run(
                run, env={**os.environ, "PYTHONPATH": path}, capture_output=True, check=True
            )
            each, start = map(float, found.stdout.split()[-2:])
            taken[folder].append((each, start))
    for name, index in (("an agreement", 0), ("a start", 1)):
        of = [statistics.median(t[index] for t in taken[folder]) for folder in folders]
        ratio = "" if base is None else f", {of[0] / of[1]:.2f} times that of {base}"
        print(f"{name}: {1e3 * of[0]:.3f} ms{ratio}")


if __name__ == "__main__":
    main()
