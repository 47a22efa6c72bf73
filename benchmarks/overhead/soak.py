"""Shows that a long run does not grow: memory, threads, file descriptors, keys in the store.

    python benchmarks/overhead/soak.py [--steps 10000] [--ranks 2]

It runs `pipegrad train` itself. Every rank measures itself in a hook of the optimizer's step. Exit
code 1 if a count is larger at the end than after the warm-up, or memory by more than 2 MiB.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import click
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from pipegrad.cli import main as pipegrad
from pipegrad.testing import run_ranks

JOB = """
gradient_handlers = [{ name = "pipeline-shared", placement = "owner" }, "data-parallel"]
[model]
factory = "tied_gpt:tied_gpt"
layers = 2
width = 8
context = 8
[data]
batch_size = 4
sequence_length = 8
files = ["text.txt"]
[eval]
every = 500
files = ["text.txt"]
batches = 2
[train]
device = "cpu"
save_every = 100
reporters = ["jsonl"]
output = "run"
"""
WARM_PERCENT = 20  # by then, buffers of a fixed length are full
GROWTH_MIB = 2.0  # pages that an allocator touches late


@dataclass(frozen=True)
class Size:
    """What a rank has after a step.

    Attributes:
        step: The step.
        mib: Anonymous memory in MiB.
        threads: Number of threads.
        descriptors: Number of open file descriptors.
        keys: Number of keys in the store, of all ranks.
        objects: Number of objects that Python's garbage collector follows.
        seconds: Since the process group was made.
    """

    step: int
    mib: float
    threads: int
    descriptors: int
    keys: int
    objects: int
    seconds: float


def sized(step: int, begin: float) -> Size:
    """Returns the size of this process."""
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    status = dict(line.split(":\t", 1) for line in lines)
    world = dist.group.WORLD
    assert world is not None
    return Size(
        step,
        mib=float(status["RssAnon"].split()[0]) / 1024,
        threads=int(status["Threads"]),
        descriptors=len(list(Path("/proc/self/fd").iterdir())),
        keys=world.get_group_store().num_keys(),
        objects=len(gc.get_objects()),
        seconds=time.monotonic() - begin,
    )


def run(folder: str, steps: int, at: Sequence[int]) -> list[Size]:
    """Trains; returns the sizes of this rank after some steps."""
    os.chdir(folder)
    sys.path.insert(0, folder)
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    found, count, begin = list[Size](), -1, time.monotonic()  # the first step is the trial's

    def note(*_: object) -> None:
        nonlocal count
        count += 1
        if count in at:
            found.append(sized(count, begin))

    hook = register_optimizer_step_post_hook(note)
    pipegrad(["train", "job.toml", "--set", f"train.steps={steps}"], standalone_mode=False)
    hook.remove()
    return found


@click.command()
@click.option("--steps", default=10_000)
@click.option("--ranks", default=2)
def main(steps: int, ranks: int) -> None:
    """Print a line for each rank and measurement."""
    at = [steps * percent // 100 for percent in (1, 10, WARM_PERCENT, 50, 100)]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "job.toml").write_text(JOB)
        (Path(folder) / "text.txt").write_text("All work and no play makes Jack a dull boy.\n" * 99)
        example = Path(__file__).parents[2] / "examples" / "tied_gpt.py"
        (Path(folder) / example.name).write_text(example.read_text())
        results = run_ranks(run, ranks, folder, steps, at, timeout_seconds=3000)
    for rank, sizes in enumerate(results):
        click.echo(f"rank {rank}")
        click.echo("".join(f"{field.name:>12}" for field in fields(Size)))
        for size in sizes:
            click.echo("".join(f"{value:12,.0f}" for value in astuple(size)))
    warm = at.index(steps * WARM_PERCENT // 100)
    sys.exit(any(has_grown(sizes[warm], sizes[-1]) for sizes in results))


def has_grown(before: Size, after: Size) -> bool:
    """Returns whether a rank has more than after the warm-up."""
    counts = ((s.threads, s.descriptors, s.keys) for s in (before, after))
    more = any(late > early for early, late in zip(*counts, strict=True))
    return more or after.mib > before.mib + GROWTH_MIB


if __name__ == "__main__":
    main()
