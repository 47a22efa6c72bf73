"""The folder of a run: who works in it, which launch has made it, and what a run goes on from.

A new run has a new folder, so no run overwrites another. One job at a time works in it.
``manifest.json`` describes the run, and has a note of each launch.

[Note: one launch, several starts] torchrun may start all ranks again, and these go on with the run
of the ranks before them. Its count of restarts does not say that there were any, since each machine
counts alone. Its ``--rdzv-id`` is chosen by the user, and may come again in another job. So a
launch has a name that is drawn at random and lies in torchrun's store, which lives as long as the
launch. Without such a store, the processes that have started the ranks are its names. They also
live as long as the launch. If one of several machines is replaced, the other names stay.

[Note: what a run goes on from]
1. A rank that torchrun has restarted goes on with the run of its own launch, whatever the
   configuration says: the manifest of a run says which launch made it; see
   [Note: one launch, several starts].
2. ``train.resume`` names a checkpoint: a new run begins with its values.
3. It names the folder of a run: this run goes on in this folder, from its newest checkpoint.
4. It is "auto": as 3, with the newest run of ``train.output``; a new run if there is none. A run of
   another ``train.output`` may have such a name, too. Its manifest says so.

In 1 and 4 nobody has named the folder. So the run of another user is not taken. If there are only
such runs, 4 is refused. A checkpoint that is found in the folder of a run belongs to the owner of
the folder, to this user, or to root; see [Note: who may write there].
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import mmap
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pipegrad import run_files
from pipegrad.comm.agreement import agree
from pipegrad.comm.watch import process_state
from pipegrad.errors import ConfigError, PipegradError, in_words, reason
from pipegrad.train.checkpoint.storage import (
    INDEX,
    checkpoints,
    newest_checkpoint,
    remove_unfinished,
    step_of,
)
from pipegrad.train.config import Config, path_of
from pipegrad.train.process import LAUNCH

LOCK, MANIFEST, METRICS = "lock", "manifest.json", "metrics.jsonl"
AUTO = "auto"
Origin = tuple[Path | None, Path | None]  # the folder that a run goes on in, and a checkpoint
_HELD = (errno.EACCES, errno.EAGAIN)
_SEEN_SECONDS = 5.0  # for a network file system to show a new file


class HeldError(PipegradError, OSError):
    """Another process works in the folder of a run."""


class RunLock:
    """The lock of a run's folder. Rank 0 holds it from before it reads there until the run's end.

    The kernel releases it when this process ends, however it ends. It is a lock of the process: a
    worker of the data that outlives the process does not hold it, as it would with `fcntl.flock`.

    Args:
        folder: Of the run.

    Attributes:
        notes: That nothing is locked, if so.

    Raises:
        HeldError: If another process holds it. The message says which.
        OSError: If there can be no such file, or another user has put something in its place.
    """

    def __init__(self, folder: Path) -> None:
        self.notes: tuple[str, ...] = ()
        # A number, and no file object: what forgets this lock does not release it.
        self._file = run_files.open_to_change(folder / LOCK, os.O_RDWR)
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                raise HeldError(
                    f"{folder} is in use by {self._holder()}: two jobs cannot go on with one run: "
                    f"wait for its end, or end it"
                ) from error
            words = f"{folder} cannot be locked ({error.strerror}): start no other job with it"
            self.notes = (words,)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        os.ftruncate(self._file, 0)
        os.write(
            self._file, f"process {os.getpid()} on {socket.gethostname()} since {now}\n".encode()
        )

    def release(self) -> None:
        """Lets another process go on with the run."""
        os.close(self._file)

    def _holder(self) -> str:
        """Returns what the process that holds it has written, and closes the file."""
        written = os.read(self._file, 200).decode(errors="replace").strip()
        os.close(self._file)
        return written or "another process"


def names_of_launch() -> tuple[str, ...]:
    """Returns the names of this launch; none without torchrun. Every rank must call it."""
    return tuple(sorted({name for name in agree("the launch", launch_of) if name}))


def launch_of(environment: Mapping[str, str] = os.environ) -> str:
    """Returns what this rank knows of its launch by torchrun; "" without torchrun."""
    if "TORCHELASTIC_RUN_ID" not in environment:
        return ""
    return environment.get(LAUNCH) or process(os.getppid())


def process(number: int) -> str:
    """Returns a name of a process that no other process has, at any time on any machine."""
    # Process numbers come again, also in another container of this machine.
    return f"{socket.gethostname()} {number} {process_state(number)[1]}"


def read_manifest(run: Path) -> dict[str, Any] | None:
    """Returns the manifest in the folder of a run; None if it has none.

    Raises:
        ValueError: If it is not what a run has written. The message names the file.
    """
    path = run / MANIFEST
    try:
        found: Any = run_files.parsed_json(run_files.read(path))
        launches = found.get("launches", [])
        if not all(isinstance(launch, dict) for launch in launches):
            raise TypeError("a launch in it is no table")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is not what a run has written: {in_words(error)}: restore it, or remove it "
            f"and name the run's folder as train.resume"
        ) from error
    return {**found, "launches": list(launches)}


def is_of_output(run: Path, output: Path) -> bool:
    """Returns whether a run was made with this ``train.output``. The run is beside it, or there.

    Raises:
        ValueError: If its manifest is not what a run has written.
    """
    manifest = read_manifest(run)
    if manifest is None:  # somebody has put checkpoints there
        return run.name == output.name
    try:
        configured = path_of(manifest["config"]["train"]["output"])
    except (LookupError, TypeError) as error:
        raise ValueError(
            f"{run / MANIFEST} does not say which train.output it is of: name the run's folder as "
            f"train.resume"
        ) from error
    # The rest of the path depends on the working directory.
    return configured.name in (output.name, output.resolve().name)


def is_of_launch(run: Path, launch: Sequence[str]) -> bool:
    """Returns whether another process of this launch worked in the folder of a run at last.

    Args:
        run: The folder.
        launch: The names of this launch.
    """
    try:
        manifest = read_manifest(run) or {}
    except ValueError:
        return False
    last = manifest.get("launches", [])[-1:]
    names = last[0].get("launch") if last else None
    # A process may make several runs. They are not restarts of each other.
    is_own = bool(last) and last[0].get("process") == process(os.getpid())
    return isinstance(names, list) and not is_own and any(name in launch for name in names)


def locked_origin(
    config: Config, launch: Sequence[str]
) -> tuple[Path | None, Path | None, RunLock | None]:
    """Returns what `find_origin` does, and the lock of the folder that the run goes on in.

    Raises:
        ConfigError: As `find_origin`, or if another process works in this folder.
    """
    folder, checkpoint = find_origin(config, launch)
    if folder is None:
        return folder, checkpoint, None
    try:
        lock = RunLock(folder)
    except OSError as error:
        config.refuse("train.resume", str(error), cause=error)
    # Until it was locked, another job may have written there.
    return *find_origin(config, launch), lock


def find_origin(config: Config, launch: Sequence[str]) -> Origin:
    """Returns where a run goes on from; see [Note: what a run goes on from].

    One rank decides for all, since a folder may change at any time.

    Args:
        config: The configuration.
        launch: The names of this launch.

    Raises:
        ConfigError: If what ``train.resume`` names is not there, or another user has put it there.
    """
    try:
        configured = _configured(config)
        runs = [run for run in _runs(path_of(config.train.output)) if run_files.is_own(run)]
        runs += [configured[0]] if configured[0] else []
        own = [run for run in runs if is_of_launch(run, launch)]
        if not own:
            return configured
        run = max(own, key=lambda run: (run / MANIFEST).stat().st_mtime_ns)
        # A run that was ended before its first checkpoint starts again as it was configured.
        return run, newest_checkpoint(run) or configured[1]
    except (ValueError, run_files.PlantedError) as error:  # of a manifest, or of a checkpoint
        config.refuse("train.resume", str(error), cause=error)


def _configured(config: Config) -> Origin:
    """Returns what ``train.resume`` names."""
    if config.train.resume is None:
        return None, None
    if config.train.resume == AUTO:
        return _newest_run(path_of(config.train.output))
    folder = path_of(config.train.resume)
    if not _is_run(folder):
        return None, folder
    read_manifest(folder)
    if (newest := newest_checkpoint(folder)) is None:
        raise ValueError("is the folder of a run that has no whole checkpoint")
    return folder, newest


def _newest_run(output: Path) -> Origin:
    """Returns the newest run of a ``train.output``."""
    runs = [run for run in _runs(output) if checkpoints(run)]
    own = [run for run in runs if run_files.is_own(run) and is_of_output(run, output)]
    if own:
        run = max(own, key=lambda run: checkpoints(run)[0].stat().st_mtime_ns)
        return run, newest_checkpoint(run)
    for run in runs:
        if not run_files.is_own(run) and is_of_output(run, output):
            raise ValueError(
                f"{run} is a run of another user: name its folder as train.resume to go on with "
                f"it, or choose another train.output"
            )
    return None, None


def _is_run(folder: Path) -> bool:
    """True if this is the folder of a run, not of a checkpoint."""
    with suppress(OSError, ValueError):  # a path that is none is refused as a checkpoint
        if step_of(folder) is None and not (folder / INDEX).exists():
            return (folder / MANIFEST).exists() or bool(checkpoints(folder))
    return False


def _runs(output: Path) -> list[Path]:
    """Returns the folders that runs with this ``train.output`` have made."""
    with suppress(OSError, ValueError):  # a path that is none is refused when the folder is made
        whole = output.resolve()
        numbered = re.compile(rf"{re.escape(whole.name)}-\d+")
        siblings = [f for f in whole.parent.iterdir() if numbered.fullmatch(f.name)]
        # As the user wrote it, for messages.
        runs = [output, *(output.parent / folder.name for folder in siblings)]
        return [run for run in runs if run.is_dir()]
    return []


def with_launch(
    folder: Path,
    manifest: Mapping[str, Any],
    *,
    launch: Sequence[str],
    first_step: int,
    checkpoint: Path | None,
) -> dict[str, Any]:
    """Returns the manifest of a run, with a note of this launch.

    Args:
        folder: Of the run. If it has a manifest, that one is kept.
        manifest: Of a new run.
        launch: The names of this launch.
        first_step: The first step that this launch makes.
        checkpoint: What it goes on from, if anything.

    Raises:
        ValueError: If the manifest in the folder is not what a run has written.
    """
    found = read_manifest(folder) or {**manifest, "launches": []}
    note = {
        "launch": list(launch),
        "process": process(os.getpid()),
        "started": datetime.now(UTC).isoformat(),
        "first_step": first_step,
        "checkpoint": None if checkpoint is None else str(checkpoint),
    }
    return {**found, "launches": [*found["launches"], note]}


def make_run_folder(config: Config, begin: Callable[[Path], None]) -> str:
    """Makes the folder ``train.output``, with a number behind it if it exists already.

    Args:
        config: The configuration.
        begin: Called with the folder, to open the files of the run.

    Returns:
        The path of the folder.

    Raises:
        ConfigError: If the folder cannot be made, or `begin` fails.
    """
    output, number = path_of(config.train.output), 1
    # Runs that start at the same time try the same names. `mkdir` fails for all but one of them,
    # and the others try the next number.
    while True:
        folder = output
        try:
            _refuse_above(config, output)
            if number > 1:
                folder = folder.parent / f"{folder.resolve().name}-{number}"
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
        except (OSError, ValueError) as error:
            config.refuse("train.output", f"cannot be written: {reason(error)}", cause=error)
        else:
            _begin(config, folder, begin)
            return str(folder)


def _refuse_above(config: Config, output: Path) -> None:
    working = Path.cwd()
    if output.resolve() in (working, *working.parents):
        config.refuse(
            "train.output",
            f"is {output.resolve()}, which holds more than a run: name a folder that "
            f"is not there yet, as in 'runs/run'",
        )


def _begin(config: Config, folder: Path, begin: Callable[[Path], None]) -> None:
    """Opens the files of a new run. If that fails, the run leaves no folder."""
    try:
        begin(folder)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError | ValueError) and not isinstance(error, ConfigError):
            config.refuse("train.output", f"cannot be written: {reason(error)}", cause=error)
        raise


def continue_run_folder(
    config: Config,
    folder: Path,
    step: int,
    begin: Callable[[Path], None],
) -> str:
    """Prepares the folder of a run that goes on after a step; returns its path.

    Removes what the run did after this step: rows of its metrics, and unfinished checkpoints. The
    reports of a failure move into a folder of their own.

    Args:
        config: The configuration.
        folder: Of the run.
        step: The last one that it has made.
        begin: Called with the folder, to open the files of the run.

    Raises:
        ConfigError: If the folder cannot be written, or `begin` fails.
    """
    try:
        remove_unfinished(folder)
        run_files.remove_temporary(folder)
        _move_reports(folder)
        cut_rows(folder / METRICS, step)
        begin(folder)
    except (OSError, ValueError) as error:
        config.refuse("train.output", f"{folder} cannot be written: {reason(error)}", cause=error)
    return str(folder)


def _move_reports(folder: Path) -> None:
    """Moves the reports of a failure away, since this launch has not failed."""
    if reports := sorted(folder.glob("failure*.txt")):
        launches = (read_manifest(folder) or {}).get("launches", [])
        away = folder / f"failures-of-launch-{len(launches)}"
        run_files.make_folder(away)
        for report in reports:
            report.replace(away / report.name)


def cut_rows(path: Path, step: int) -> None:
    """Removes the rows of later steps from a file of metrics, and a row that is not whole.

    Rows are in the order of steps. So it looks from the end, at no more than what it removes.
    """
    if not os.path.lexists(path):
        return
    number = run_files.open_to_change(path, os.O_RDWR)
    with os.fdopen(number, "r+b") as file:
        if (size := os.fstat(number).st_size) == 0:  # of which there is no map
            return
        with mmap.mmap(number, size, access=mmap.ACCESS_READ) as content:
            end = content.rfind(b"\n") + 1
            while end > 0:
                begin = content.rfind(b"\n", 0, end - 1) + 1
                if _is_row(content[begin:end], step):
                    break
                end = begin
        file.truncate(end)


def _is_row(line: bytes, step: int) -> bool:
    """Whether a line is the row of a step, or of one before it."""
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        return bool(json.loads(line)["step"] <= step)
    return False


def refuse_unseen(config: Config, folder: Path, *, is_new: bool) -> None:
    """Refuses the folder of a run that some rank does not see; every rank must call it.

    Args:
        config: The configuration.
        folder: The folder.
        is_new: Whether this run has made it. Then it is removed if it is refused.

    Raises:
        ConfigError: If a rank does not see it; on all ranks.
    """

    # A rank of another machine may have a folder of this name on a disk of its own. The manifest
    # says when it was written, so it is another one there.
    def digest() -> str:
        return _digest(folder) if dist.get_rank() == 0 else ""

    expected = agree("the manifest of the run", digest)[0]
    replies = agree("the folder of the run", lambda: (_sees(folder, expected), _machine()))
    blind = {rank: machine for rank, (sees, machine) in enumerate(replies) if not sees}
    if blind:
        if is_new and dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
        machines = sorted(set(blind.values()))
        config.refuse(
            "train.output",
            f"ranks {sorted(blind)} on {', '.join(machines)} do not see {folder}, which rank 0 on "
            f"{replies[0][1]} has made, and each rank writes a part of each checkpoint: choose a "
            f"folder that all machines share, or set train.save = false",
        )


def _sees(folder: Path, expected: str) -> bool:
    # A network file system may show a new file late.
    deadline = time.monotonic() + _SEEN_SECONDS
    while (found := _digest(folder)) != expected and time.monotonic() < deadline:
        time.sleep(0.1)
    return found == expected


def _digest(folder: Path) -> str:
    with suppress(OSError):
        path = folder / MANIFEST
        return hashlib.sha256(run_files.read(path)).hexdigest()
    return ""


def _machine() -> str:
    return f"{socket.gethostname()} in {Path.cwd()}"
