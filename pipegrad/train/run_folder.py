"""The folder of a run: its lock, its metrics, and the checkpoint that a run goes on from.

A new run has a new folder, because no run may overwrite another. One job at a time works in it.
``manifest.json`` describes the run.

[Note: what a run goes on from]
1. ``train.resume`` names a checkpoint: a new run begins with its values.
2. It names the folder of a run: this run goes on in this folder, from its newest checkpoint.
3. It is "auto": as 2, with the folder ``train.output`` itself. A new run begins there if it does
   not exist, and again if it has no checkpoint. For example, ranks that a launcher starts again go
   on.

The owner of a folder is not checked: see docs/trust.md. A link in it is not followed.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import socket
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

import torch.distributed as dist

from pipegrad import run_files
from pipegrad.checkpoint.folders import INDEX, find_checkpoint, remove_unfinished
from pipegrad.comm.agreement import agree
from pipegrad.errors import CheckpointError, PipegradError, reason
from pipegrad.train.config import Config, path_of

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

    Raises:
        HeldError: If another process holds it. The message names the process.
        OSError: If there can be no such file, or an entry of another kind has its name.
    """

    def __init__(self, folder: Path) -> None:
        # A number and no file object, because dropping this object must not release the lock.
        self._file = run_files.open_to_change(folder / LOCK, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                holder = os.read(self._file, 200).decode(errors="replace").strip()
                self.release()
                raise HeldError(
                    f"{folder} is in use by {holder or 'another process'}: two jobs cannot go on "
                    f"with one run: wait for its end, or end it"
                ) from error
            warnings.warn(
                f"{folder} cannot be locked ({error.strerror}): start no other job with it",
                stacklevel=2,
            )
        now = datetime.now(UTC).isoformat(timespec="seconds")
        os.ftruncate(self._file, 0)
        os.write(
            self._file, f"process {os.getpid()} on {socket.gethostname()} since {now}\n".encode()
        )

    def release(self) -> None:
        """Lets another process go on with the run."""
        os.close(self._file)


def locked_origin(config: Config) -> tuple[Path | None, Path | None, RunLock | None]:
    """Returns the result of `find_origin`, and the lock of the folder that the run goes on in.

    Raises:
        ConfigError: If `find_origin` raises it, or another process works in this folder.
    """
    folder, checkpoint = find_origin(config)
    if folder is None:
        return folder, checkpoint, None
    with config.refusing("train.resume", "", OSError, say=str):
        lock = RunLock(folder)
    # Look again, because another job may have written there before it was locked.
    return *find_origin(config), lock


def find_origin(config: Config) -> Origin:
    """Returns the folder and the checkpoint of a run; see [Note: what a run goes on from].

    One rank decides for all, because a folder may change at any time.

    Raises:
        ConfigError: If the checkpoint of ``train.resume`` cannot be read, or no run has made the
            folder ``train.output`` of "auto".
    """
    if config.train.resume is None:
        return None, None
    is_auto = config.train.resume == AUTO
    folder = path_of(config.train.output if is_auto else config.train.resume)
    if is_auto and not folder.is_dir():
        return None, None
    with config.refusing("train.resume", "", CheckpointError):
        found = find_checkpoint(folder)
    if found != folder:
        return folder, found
    if not is_auto:
        return None, folder
    if (folder / INDEX).exists() or not (folder / LOCK).exists():
        config.refuse("train.output", "is there, and no run has made it: name another folder")
    return folder, None  # the run has ended before its first checkpoint


def make_run_folder(config: Config, begin: Callable[[Path], None]) -> str:
    """Makes the folder ``train.output``, with a number at its end if it exists already.

    Args:
        config: The configuration.
        begin: Called with the folder, to open the files of the run.

    Returns:
        The path of the folder.

    Raises:
        ConfigError: If the folder cannot be made, or `begin` fails.
    """
    output = path_of(config.train.output)
    # Runs that start at the same time try the same names. `mkdir` fails for all but one of them,
    # and the others try the next number.
    folder, words, unwritten = output, "cannot be written: ", (OSError, ValueError)
    for number in count(1):
        with (
            config.refusing("train.output", words, *unwritten, say=reason),
            suppress(FileExistsError),
        ):
            whole = output.resolve()
            if whole in (Path.cwd(), *Path.cwd().parents):
                config.refuse(
                    "train.output",
                    f"is {whole}, which holds more than a run: name a folder that is not there "
                    f"yet, as in 'runs/run'",
                )
            folder = output if number == 1 else output.parent / f"{whole.name}-{number}"
            folder.mkdir(parents=True)
            break
    with ExitStack() as removed, config.refusing("train.output", words, *unwritten, say=reason):
        removed.callback(shutil.rmtree, folder, ignore_errors=True)
        begin(folder)
        removed.pop_all()
    return str(folder)


def continue_run_folder(
    config: Config,
    folder: Path,
    step: int,
    begin: Callable[[Path], None],
) -> str:
    """Prepares the folder of a run that goes on after a step; returns its path.

    Removes the rows of later steps from its metrics, and unfinished checkpoints.

    Args:
        config: The configuration.
        folder: The run's folder.
        step: The last step that the run has made.
        begin: Called with the folder, to open the files of the run.

    Raises:
        ConfigError: If the folder cannot be written, or `begin` fails.
    """
    words = f"{folder} cannot be written: "
    with config.refusing("train.output", words, OSError, ValueError, say=reason):
        remove_unfinished(folder)
        cut_rows(folder / METRICS, step)
        begin(folder)
    return str(folder)


def cut_rows(path: Path, step: int) -> None:
    """Removes the rows of later steps from a file of metrics, and a row that is not whole."""
    if not os.path.lexists(path):
        return
    end = position = 0
    with os.fdopen(run_files.open_to_change(path, os.O_RDWR), "r+b") as file:
        for line in file:
            position += len(line)
            with suppress(ValueError, TypeError, KeyError, RecursionError):
                if line.endswith(b"\n") and json.loads(line)["step"] <= step:
                    end = position
        file.truncate(end)


def refuse_unseen(config: Config, folder: Path, *, is_new: bool) -> None:
    """Refuses the folder of a run that some rank does not see; every rank must call it.

    Raises:
        ConfigError: If a rank does not see it; on all ranks.
    """

    # Compare the lock files, because a rank of another machine may have a folder of this name on a
    # disk of its own. There the lock has another process or another time.
    def holder() -> str:
        with suppress(OSError):
            return run_files.read(folder / LOCK).decode(errors="replace")
        return ""

    expected = agree("the lock of the run", holder)[0]

    def sees() -> tuple[bool, str]:
        # A network file system may show a new file late.
        deadline = time.monotonic() + _SEEN_SECONDS
        while (is_blind := holder() != expected) and time.monotonic() < deadline:
            time.sleep(0.1)
        return is_blind, f"{socket.gethostname()} in {Path.cwd()}"

    replies = agree("the folder of the run", sees)
    blind = {rank: machine for rank, (is_blind, machine) in enumerate(replies) if is_blind}
    if blind:
        if is_new and dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
        config.refuse(
            "train.output",
            f"ranks {sorted(blind)} on {', '.join(sorted({*blind.values()}))} do not see {folder}, "
            f"which rank 0 on {replies[0][1]} has made, and each rank writes a part of each "
            f"checkpoint: choose a folder that all machines share, or set train.save = false",
        )
