"""Space: says early that the checkpoints of a run will not fit, and why a file was not written."""

from __future__ import annotations

import errno
import shutil
import tempfile
from pathlib import Path

from pipegrad.errors import in_words

_FULL = {errno.ENOSPC, errno.EDQUOT}
_TRIED_BYTES = 2**20


def shortage(folder: Path, nbytes: int, number: int = 1) -> str:
    """Returns a warning if so many checkpoints do not fit on the disk of a folder; else "".

    Args:
        folder: Of the run.
        nbytes: Of one checkpoint, about.
        number: How many of them there will be.
    """
    free = free_bytes(folder)
    if free is None or nbytes * number <= free:
        return ""
    what = "a checkpoint" if number == 1 else f"{number} checkpoints"
    return (
        f"{what} of about {nbytes:,} bytes will not fit into {folder}: {free:,} bytes are free "
        f"there: make room, or set train.keep_last lower or train.save_every higher"
    )


def size_of(checkpoint: Path) -> int:
    """Returns the bytes of a checkpoint that is there; 0 if it is removed meanwhile."""
    try:
        return sum(file.stat().st_size for file in checkpoint.iterdir())
    except OSError:
        return 0


def why_not_written(folder: Path, error: BaseException) -> str:
    """Returns in words why a file cannot be written into a folder; if the disk is full, advice.

    Call it before what was written there is removed.
    """
    cause: BaseException | None = error
    while cause is not None and getattr(cause, "errno", None) is None:
        cause = cause.__cause__
    # torch and safetensors write by themselves, and say only that it has failed. So a write of
    # Python's own finds out why.
    cause = cause or _tried(folder)
    words = in_words(error) if cause is None else str(getattr(cause, "strerror", None) or cause)
    free = free_bytes(folder)
    room = "" if free is None else f"; {free:,} bytes are free there"
    if getattr(cause, "errno", None) in _FULL:
        return f"the disk is full ({words}{room}): make room"
    return f"{words}{room}"


def _tried(folder: Path) -> OSError | None:
    """Returns why a new file cannot be written into a folder; None if it can."""
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            left = _TRIED_BYTES
            while left:
                left -= file.write(bytes(left))
    except OSError as error:
        return error
    return None


def free_bytes(folder: Path) -> int | None:
    """Returns the free bytes of a folder's disk; None if they are not known."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None
