"""Validate: refuses a saved checkpoint that is damaged, or of another model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata

from pipegrad.errors import reason
from pipegrad.train.checkpoint.checksums import (
    CHECKSUMS,
    METADATA,
    Checksums,
    DamageError,
    ReadError,
    damaged,
    read_checksums,
)
from pipegrad.train.checkpoint.folders import is_unfinished
from pipegrad.train.checkpoint.metadata import read_pickled_metadata
from pipegrad.train.config import Config

_NAMES_SHOWN = 4  # names that a message lists


def read_metadata(folder: Path) -> tuple[Metadata, Checksums]:
    """Returns the metadata of a checkpoint, and its checksums.

    Raises:
        DamageError: If the folder is not a whole checkpoint, or a file is damaged. The message says
            all of that.
        ReadError: If a file is there and cannot be read.
    """
    if "\0" in str(folder):
        raise DamageError("is no path: it has a null character")
    if is_unfinished(folder):
        raise DamageError("is not a whole checkpoint: the run that wrote it did not finish it")
    # Checksums come first: they verify `.metadata`. Each error names what is wrong and what the
    # user can do.
    try:
        checksums = read_checksums(folder)
        metadata = read_pickled_metadata(folder / METADATA)
        _refuse_other_pieces(metadata, checksums)
        return metadata, checksums
    except DamageError as error:
        raise DamageError(damage_of([str(error)])) from error
    except FileNotFoundError as error:
        complaint = f"is not a whole checkpoint: it has no {METADATA}"
        if not folder.exists():
            complaint = "there is no such folder, seen from the working directory"
        elif (folder / METADATA).exists():
            complaint = (
                f"has no {CHECKSUMS}, so nobody knows whether its bytes are those that were "
                f"written: restore the file, or take another checkpoint; "
                f"torch.distributed.checkpoint reads without it"
            )
        raise DamageError(complaint) from error
    except NotADirectoryError as error:
        complaint = f"{error.filename} cannot be read: {error.strerror}"
        raise DamageError(f"expected the folder of a checkpoint: {complaint}") from error
    except OSError as error:
        where = f"{error.filename} cannot be read: " if error.filename else ""
        raise ReadError(f"{where}{reason(error)}") from error


def _refuse_other_pieces(metadata: Metadata, checksums: Checksums) -> None:
    """Refuses checksums that are not of all pieces: some bytes would not be verified."""
    stored = {(i.relative_path, i.offset, i.length) for i in metadata.storage_data.values()}
    if stored != {(piece.file, piece.offset, piece.length) for piece in checksums.pieces}:
        raise DamageError(f"{CHECKSUMS} is of another checkpoint")


def damage_of(messages: Sequence[str]) -> str:
    """Returns what is wrong with a checkpoint, with the first of some messages."""
    more = f" (and {len(messages) - 1} more)" if len(messages) > 1 else ""
    return f"is damaged: {messages[0]}{more}: restore the files, or go on from another checkpoint"


def verify(folder: Path, checksums: Checksums) -> list[str]:
    """Returns messages about damaged pieces, of this rank's share of all pieces.

    Raises:
        ReadError: If a file is there and cannot be read.
    """
    # Each rank reads every n-th piece, so all ranks together read the checkpoint once.
    return damaged(folder, checksums.pieces[dist.get_rank() :: dist.get_world_size()])


def check_names(config: Config, saved_keys: set[str], own_keys: set[str]) -> None:
    """Refuses a checkpoint with more or fewer parameters or buffers than the model.

    Raises:
        ConfigError: If names differ.
    """
    # Only names of the model are compared. Keys of the optimizer are checked with its own message.
    saved = {key for key in saved_keys if key.startswith("model.")}
    complaints = []
    if extra := saved - own_keys:
        complaints.append(f"the checkpoint holds {_listed(extra)}, which the model does not have")
    if missing := own_keys - saved:
        complaints.append(f"the model has {_listed(missing)}, which the checkpoint does not hold")
    if complaints:
        config.refuse(
            "train.resume",
            f"it is of another model: {'; '.join(complaints)}: choose the [model] of the run that "
            f"wrote it",
        )


def _listed(keys: set[str]) -> str:
    names = sorted(key.partition(".")[2] for key in keys)
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return f"{', '.join(map(repr, names[:_NAMES_SHOWN]))}{more}"
