"""`pipegrad launch`: ranks start, end and restart together, and the last line says why."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipegrad.cli import main
from tests.support.train.jobs import with_job

SECONDS = 120.0
LONG = ["--set", "train.steps=100000", "--set", "train.trace=false"]
DYING = ["--set", "model.factory=factories:dying", "--set", "train.trace=false"]
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return with_job(tmp_path)


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Starts launchers in the folder; ends them."""
    started: list[subprocess.Popen[str]] = []

    def begin(*words: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "pipegrad", "launch", *words],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def until(is_so: Callable[[], object]) -> None:
    """Waits until something is so."""
    deadline = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < deadline, "it never was so"
        time.sleep(0.05)


def ranks_of(launcher: int) -> list[int]:
    """Returns the processes that a launcher has started."""
    tasks = Path(f"/proc/{launcher}/task").glob("*/children")
    return [int(number) for task in tasks for number in task.read_text().split()]


def is_running(process: int) -> bool:
    """Returns whether a process computes; a zombie does not."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def test_a_job_is_trained_and_every_rank_has_its_log(start: Start, folder: Path) -> None:
    process = start("-n", "2", "small.toml", "--set", "train.steps=2", "--log-dir", "logs")
    printed, errors = process.communicate(timeout=SECONDS)
    assert (process.returncode, errors) == (0, "")
    assert re.search(r"^\[0\] step     2  loss ", printed, re.MULTILINE)
    logs = {path.parent.name: path.read_text() for path in folder.glob("logs/*/*/*/stdout.log")}
    assert logs.keys() == {"0", "1"}
    assert "step     2  loss " in logs["0"]
    assert len((folder / "runs/run/metrics.jsonl").read_text().splitlines()) == 2


def test_a_rank_that_was_killed_is_the_cause(start: Start) -> None:
    """Other ranks fail at once when it is gone, each with many lines."""
    process = start("-n", "2", "small.toml", *DYING)
    _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 128 + signal.SIGKILL
    assert errors.splitlines()[-1].startswith("Error: rank 1 failed first (killed by SIGKILL)")
    assert "ChildFailedError" not in errors


def test_ranks_that_are_started_again_find_each_other(start: Start, folder: Path) -> None:
    """Each restart failed: torch keeps its store, and gloo found addresses of ranks that were gone.

    Everything that the first ranks did is done again, as they saved nothing.
    """
    process = start("-n", "2", "small.toml", *DYING, "--max-restarts", "1")
    _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, errors
    rows = [len(path.read_text().splitlines()) for path in folder.glob("runs/*/metrics.jsonl")]
    assert 12 in rows


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 143),
        (signal.SIGINT, 130),
        (signal.SIGUSR1, 138),
        (signal.SIGHUP, 143),
        (signal.SIGKILL, -9),
    ],
)
def test_no_rank_outlives_its_launcher(start: Start, folder: Path, number: int, code: int) -> None:
    process = start("-n", "2", "small.toml", *LONG)
    until(lambda: any(path.stat().st_size for path in folder.glob("runs/run/metrics.jsonl")))
    ranks = ranks_of(process.pid)
    assert len(ranks) == 2
    process.send_signal(number)
    process.communicate(timeout=SECONDS)
    assert process.returncode == code
    until(lambda: not any(map(is_running, ranks)))


def test_launchers_of_two_machines_meet(start: Start, folder: Path) -> None:
    with closing(socket.create_server(("localhost", 0))) as server:
        port = server.getsockname()[1]
    words = ["-n", "1", "--nodes", "2", "--rendezvous", f"localhost:{port}", "small.toml"]
    both = [start(*words, "--set", "train.steps=2") for _ in range(2)]
    ended = [process.communicate(timeout=SECONDS) for process in both]
    assert [process.returncode for process in both] == [0, 0], ended
    assert len((folder / "runs/run/metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["-n", "0"], "'0': expected auto, or a number from 1 to 4096"),
        (["-n", "two"], "'two': expected auto, or a number from 1 to 4096"),
        (["--nodes", "2"], "--nodes 2 without --rendezvous"),
        (["--rendezvous", "here:1"], "--nodes 1 with --rendezvous"),
        (["--nodes", "2", "--rendezvous", "here"], "expected HOST:PORT"),
        (["--nodes", "2", "--rendezvous", "here:99999"], "expected HOST:PORT"),
        (["--set", "train.stpes=3"], "train.stpes = 3: unknown key"),
        (["--handlr", "noop"], "No such option '--handlr'"),
        (["--log-dir", "small.toml/logs"], "--log-dir small.toml/logs: cannot be made"),
    ],
)
def test_a_wrong_start_is_refused_before_there_are_ranks(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], says: str
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("pipegrad.commands.launch._run", None)
    result = CliRunner().invoke(main, ["launch", "small.toml", *words])
    assert result.exit_code in (1, 2)
    assert isinstance(result.exception, SystemExit)
    [line] = [line for line in result.output.splitlines() if line.startswith("Error: ")]
    assert says in line


@pytest.mark.parametrize(
    ("settings", "expected"),
    [([], 1), (["parallel.pipeline=3"], 3), (["parallel={data=2, dimensions={tp=2}}"], 4)],
)
def test_auto_starts_as_many_ranks_as_the_file_names(
    folder: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str], expected: int
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    started = []

    def run(config: object, words: list[str], _log_dir: object) -> int:
        started.append((config.nproc_per_node, words))  # type: ignore[attr-defined]
        return 0

    monkeypatch.setattr("pipegrad.commands.launch._run", run)
    options = [word for setting in settings for word in ("--set", setting)]
    result = CliRunner().invoke(main, ["launch", "small.toml", *options, "--traceback"])
    assert result.exit_code == 0, result.output
    assert started == [(expected, ["train", "small.toml", *options, "--traceback"])]
