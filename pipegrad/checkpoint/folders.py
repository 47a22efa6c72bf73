"""Folders: the names of checkpoints in the folder of a run.

[Note: whole or not there] A checkpoint is written into ``checkpoint-N.partial``. When all its files
are on the disk, one rank renames the folder to ``checkpoint-N``. A folder of this name is whole
even if the run was killed, because renaming is one operation of the file system. A run that
continues removes the unfinished folders.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from pipegrad import run_files
from pipegrad.errors import CheckpointError, reason

INDEX = "index.json"
UNFINISHED = ".partial"
_NAME = re.compile(r"checkpoint-(\d+)")


def unfinished(folder: Path) -> Path:
    """Returns the folder of a checkpoint before it is whole."""
    return folder.with_name(f"{folder.name}{UNFINISHED}")


def step_of(folder: Path) -> int | None:
    """Returns the step of a checkpoint by the name of its folder; None if it has another name."""
    match = _NAME.fullmatch(folder.name)
    return int(match[1]) if match else None


def checkpoints(run: Path) -> list[Path]:
    """Returns the checkpoints in a folder, the newest first."""
    if not run.is_dir():
        return []
    found = [(step, path) for path in run.iterdir() if (step := step_of(path)) is not None]
    return [path for _, path in sorted(found, reverse=True)]


def newest(run: str | Path) -> Path | None:
    """Returns the newest checkpoint in the folder of a run; None if there is none.

    If it is damaged, its reader raises an error, and no older one is read instead.

    Raises:
        OSError: If it is a link, or no folder.
    """
    found = next(iter(checkpoints(Path(run))), None)
    if found is not None:
        run_files.refuse_planted(found)
    return found


def find_checkpoint(path: Path) -> Path:
    """Returns the folder of a checkpoint; of a run's folder, its newest checkpoint.

    A folder that is neither is returned, too, because its reader raises the error.

    Raises:
        CheckpointError: If it cannot be read, or the newest one is a link.
    """
    try:
        found = None if (path / INDEX).exists() else newest(path)
    except run_files.PlantedError as error:
        raise CheckpointError(f"{error}, or give it as the checkpoint") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {reason(error)}") from error
    return found or path


def remove_unfinished(run: Path) -> None:
    """Removes what a killed process has begun to write into the folder of a run."""
    for path in (*run.glob(f"checkpoint-*{UNFINISHED}"), *run.glob(run_files.TEMPORARY)):
        run_files.remove(path)


def prune(run: Path, *, keep_last: int | None, keep_every: int | None) -> None:
    """Removes checkpoints, except the newest ones and one every `keep_every` steps."""
    for folder in checkpoints(run)[keep_last:] if keep_last else []:
        if keep_every is None or (step_of(folder) or 0) % keep_every:
            with suppress(OSError):  # a checkpoint too many ends no run
                _remove(folder)


def publish(folder: Path) -> None:
    """Gives a checkpoint its name, after all its files are on the disk.

    Raises:
        OSError: If that fails.
    """
    # A file is on the disk only if its name in the directory is, too.
    _sync_folder(unfinished(folder))
    if os.path.lexists(folder):
        _remove(folder)
    unfinished(folder).rename(folder)
    _sync_folder(folder.parent)


def _remove(folder: Path) -> None:
    # Rename it first, because a kill in the middle must not leave half of it under its name.
    away = unfinished(folder.with_name(f"{folder.name}.old"))
    run_files.remove(away)
    folder.rename(away)
    run_files.remove(away)


def _sync_folder(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
