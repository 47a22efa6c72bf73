"""Measures the memory of each rank of `pipegrad train`: of its text, and of its model.

    python benchmarks/trainer_memory/memory.py [text MiB] [model MiB]

Every case runs in fresh ranks. A figure is MiB beyond what the rank had when it had imported
everything. This runs on any commit, so run it with an earlier one on PYTHONPATH to compare.
"""

from __future__ import annotations

import os
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
from torch import nn

from pipegrad.testing import run_ranks
from pipegrad.train.config import load
from pipegrad.train.loop import Trainer

JOB = """
[model]
factory = "memory:blocks"
[data]
batch_size = 8
sequence_length = 64
[optimizer]
name = "SGD"
lr = 1e-3
[train]
device = "cpu"
steps = 10
"""
RANKS, STEPS = 4, 5
WIDTH = 1024
_MIB = 2**20


def blocks(*, number: int = 2) -> nn.Sequential:
    """Returns an embedding, linear layers of 4 MiB each, and a head."""
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(number)]
    return nn.Sequential(nn.Embedding(256, WIDTH), *layers, nn.Linear(WIDTH, 256))


def status(name: str) -> float:
    """Returns a field of /proc/self/status in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024


def measured(folder: str, rank_settings: list[str]) -> tuple[float, float, float]:
    """Returns peak of set-up, anonymous memory afterwards, and peak of some steps."""
    os.chdir(folder)
    sys.path.insert(0, str(Path(__file__).parent))
    os.environ["LOCAL_RANK"] = str(torch.distributed.get_rank())
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    before, anonymous = status("VmRSS"), status("RssAnon")
    trainer = Trainer(partial(load, Path("job.toml"), rank_settings))
    set_up, kept = status("VmHWM") - before, status("RssAnon") - anonymous
    for number in range(1, STEPS + 1):
        trainer.step(number)
    trained = status("VmHWM") - before
    trainer.close()
    return set_up, kept, trained


def main() -> None:
    """Prints a line for each case: the smallest and the largest rank."""
    text, model = (int(word) for word in (*sys.argv[1:], "128", "256")[:2])
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "job.toml").write_text(JOB)
        line = ("All work and no play makes Jack a dull boy. " * 23)[:1023] + "\n"
        with (Path(folder) / "text.txt").open("w") as file:
            for _ in range(text):
                file.write(line * 1024)
        os.environ["XDG_CACHE_HOME"] = folder
        cases = {
            "neither": [],
            f"text of {text} MiB": ["data.files='text.txt'"],
            "the same text again": ["data.files='text.txt'"],
            f"model of {model} MiB": [f"model.number={model // 4}"],
        }
        for name, settings in cases.items():
            replies = run_ranks(measured, RANKS, folder, settings, timeout_seconds=500)
            columns = zip(*replies, strict=True)
            peak, kept, trained = (f"{min(c):7.0f} to {max(c):5.0f}" for c in columns)
            print(f"{name:24} set-up {peak}   kept {kept}   with steps {trained}", flush=True)


if __name__ == "__main__":
    main()
