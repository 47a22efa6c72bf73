"""Runs under torchrun whose ranks are killed, and go on; how they are compared."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
from pathlib import Path

from pipegrad.cli import main as pipegrad
from pipegrad.testing import run_ranks
from tests.support.train.jobs import with_job
from tests.support.train.launched import Launched, torchrun

JOB = """
[model]
factory = "factories:drawing"
width = 256
[data]
dataset = "data_functions:endless"
[optimizer]
schedule = {name = "StepLR", step_size = 7, gamma = 0.97}
[train]
device = "cpu"
steps = 200
save_every = 4
output = "run"
resume = "auto"
trace = false
"""
RANKS = 2


def start(folder: Path, *options: str, steps: int, anew: bool = False) -> Launched:
    """Starts a job of a folder by torchrun, with options of torchrun."""
    words = ["--nproc-per-node", str(RANKS), "--rdzv-backend", "c10d"]
    words += ["--rdzv-endpoint", "localhost:0", *options, "-m", "pipegrad"]
    words += ["train", "job.toml", "--set", f"train.steps={steps}"]
    return Launched(folder, torchrun, *words, anew=anew)


def job(folder: Path) -> Path:
    """Writes the job into a new folder."""
    folder.mkdir()
    return with_job(folder, "job.toml", JOB)


def in_ranks(folder: str, *settings: str) -> None:
    words = [word for setting in settings for word in ("--set", setting)]
    with contextlib.chdir(folder):
        pipegrad(["train", "job.toml", *words], standalone_mode=False)


def whole(folder: Path, steps: int) -> Path:
    """Runs the job in a new folder, where nobody kills it."""
    run_ranks(in_ranks, RANKS, str(job(folder)), f"train.steps={steps}")
    return folder


def kill_one(launched: Launched, folder: Path, draw: random.Random, *, writing: bool) -> None:
    """Kills a rank, if asked while a checkpoint is written; waits until torchrun ended the rest."""
    launched.until(
        lambda: (not writing or has_unfinished(folder)) and launched.ranks(), poll_seconds=0.002
    )
    ranks = launched.ranks()
    os.kill(draw.choice(ranks), signal.SIGKILL)
    launched.until(lambda: not set(ranks) & set(launched.ranks()))


def num_rows(folder: Path) -> int:
    """Returns how many steps have a row of metrics."""
    path = folder / "run" / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def has_unfinished(folder: Path) -> bool:
    """Returns whether a checkpoint is being written."""
    return any((folder / "run").glob("checkpoint-*.partial"))


def losses(folder: Path) -> list[tuple[int, float]]:
    """Returns number and loss of each step."""
    rows = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return [(row["step"], row["loss"]) for row in rows]
