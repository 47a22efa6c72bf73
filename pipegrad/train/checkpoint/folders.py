"""Folders: the checkpoints in the folder of a run, whole and unfinished ones.

[Note: whole or not there] A checkpoint is written into ``checkpoint-N.partial``. When all its files
are on the disk, one rank renames the folder to ``checkpoint-N``, which is one operation of the file
system. So a folder of this name was whole, whenever the run was killed. Whoever goes on with the
run removes what has another end.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from pipegrad import run_files

_NAME = re.compile(r"checkpoint-(\d+)")
_UNFINISHED = ".partial"
_DAMAGED = ".damaged"


def checkpoint_folder(run: Path, step: int) -> Path:
    """Returns the folder of the checkpoint after a step."""
    return run / f"checkpoint-{step}"


def unfinished(folder: Path) -> Path:
    """Returns where a checkpoint is written before it is whole."""
    return folder.with_name(f"{folder.name}{_UNFINISHED}")


def is_unfinished(folder: Path) -> bool:
    """True if this is the folder of a checkpoint that was not finished."""
    return folder.name.endswith(_UNFINISHED)


def step_of(folder: Path) -> int | None:
    """Returns the step of a checkpoint by the name of its folder; None if it has another name."""
    match = _NAME.fullmatch(folder.name)
    return int(match[1]) if match else None


def checkpoints(run: Path) -> list[Path]:
    """Returns the checkpoints in a folder, the newest first."""
    if not run.is_dir():
        return []
    steps = {step: path for path in run.iterdir() if (step := step_of(path)) is not None}
    return [steps[step] for step in sorted(steps, reverse=True)]


def publish(folder: Path) -> None:
    """Gives a checkpoint its name, after all its files are on the disk.

    Raises:
        OSError: If that fails.
    """
    written = unfinished(folder)
    # A file is on the disk only if its name in the directory is, too.
    sync_folder(written)
    if os.path.lexists(folder):
        _remove(folder)
    written.rename(folder)
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Waits until the names in a directory are on the disk."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def remove_unfinished(run: Path) -> None:
    """Removes what was never finished, from the folder of a run."""
    for path in run.glob(f"checkpoint-*{_UNFINISHED}"):
        run_files.remove(path)


def put_aside(folder: Path) -> None:
    """Renames a damaged checkpoint, so that a whole one of this step can take its place."""
    number, target = 1, folder.with_name(f"{folder.name}{_DAMAGED}")
    while os.path.lexists(target):  # an earlier one: perhaps a part of it can be saved
        number += 1
        target = folder.with_name(f"{folder.name}{_DAMAGED}-{number}")
    folder.rename(target)


def prune(run: Path, *, keep_last: int, keep_every: int | None) -> None:
    """Removes checkpoints but the newest ones, and those of every so many steps."""
    for folder in checkpoints(run)[keep_last:]:
        step = step_of(folder)
        assert step is not None
        if keep_every is None or step % keep_every:
            with suppress(OSError):  # a checkpoint too many ends no run
                _remove(folder)


def _remove(folder: Path) -> None:
    # It loses its name first. Else a kill in the middle would leave half of it under this name.
    away = unfinished(folder.with_name(f"{folder.name}.old"))
    run_files.remove(away)
    folder.rename(away)
    run_files.remove(away)
