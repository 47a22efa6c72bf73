"""Runs under torchrun whose ranks are killed, and go on: python -m tests.support.train.restarts.

Prints a line for each kill, and compares the end with a run that nobody killed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from pipegrad.train.checkpoint.folders import checkpoints
from pipegrad.train.checkpoint.metadata import CheckpointReader
from pipegrad.train.checkpoint.packed import unpack
from tests.support.train.jobs import with_job

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
trace = false
"""
RANKS = 2
POLL_SECONDS = 0.002


@dataclass(frozen=True)
class Kill:
    """What was killed: after how many rows of metrics, and whether a checkpoint was unfinished."""

    rows: int
    while_writing: bool


def torchrun(
    folder: Path, *options: str, restarts: int = 0, launcher: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """Starts a job of a folder, with options of the job and of torchrun."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command = ["-m", "pipegrad", "train", "job.toml"]
    with (folder / "log.txt").open("w") as log:
        return subprocess.Popen(
            [*launch, *rendezvous, "--max-restarts", str(restarts), *launcher, *command, *options],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
        )


def job(folder: Path, steps: int) -> Path:
    """Writes the job into a new folder."""
    folder.mkdir()
    with_job(folder, "job.toml", JOB.replace("steps = 200", f"steps = {steps}"))
    functions = Path(__file__).with_name("data_functions.py")
    (folder / "data_functions.py").write_text(functions.read_text())
    return folder


def killed_run(
    folder: Path, *, steps: int, kills: int, while_writing: int, seed: int, timeout: float
) -> tuple[int, list[Kill]]:
    """Runs a job, kills its ranks, and lets torchrun start them again.

    Args:
        folder: Of the job.
        steps: Of the job.
        kills: How often one rank is killed.
        while_writing: How many of the kills come while a checkpoint is being written.
        seed: Of the moments and ranks.
        timeout: Seconds for the whole run.

    Returns:
        The exit code of torchrun, and the kills.
    """
    draw = random.Random(seed)
    kinds = [True] * while_writing + [False] * (kills - while_writing)
    draw.shuffle(kinds)
    deadline, done = time.monotonic() + timeout, list[Kill]()
    process = torchrun(folder, "--set", f"train.steps={steps}", restarts=kills)
    try:
        for number, wanted in enumerate(kinds):
            # The kills spread over the run, at random.
            target = draw.randrange(number * steps // kills, (number + 1) * steps // kills)
            kill = wait_and_kill(process, folder, target, draw, deadline, writing=wanted)
            if kill is None:
                break
            done.append(kill)
        return process.wait(max(1.0, deadline - time.monotonic())), done
    finally:
        for rank in children(process.pid):
            os.kill(rank, signal.SIGKILL)
        process.kill()


def wait_and_kill(
    process: subprocess.Popen[str],
    folder: Path,
    target: int,
    draw: random.Random,
    deadline: float,
    *,
    writing: bool,
) -> Kill | None:
    """Kills a rank when the run has so many rows of metrics; None if the run ends before."""
    rows = 0

    def is_time() -> bool:
        nonlocal rows
        rows = num_rows(folder)
        return rows >= target and (not writing or has_unfinished(folder))

    if not waits(is_time, process, deadline):
        return None
    is_writing = has_unfinished(folder)
    ranks = list(children(process.pid))
    if not ranks:
        return None
    os.kill(draw.choice(ranks), signal.SIGKILL)
    # Until torchrun has ended the others, nothing new can be killed.
    waits(lambda: not set(ranks) & set(children(process.pid)), process, deadline)
    return Kill(rows, is_writing)


def waits(is_so: Callable[[], bool], process: subprocess.Popen[str], deadline: float) -> bool:
    """Returns whether something was so before the process ended."""
    while not is_so():
        if process.poll() is not None or time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def children(pid: int) -> Iterator[int]:
    """Yields the ranks of a torchrun."""
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            command = Path(f"/proc/{child}/cmdline")
            if command.exists() and b"train" in command.read_bytes():
                yield int(child)


def variable(process: int, name: str) -> str:
    """Returns a variable of another process."""
    lines = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    return next(line for line in map(bytes.decode, lines) if line.startswith(f"{name}="))


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
    reader = CheckpointReader(folder)
    found = {
        key: torch.empty(saved.size, dtype=saved.properties.dtype)
        for key, saved in reader.read_metadata().state_dict_metadata.items()
        if isinstance(saved, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it reads in one process
        load(found, storage_reader=reader, no_dist=True)
    return found


def differences(folder: Path, other: Path) -> list[str]:
    """Returns the keys whose bits differ between the last checkpoints of two runs."""
    own, others = (values(checkpoints(f / "run")[0]) for f in (folder, other))
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


def main() -> None:
    """Kills a run, and prints what became of it."""
    parser = argparse.ArgumentParser()
    for name, value in {"kills": 20, "while-writing": 10, "steps": 200, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        whole, killed = (job(Path(name) / f, options.steps) for f in ("whole", "killed"))
        assert torchrun(whole).wait(600) == 0, (whole / "log.txt").read_text()
        began = time.monotonic()
        code, kills = killed_run(
            killed,
            steps=options.steps,
            kills=options.kills,
            while_writing=options.while_writing,
            seed=options.seed,
            timeout=120 + 30 * options.kills,
        )
        lines = [
            f"after step {kill.rows}{', while writing' if kill.while_writing else ''}"
            for kill in kills
        ]
        sys.stdout.write(
            f"kills: {'; '.join(lines)}\n"
            f"torchrun ended with {code} after {time.monotonic() - began:.0f} s\n"
            f"{len(kills)} kills, {sum(kill.while_writing for kill in kills)} while writing\n"
            f"losses equal: {losses(whole) == losses(killed)}\n"
            f"tensors that differ: {differences(whole, killed)}\n"
        )
        if code:
            sys.stdout.write((killed / "log.txt").read_text()[-5000:])


if __name__ == "__main__":
    main()
