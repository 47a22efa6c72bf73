"""Storage: the folder of a checkpoint: how it is written, verified and read.

[Note: whole or not there] A checkpoint is written into ``checkpoint-N.partial``. When all its files
are on the disk, one rank renames the folder to ``checkpoint-N``, which is one operation of the file
system. So a folder of this name was whole, whenever the run was killed. Whoever goes on with the
run removes what has another end.

[Note: files of a checkpoint] ``__R_0.distcp`` has what rank R wrote, in the form of
torch.distributed.checkpoint. ``checkpoint.json`` says which tensors there are and where their
pieces lie, and has values of the run. ``checksums.json`` has a CRC-32 of each of the other files.
torch also writes ``.metadata``, for its own tools. It is a pickle, and to read a pickle may execute
anything. So pipegrad reads ``checkpoint.json`` in its place, and tensors with ``weights_only``.
"""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import metadata as distributions
from io import IOBase
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
from pydantic import BaseModel, Field, TypeAdapter
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from pipegrad import run_files
from pipegrad.errors import PipegradError, in_words, reason
from pipegrad.limits import MOST_NUMBER
from pipegrad.printable import printable

INDEX, CHECKSUMS, METADATA = "checkpoint.json", "checksums.json", ".metadata"
STEP = "step"  # the key of the number of steps before a checkpoint
_NAME = re.compile(r"checkpoint-(\d+)")
_UNFINISHED = ".partial"
_READ_BYTES = 16 * 2**20
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
_Count = Annotated[int, Field(ge=0, le=MOST_NUMBER)]
_checksums = TypeAdapter(dict[str, int])


class WriteError(PipegradError, OSError):
    """A rank cannot write its part of a checkpoint."""


class DamageError(PipegradError, ValueError):
    """A checkpoint cannot be read, or its bytes are not those that were written."""


# The folders of a run's checkpoints.


def checkpoint_folder(run: Path, step: int) -> Path:
    """Returns the folder of the checkpoint after a step."""
    return run / f"checkpoint-{step}"


def unfinished(folder: Path) -> Path:
    """Returns where a checkpoint is written before it is whole."""
    return folder.with_name(f"{folder.name}{_UNFINISHED}")


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


def newest_checkpoint(run: Path) -> Path | None:
    """Returns the newest checkpoint in the folder of a run; None if there is none.

    It may be damaged: then its reader refuses it. Nobody takes an older one in its place.

    Raises:
        PlantedError: If it is a link.
    """
    newest = next(iter(checkpoints(run)), None)
    if newest is not None:
        run_files.refuse_planted(newest)
    return newest


def remove_unfinished(run: Path) -> None:
    """Removes what was never finished, from the folder of a run."""
    for path in run.glob(f"checkpoint-*{_UNFINISHED}"):
        run_files.remove(path)


def prune(run: Path, *, keep_last: int, keep_every: int | None) -> None:
    """Removes checkpoints but the newest ones, and those of every so many steps."""
    for folder in checkpoints(run)[keep_last:]:
        step = step_of(folder)
        assert step is not None
        if keep_every is None or step % keep_every:
            with suppress(OSError):  # a checkpoint too many ends no run
                _remove(folder)


def publish(folder: Path) -> None:
    """Gives a checkpoint its name, after all its files are on the disk.

    Raises:
        OSError: If that fails.
    """
    written = unfinished(folder)
    # A file is on the disk only if its name in the directory is, too.
    _sync_folder(written)
    if os.path.lexists(folder):
        _remove(folder)
    written.rename(folder)
    _sync_folder(folder.parent)


def _remove(folder: Path) -> None:
    # It loses its name first. Else a kill in the middle would leave half of it under this name.
    away = unfinished(folder.with_name(f"{folder.name}.old"))
    run_files.remove(away)
    folder.rename(away)
    run_files.remove(away)


def _sync_folder(folder: Path) -> None:
    """Waits until the names in a directory are on the disk."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


# What is in ``checkpoint.json``. pydantic refuses values of other types, negative numbers, and a
# file that is a path to anywhere else.


class _Piece(NamedTuple):
    """A tensor, or a chunk of one, in a file. torch's reader asks for the last three."""

    offsets: list[_Count]
    sizes: list[_Count]
    relative_path: Annotated[str, Field(pattern=r"^__\d+_\d+\.distcp$")]
    offset: _Count
    length: _Count

    @property
    def transform_descriptors(self) -> None:
        """No extension of torch has changed the bytes."""


class _Tensor(BaseModel):
    dtype: str
    size: list[_Count]
    pieces: list[_Piece]


class _Index(BaseModel, strict=True):
    pipegrad: str  # the version that wrote it
    format: int = 1  # what a later version changes if this one would read it wrongly
    run: dict[str, str]
    tensors: dict[str, _Tensor]


@dataclass(frozen=True)
class Contents:
    """What a checkpoint has.

    Attributes:
        run: Values of the run that wrote it, by name, as text.
        metadata: Which tensors there are, and where.
        checksums: CRC-32 of each file, by its name.
    """

    run: Mapping[str, str]
    metadata: Metadata
    checksums: Mapping[str, int]

    @property
    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Shape and dtype of each tensor, by its key."""
        saved = self.metadata.state_dict_metadata
        return {k: v for k, v in saved.items() if isinstance(v, TensorStorageMetadata)}

    def empty(self, key: str) -> torch.Tensor:
        """Returns an empty tensor with the size and dtype of a saved one."""
        saved = self.tensors[key]
        return torch.empty(saved.size, dtype=saved.properties.dtype)


def read_contents(folder: Path) -> Contents:
    """Returns what a checkpoint has.

    Raises:
        DamageError: If the folder is not a whole checkpoint of this version, or what describes it
            is damaged or cannot be read. The message says all of that.
    """
    if "\0" in str(folder):
        raise DamageError("is no path: it has a null character")
    if folder.name.endswith(_UNFINISHED):
        raise DamageError("is not a whole checkpoint: the run that wrote it did not finish it")
    try:
        content, checksums = run_files.read(folder / INDEX), run_files.read(folder / CHECKSUMS)
    except FileNotFoundError as error:
        complaint = "there is no such folder, seen from the working directory"
        if folder.exists():
            complaint = (
                f"is not a whole checkpoint of this version of pipegrad: it has no "
                f"{Path(error.filename).name}: restore it, or name another checkpoint; "
                f"torch.distributed.checkpoint may read this one"
            )
        raise DamageError(complaint) from error
    except NotADirectoryError as error:
        complaint = f"{error.filename} cannot be read: {error.strerror}"
        raise DamageError(f"expected the folder of a checkpoint: {complaint}") from error
    except OSError as error:
        where = f"{error.filename} cannot be read: " if error.filename else ""
        raise DamageError(f"{where}{reason(error)}") from error
    return _parsed(content, checksums)


def _parsed(content: bytes, checksums: bytes) -> Contents:
    try:
        expected = _checksums.validate_json(checksums, strict=True)
    except ValueError as error:
        raise DamageError(damage_of([f"{CHECKSUMS} has other bytes than were written"])) from error
    # This is verified before it is believed. Other files are verified by all ranks together.
    if zlib.crc32(content) != expected.get(INDEX):
        raise DamageError(damage_of([f"{INDEX} has other bytes than were written"]))
    try:
        index = _Index.model_validate_json(content)
        metadata = _metadata_of(index)
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise DamageError(damage_of([f"{INDEX} is not what a run has written"])) from error
    if index.format != _Index.model_fields["format"].default:
        raise DamageError(
            f"has format {index.format}, which this version cannot read: take pipegrad "
            f"{printable(index.pipegrad)}, which wrote it"
        )
    if outside := [name for name in expected if Path(name).name != name or name == ".."]:
        raise DamageError(damage_of([f"{CHECKSUMS} names {printable(outside[0])!r}"]))
    files = {piece.relative_path for tensor in index.tensors.values() for piece in tensor.pieces}
    if missing := sorted(files - expected.keys()):
        raise DamageError(damage_of([f"{CHECKSUMS} has no checksum of {missing[0]}"]))
    return Contents(index.run, metadata, expected)


def _metadata_of(index: _Index) -> Metadata:
    """Returns what torch asks for.

    Raises:
        ValueError: If a tensor has more bytes than its pieces: nobody could read it.
        KeyError: If there is no such dtype.
    """
    tensors, stored = dict[str, TensorStorageMetadata](), dict[MetadataIndex, _Piece]()
    for key, saved in index.tensors.items():
        dtype = _DTYPES[saved.dtype]
        if math.prod(saved.size) * dtype.itemsize > sum(piece.length for piece in saved.pieces):
            raise ValueError(key)
        chunks = []
        for piece in saved.pieces:
            chunk = ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))
            chunks.append(chunk)
            stored[MetadataIndex(key, chunk.offsets)] = piece
        properties = TensorProperties(dtype=dtype)
        tensors[key] = TensorStorageMetadata(properties, torch.Size(saved.size), chunks)
    return Metadata(dict(tensors), storage_data=stored)


def _index_of(metadata: Metadata, run: Mapping[str, str]) -> _Index:
    """Returns what describes a checkpoint that torch has written."""
    tensors = dict[str, _Tensor]()
    for key, saved in metadata.state_dict_metadata.items():
        assert isinstance(saved, TensorStorageMetadata)
        pieces = []
        for chunk in saved.chunks:
            at = metadata.storage_data[MetadataIndex(key, chunk.offsets)]
            sizes = list(chunk.offsets), list(chunk.sizes)
            pieces.append(_Piece(*sizes, at.relative_path, at.offset, at.length))
        dtype = str(saved.properties.dtype).removeprefix("torch.")
        tensors[key] = _Tensor(dtype=dtype, size=list(saved.size), pieces=pieces)
    return _Index(pipegrad=distributions.version("pipegrad"), run=dict(run), tensors=tensors)


def damaged(folder: Path, checksums: Iterable[tuple[str, int]]) -> list[str]:
    """Returns a message about each file whose bytes are not those that were written."""
    messages = []
    for name, expected in checksums:
        try:
            if _checksum(folder / name) != expected:
                messages.append(f"{name} has other bytes than were written")
        except FileNotFoundError:
            messages.append(f"there is no {name}")
        except OSError as error:
            messages.append(f"{folder / name} cannot be read: {reason(error)}")
    return messages


def damage_of(messages: Sequence[str]) -> str:
    """Returns what is wrong with a checkpoint, with the first of some messages."""
    more = f" (and {len(messages) - 1} more)" if len(messages) > 1 else ""
    return f"is damaged: {messages[0]}{more}: restore the files, or go on from another checkpoint"


def _checksum(path: Path) -> int:
    """Returns the CRC-32 of a file, which may be larger than the memory that is free."""
    crc = 0
    with run_files.opened(path) as file:
        while part := file.read(_READ_BYTES):
            crc = zlib.crc32(part, crc)
    return crc


def failure_message(error: BaseException) -> str:
    """Returns why a save or a read failed: the message of the first rank that failed.

    Raises:
        KeyboardInterrupt: If that rank was interrupted.
    """
    if not isinstance(error, CheckpointException):
        return in_words(error)
    rank, (cause, _) = min(error.failures.items(), key=lambda failed: failed[0])
    if isinstance(cause, KeyboardInterrupt):
        raise cause from error
    return f"rank {rank}: {in_words(cause)}".partition("\\n")[0]  # torch's advice follows


class _FileSystem(filesystem.FileSystem):
    """Opens files for torch: new ones to write, regular ones to read, without links.

    See [Note: who may write there].
    """

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[IOBase]:
        opened = run_files.created if "w" in mode else run_files.opened
        with opened(Path(path)) as stream:
            yield stream

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        run_files.make_folder(Path(path))


class CheckpointReader(FileSystemReader):
    """Reads a checkpoint. Use it in the place of torch's, which executes what ``.metadata`` says.

    Args:
        folder: The folder of the checkpoint.
        contents: What `read_contents` has returned.
    """

    def __init__(self, folder: Path, contents: Contents) -> None:
        super().__init__(folder)
        self.fs = _FileSystem()
        self._contents = contents

    def read_metadata(self, *_: object, **__: object) -> Metadata:
        return self._contents.metadata


class CheckpointWriter(FileSystemWriter):
    """Writes a checkpoint; see [Note: whole or not there].

    Args:
        folder: The folder of the checkpoint. It is there when everything is written.
        run: Values of the run, as text.
        error: Why this rank has nothing to write, if so. It fails the save of all ranks.
    """

    def __init__(
        self, folder: Path, run: Mapping[str, str], error: Exception | None = None
    ) -> None:
        super().__init__(unfinished(folder))
        self.fs = _FileSystem()
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
        run_files.empty(self._folder)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's file, and reads it back for its checksum.

        Raises:
            WriteError: If that fails. It has the free bytes that this rank sees.
        """
        try:
            results = super().write_data(plan, planner).wait()
            pieces = [result.storage_data for result in results]
            files = {piece.relative_path for piece in pieces}
            crcs = {name: _checksum(self._folder / name) for name in files}
        except Exception as error:
            raise WriteError(run_files.why_not_written(self._folder, error)) from error
        # The coordinator collects the storage data of all ranks. The checksums travel with it.
        both = [(piece, crcs[piece.relative_path]) for piece in pieces]
        checked: Future[list[WriteResult]] = Future()
        checked.set_result(
            [replace(r, storage_data=data) for r, data in zip(results, both, strict=True)]
        )
        return checked

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Describes what all ranks have written, and gives the folder its name.

        Called on the coordinator. torch tells all ranks if it fails, and would not later.

        Raises:
            WriteError: If that fails.
        """
        every = [result for of_rank in results for result in of_rank]
        plain = [replace(result, storage_data=result.storage_data[0]) for result in every]
        checksums = {piece.relative_path: crc for piece, crc in (r.storage_data for r in every)}
        try:
            super().finish(metadata, [plain])
            index = _index_of(metadata, self._run).model_dump_json()
            run_files.replace(self._folder / INDEX, index.encode())
            for name in (METADATA, INDEX):
                checksums[name] = _checksum(self._folder / name)
            run_files.replace(self._folder / CHECKSUMS, json.dumps(checksums).encode())
            publish(self._target)
        except OSError as error:
            raise WriteError(run_files.why_not_written(self._folder, error)) from error
