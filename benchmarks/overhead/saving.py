"""Measures what a checkpoint costs that is written while the training goes on.

python benchmarks/overhead/saving.py [--steps 120] [--width 512] [--layers 8] [--tokens 64]

Two ranks train a small transformer as `pipegrad train` does. Blocks of steps take turns: in one
block a checkpoint is being written, in the next one none. Each block of the first kind begins with
a save, and ends when the checkpoint is whole. A ratio is of medians of steps. What holds the
optimizer up is the time in which the training itself copies the values.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from pipegrad.testing import run_ranks
from pipegrad.train.config import load
from pipegrad.train.loop import Trainer

JOB = """
[model]
factory = "saving:transformer"
width = {width}
layers = {layers}
[parallel]
microbatches = 2
[data]
batch_size = 4
sequence_length = {tokens}
[train]
device = "cpu"
steps = 1000000
trace = false
"""
REST = 8  # steps of a block without a save
Seconds = tuple[float, float]  # of a clock on the wall, and of the processor
Measured = tuple[list[Seconds], list[Seconds], list[float], list[float], int]


def transformer(*, width: int, layers: int) -> nn.Sequential:
    """Returns an embedding, layers of a transformer, and a head."""
    blocks = [nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0) for _ in range(layers)]
    return nn.Sequential(nn.Embedding(256, width), *blocks, nn.Linear(width, 256))


def measured(folder: str, steps: int) -> Measured:
    """Returns seconds of steps without and with a save, of copies, of saves; and bytes."""
    os.chdir(folder)
    sys.path.insert(0, str(Path(__file__).parent))
    trainer = Trainer(partial(load, Path("job.toml"), []))
    trainer.saving.folder, trainer.saving.note = folder, print
    number, plain, saving = 0, list[Seconds](), list[Seconds]()
    copies, saves = list[float](), list[float]()

    def step() -> Seconds:
        nonlocal number
        number += 1
        began, worked = time.perf_counter(), time.process_time()
        trainer.step(number)
        return time.perf_counter() - began, time.process_time() - worked

    for _ in range(REST):
        step()
    while len(plain) < steps:
        plain += [step() for _ in range(REST)]
        dist.barrier()
        began = time.perf_counter()
        trainer.saving.save(number)
        copies.append(time.perf_counter() - began)
        # All ranks see the same answers after the same step, so they make the same steps.
        while trainer.sync.gather(torch.tensor([float(trainer.saving.is_writing)])).any():
            saving.append(step())
        saves.append(time.perf_counter() - began)
    last = max(Path(folder).glob("checkpoint-*"), key=lambda path: path.stat().st_mtime)
    nbytes = sum(path.stat().st_size for path in last.iterdir())
    began = time.perf_counter()
    trainer.saving.write(Path(folder) / "checkpoint-0", number)
    alone = time.perf_counter() - began
    trainer.close()
    return plain, saving, copies, [*saves, alone], nbytes


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser()
    for name, value in {"steps": 120, "width": 512, "layers": 8, "tokens": 64}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        job = JOB.format(width=options.width, layers=options.layers, tokens=options.tokens)
        (Path(folder) / "job.toml").write_text(job)
        plain, saving, copies, saves, nbytes = run_ranks(
            measured, 2, folder, options.steps, timeout_seconds=900.0
        )[0]
        free = shutil.disk_usage(folder).free
    *beside, alone = saves
    print(f"checkpoint: {nbytes / 2**20:.0f} MiB, {len(beside)} saves, {free:,} bytes free")
    for clock, name in enumerate(("the wall", "the processor, all threads of rank 0")):
        without = statistics.median(seconds[clock] for seconds in plain) * 1e3
        together = statistics.median(seconds[clock] for seconds in saving) * 1e3
        longer = (sum(s[clock] for s in saving) * 1e3 - len(saving) * without) / len(beside)
        print(f"by the clock of {name}:")
        print(f"  a step without a save: {without:.1f} ms ({len(plain)} steps)")
        print(f"  a step beside a save: {together:.1f} ms ({len(saving)} steps)")
        print(f"  ratio: {together / without:.2f}")
        print(f"  a save adds {longer:.0f} ms, all its steps together")
    held_up, save = statistics.median(copies[1:]) * 1e3, statistics.median(beside) * 1e3
    print(f"the optimizer is held up: {held_up:.1f} ms, the first time {copies[0] * 1e3:.1f} ms")
    print(f"a save takes {save:.0f} ms beside steps, {alone * 1e3:.0f} ms alone")


if __name__ == "__main__":
    main()
