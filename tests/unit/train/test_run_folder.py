"""What is in the folder of a run, and which folder a run goes on in."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipegrad.checkpoint.folders import (
    checkpoints,
    find_checkpoint,
    prune,
    publish,
    remove_unfinished,
    unfinished,
)
from pipegrad.errors import ConfigError
from pipegrad.run_files import replace
from pipegrad.train.config import Config
from pipegrad.train.run_folder import (
    HeldError,
    Origin,
    RunLock,
    cut_rows,
    find_origin,
    locked_origin,
    make_run_folder,
)
from pipegrad.train.schema import Model, Train


def config(**train: Any) -> Config:
    return Config(model=Model(factory="a:b"), train=Train(**train))


def names(run: Path) -> list[str]:
    return sorted(path.name for path in run.iterdir())


def with_checkpoints(run: Path, *steps: int) -> Path:
    for number in steps:
        (run / f"checkpoint-{number}").mkdir(parents=True)
        (run / f"checkpoint-{number}" / "piece").write_text(str(number))
    return run


def test_checkpoints_are_sorted_published_and_unfinished_ones_removed(tmp_path: Path) -> None:
    run = with_checkpoints(tmp_path, 9, 10, 2)
    others = "checkpoint-", "checkpoint-12.damaged", "model", "notes.partial"
    begun = "checkpoint-11.partial", "checkpoint-1.old.partial", f"lock.{'0af' * 5}1.partial"
    for other in (*begun, *others):
        (run / other).mkdir()
    assert [path.name for path in checkpoints(run)] == [f"checkpoint-{n}" for n in (10, 9, 2)]
    assert checkpoints(tmp_path / "nowhere") == []
    folder = run / "checkpoint-9"
    unfinished(folder).mkdir()
    (unfinished(folder) / "piece").write_text("new")
    publish(folder)
    assert (folder / "piece").read_text() == "new"
    remove_unfinished(run)
    assert names(run) == sorted([*others, *(f"checkpoint-{n}" for n in (10, 9, 2))])


@pytest.mark.parametrize(
    ("last", "every", "left"),
    [(1, None, [10]), (2, None, [8, 10]), (9, None, [2, 4, 6, 8, 10]), (1, 4, [4, 8, 10])],
)
def test_old_ones_are_removed(
    tmp_path: Path, last: int, every: int | None, left: list[int]
) -> None:
    prune(with_checkpoints(tmp_path, 2, 4, 6, 8, 10), keep_last=last, keep_every=every)
    assert sorted(int(name.partition("-")[2]) for name in names(tmp_path)) == left


def test_later_rows_and_half_rows_are_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [json.dumps({"step": step, "loss": 0.5}) for step in (1, 2, 3)]
    path.write_text("\n".join(rows) + '\n{"step": 2, "lo')
    cut_rows(path, 2)
    assert path.read_text().splitlines() == rows[:2]
    assert names(tmp_path) == ["metrics.jsonl"]
    cut_rows(tmp_path / "none", 2)
    for _ in range(2):  # of no row, and of no byte
        cut_rows(path, 0)
        assert path.read_bytes() == b""


def run_of(folder: Path, *steps: int) -> Path:
    """Makes the folder of a run."""
    with_checkpoints(folder, *steps)
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "lock").touch()
    return folder


def test_what_a_run_goes_on_from(tmp_path: Path) -> None:
    run, other = run_of(tmp_path / "run", 3, 10), run_of(tmp_path / "run-2", 50)

    def origin(output: Path, resume: str | None = None) -> Origin:
        return find_origin(config(output=str(output), resume=resume))

    found = (run, run / "checkpoint-10")
    assert origin(run) == (None, None)
    assert origin(run, "auto") == found
    assert origin(other, str(run)) == found
    (run / "checkpoint-010").mkdir()  # whichever a folder lists first
    assert origin(other, str(run)) == (run, find_checkpoint(run)) == found
    assert origin(run, str(run / "checkpoint-3")) == (None, run / "checkpoint-3")
    nowhere = tmp_path / "nowhere"
    assert origin(run, str(nowhere)) == (None, nowhere)
    assert origin(nowhere, "auto") == (None, None)
    # A run that was killed before its first checkpoint begins again, in its folder.
    assert origin(run_of(tmp_path / "new"), "auto") == (tmp_path / "new", None)
    nowhere.mkdir()
    (run / "index.json").touch()  # it looks like a checkpoint itself
    for other in (nowhere, run):
        with pytest.raises(ConfigError, match=r"train\.output = .*: is there, and no run has m"):
            origin(other, "auto")


@pytest.mark.parametrize("error", [FileExistsError("a file of the reporter"), ValueError("odd")])
def test_runs_have_folders_of_their_own_and_a_reporter_that_fails_leaves_none(
    tmp_path: Path, error: Exception
) -> None:
    """Folders were made without end when it raised FileExistsError."""
    begun = []

    def begin(folder: Path) -> None:
        begun.append(folder.name)
        (folder / "manifest.json").write_text("{}")
        raise error

    values = config(output=str(tmp_path / "run"))
    made = [make_run_folder(values, lambda _: None) for _ in range(2)]
    assert [Path(folder).name for folder in made] == ["run", "run-2"]
    with pytest.raises(ConfigError, match=f"cannot be written: {error}"):
        make_run_folder(values, begin)
    assert begun == ["run-3"]
    assert names(tmp_path) == ["run", "run-2"]


def test_a_manifest_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises(OSError, match="manifest"):
        replace(tmp_path / "manifest.json", b"new")
    assert names(tmp_path) == ["manifest.json"]


HOLDING = """
import os, sys, time
from pathlib import Path
from pipegrad.train.run_folder import RunLock
lock = RunLock(Path(sys.argv[1]))
os.fork()
os.write(1, b"held\\n")
time.sleep(100)
"""


def test_one_process_works_in_a_folder(tmp_path: Path) -> None:
    """It is free again when the process is killed, though a worker of the process lives on."""
    run = run_of(tmp_path / "run", 4)
    values = config(output=str(run), resume="auto")
    with subprocess.Popen(
        [sys.executable, "-c", HOLDING, str(run)], stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == process.stdout.readline() == b"held\n"
            with pytest.raises(HeldError, match=f"is in use by process {process.pid} on .* since "):
                RunLock(run)
            with pytest.raises(ConfigError, match=r"train\.resume = 'auto': .* is in use by "):
                locked_origin(values)
            process.kill()
            process.wait()
            *origin, lock = locked_origin(values)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    assert origin == [run, run / "checkpoint-4"]
    assert lock is not None
    assert (run / "lock").read_text().startswith(f"process {os.getpid()} on ")
    lock.release()


def test_a_file_system_without_locks_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lockf(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", lockf)
    run = run_of(tmp_path / "run", 4)
    with pytest.warns(UserWarning, match=r"run cannot be locked \(No locks available\): st"):
        locked_origin(config(output=str(run), resume=str(run)))
