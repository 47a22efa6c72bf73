"""Runs under torchrun whose ranks are killed, and go on; how they are compared."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load

from pipegrad.cli import main as pipegrad
from pipegrad.testing import run_ranks
from pipegrad.train.checkpoint.storage import CheckpointReader, read_contents
from pipegrad.train.checkpoint.training_state import unpack
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


def values(folder: Path) -> dict[str, Tensor]:
    """Returns all tensors of a checkpoint, in one process."""
    contents = read_contents(folder)
    reader = CheckpointReader(folder, contents)
    found = {key: contents.empty(key) for key in contents.tensors}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it reads in one process
        load(found, storage_reader=reader, no_dist=True)
    return found


def differences(one: Path, other: Path) -> list[str]:
    """Returns the keys whose bits differ between two checkpoints."""
    own, others = values(one), values(other)
    both = own.keys() | others.keys()
    return sorted(k for k in both if k not in own or k not in others or not same(own[k], others[k]))


def same(one: Tensor, other: Tensor) -> bool:
    """Returns whether two entries have the same bits; of packed state, whether it is the same."""
    if one.dtype == other.dtype == torch.uint8:  # a pickle of equal objects may have other bytes
        return bool(plain(unpack(one)) == plain(unpack(other)))
    return one.dtype == other.dtype and torch.equal(one, other)


def plain(value: Any) -> Any:
    """Returns a value with lists in the place of tensors."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return value.tolist() if isinstance(value, Tensor) else value
