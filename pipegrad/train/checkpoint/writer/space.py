"""Space: says early that the checkpoints of a run will not fit on the disk."""

from __future__ import annotations

import shutil
from pathlib import Path


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


def free_space(folder: Path) -> str:
    """Returns the free bytes of a folder's disk as text; "" if they are not known."""
    free = free_bytes(folder)
    return "" if free is None else f"; {free:,} bytes are free there"


def free_bytes(folder: Path) -> int | None:
    """Returns the free bytes of a folder's disk; None if they are not known."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None
