"""Checksums of a checkpoint: they show whether its bytes are still those that were written.

``checksums.json`` lies beside ``.metadata`` and is written after it. It has pipegrad's version, the
values of the run, and a CRC-32 of ``.metadata``, of each piece, and of itself. A piece is a tensor,
or the chunk of a tensor that a rank wrote. Pieces are identified by file and offset, so any cut can
verify them.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata as distributions
from itertools import groupby
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from pipegrad.errors import PipegradError
from pipegrad.train.checkpoint.folders import publish, unfinished
from pipegrad.train.checkpoint.writer.space import why_not_written

CHECKSUMS = "checksums.json"
METADATA = ".metadata"
STEP = "step"  # the key of how many steps a checkpoint has made
_OWN = "crc32"  # the key of the file's own
_CHUNK_BYTES = 16 * 2**20


class WriteError(PipegradError, OSError):
    """A rank cannot write its part of a checkpoint."""


class DamageError(PipegradError, ValueError):
    """The bytes of a checkpoint are not those that were written."""


class ReadError(PipegradError, OSError):
    """A file of a checkpoint cannot be read now, which says nothing of its bytes."""


@dataclass(frozen=True, order=True)
class Piece:
    """A tensor, or a chunk of it, in a file.

    Attributes:
        file: Name of the file in the folder.
        offset: Offset of its first byte.
        length: Number of its bytes.
        key: Key of the tensor, for messages.
        crc32: CRC-32 of its bytes.
    """

    file: str
    offset: int
    length: int
    key: str
    crc32: int


@dataclass(frozen=True)
class Checksums:
    """The content of ``checksums.json``.

    Attributes:
        pipegrad: The version that wrote it.
        run: Values of the run that wrote the checkpoint, by name, as text.
        metadata: CRC-32 of ``.metadata``.
        pieces: All pieces, by file and offset.
    """

    pipegrad: str
    run: Mapping[str, str]
    metadata: int
    pieces: Sequence[Piece]


class CheckedWriter(FileSystemWriter):
    """Writes a checkpoint and its checksums; see [Note: whole or not there].

    Args:
        folder: The folder of the checkpoint. It is there when everything is written.
        run: Values of the run, as text.
        error: Why this rank has nothing to write, if so. It fails the save of all ranks.
    """

    def __init__(
        self, folder: Path, run: Mapping[str, str], error: Exception | None = None
    ) -> None:
        super().__init__(unfinished(folder))
        self._error = error
        self._target, self._folder, self._run = folder, unfinished(folder), run

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Returns the plan of this rank.

        Raises:
            Exception: If this rank has nothing to write.
        """
        if self._error is not None:
            raise self._error
        return super().prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Removes what another run left there, on the coordinator; returns the plans."""
        # All ranks have made their local plan, and no rank writes before it has this one.
        for left in self._folder.iterdir():
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left)
            else:
                left.unlink()
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's pieces, and reads them back for their checksums.

        Raises:
            WriteError: If that fails. It has the free bytes that this rank sees.
        """
        # The file is read, not the tensor: so an error on the way to the disk is found as well.
        try:
            results = super().write_data(plan, planner).wait()
        except Exception as error:
            raise WriteError(why_not_written(self._folder, error)) from error
        checked: Future[list[WriteResult]] = Future()
        # The coordinator collects the storage data of all ranks. The checksums travel with it.
        checked.set_result(
            [replace(r, storage_data=(r.storage_data, self._crc(r))) for r in results]
        )
        return checked

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes ``.metadata``, then the checksums of all ranks, on the coordinator.

        torch tells all ranks if it fails. So the folder gets its name here, and not later.

        Raises:
            WriteError: If that fails.
        """
        try:
            self._finish(metadata, results)
        except OSError as error:
            raise WriteError(why_not_written(self._folder, error)) from error

    def _finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        every = [result for of_rank in results for result in of_rank]
        plain = [replace(result, storage_data=result.storage_data[0]) for result in every]
        super().finish(metadata, [plain])
        pieces = []
        for result in every:
            storage, crc = result.storage_data
            key = result.index.fqn
            pieces.append(Piece(storage.relative_path, storage.offset, storage.length, key, crc))
        checksums = Checksums(
            pipegrad=distributions.version("pipegrad"),
            run=self._run,
            metadata=zlib.crc32((self._folder / METADATA).read_bytes()),
            pieces=sorted(pieces),
        )
        # The file appears under its name only when it is whole and on the disk.
        partial = self._folder / f"{CHECKSUMS}.tmp"
        with partial.open("w", encoding="utf-8") as file:
            json.dump(sealed(asdict(checksums)), file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self._folder / CHECKSUMS)
        publish(self._target)

    def _crc(self, result: WriteResult) -> int:
        storage = result.storage_data
        with (self._folder / storage.relative_path).open("rb") as file:
            return _crc_of(file.fileno(), storage.offset, storage.length)


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of ``checksums.json`` with a CRC-32 of all of it."""
    own = {key: value for key, value in content.items() if key != _OWN}
    return {**own, _OWN: zlib.crc32(json.dumps(own, sort_keys=True).encode())}


def read_checksums(folder: Path) -> Checksums:
    """Returns the checksums of a checkpoint.

    Raises:
        DamageError: If the file is damaged, or the bytes of ``.metadata`` have changed.
        OSError: If a file is not there, or cannot be read.
    """
    try:
        content = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))
        if content != sealed(content):
            raise ValueError("other bytes than were written")
        del content[_OWN]
        pieces = [Piece(**piece) for piece in content.pop("pieces")]
        checksums = Checksums(**content, pieces=pieces)
        run = dict(checksums.run)
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise DamageError(f"{CHECKSUMS} is damaged") from error
    if zlib.crc32((folder / METADATA).read_bytes()) != checksums.metadata:
        raise DamageError(f"the bytes of {METADATA} are not those that were written")
    return replace(checksums, run=run)


def damaged(folder: Path, pieces: Iterable[Piece]) -> list[str]:
    """Returns messages about damaged pieces, at most one for each file.

    Raises:
        ReadError: If a file is there and cannot be read.
    """
    messages = []
    for file, inside in groupby(sorted(pieces), key=lambda piece: piece.file):
        if message := _damage(folder / file, list(inside)):
            messages.append(message)
    return messages


def _damage(path: Path, pieces: Sequence[Piece]) -> str:
    try:
        # Pieces are sorted by offset, so the file is read from its begin to its end.
        with path.open("rb") as file:
            whole = os.fstat(file.fileno()).st_size
            for piece in pieces:
                if piece.offset + piece.length > whole:
                    return f"{path.name} has {whole} bytes, and {piece.key!r} should follow"
                if _crc_of(file.fileno(), piece.offset, piece.length) != piece.crc32:
                    return f"{path.name} has other bytes in {piece.key!r} than were written"
    except FileNotFoundError:
        return f"there is no {path.name}"
    except OSError as error:
        raise ReadError(f"{path} cannot be read: {error.strerror}") from error
    return ""


def _crc_of(file: int, offset: int, length: int) -> int:
    """Returns the CRC-32 of some bytes of an open file."""
    # A piece may be larger than the memory that is free, so it is read in parts.
    crc = 0
    for begin in range(offset, offset + length, _CHUNK_BYTES):
        size = min(_CHUNK_BYTES, offset + length - begin)
        crc = zlib.crc32(os.pread(file, size, begin), crc)
    return crc
