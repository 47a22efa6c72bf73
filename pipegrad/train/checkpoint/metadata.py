"""Metadata: reads ``.metadata`` of a checkpoint, which is a pickle, as data.

torch reads this file with pickle, and a pickle may call any function. Here it is read by `Pickled`,
which calls nothing. Only then the classes of torch's own metadata are made, of values that were
checked. Tensors are read with ``weights_only``. torch would also read entries that are no tensors,
and without that; so a checkpoint with such entries is refused.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from pipegrad import run_files
from pipegrad.interop.private import class_of_storage
from pipegrad.train.checkpoint.checksums import METADATA, DamageError, FileSystem
from pipegrad.train.checkpoint.pickled import Name, Pickled, Record

T = TypeVar("T")
_StorageInfo: Any = class_of_storage()
_METADATA = "torch.distributed.checkpoint.metadata."
_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
_SIZE, _LAYOUT = "torch.Size", "torch.serialization._get_layout"
_FORMAT = f"{_METADATA}_MEM_FORMAT_ENCODING"
_DTYPES = {f"torch.{k}": v for k, v in vars(torch).items() if isinstance(v, torch.dtype)}
_LAYOUTS = {str(v): v for v in vars(torch).values() if isinstance(v, torch.layout)}
_MOST_DIMENSIONS = 64  # as numpy
_FORMATS = (torch.contiguous_format, torch.channels_last, torch.preserve_format)
_NAMES = {
    *_DTYPES,
    *(
        f"{_METADATA}{name}"
        for name in (
            "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex",
            "StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
        )
    ),
    _INFO,
    _SIZE,
    _LAYOUT,
    # Of the path where it was written. Python 3.13 names the class by another module.
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
}  # fmt: skip


def read_pickled_metadata(path: Path) -> Metadata:
    """Returns the content of ``.metadata``. Reading executes nothing.

    Raises:
        DamageError: If it is not the metadata of a checkpoint of tensors.
        OSError: If the file cannot be read.
    """
    try:
        found = Pickled(run_files.read(path), _NAMES).read()
    except LookupError as error:
        name = ascii(error.args[0])[1:-1]
        raise DamageError(
            f"{METADATA} names {name:.200}, which no checkpoint needs, and to read it would "
            f"execute it"
        ) from error
    except ValueError as error:
        raise DamageError(f"{METADATA} cannot be read: {error}") from error
    try:
        fields = _fields(found, "Metadata", "state_dict_metadata", "storage_data")
        tensors = {_text(k): v for k, v in _typed(fields["state_dict_metadata"], dict).items()}
        stored = _typed(fields["storage_data"], dict)
        if others := [key for key, v in tensors.items() if _is(v, "BytesStorageMetadata")]:
            raise DamageError(f"its {others[0]!r:.200} is no tensor: another program wrote it")
        chunks = [_typed(_tensor_fields(value)["chunks"], list) for value in tensors.values()]
        # One list may be that of many tensors.
        if sum(map(len, chunks)) > len(stored):
            raise ValueError("chunks that are nowhere")
        metadata = Metadata(
            state_dict_metadata={key: _tensor(value) for key, value in tensors.items()},
            storage_data={_index(key): _info(value) for key, value in stored.items()},
            storage_meta=StorageMeta(),
        )
    except (TypeError, ValueError, LookupError) as error:
        if isinstance(error, DamageError):
            raise
        raise DamageError(f"{METADATA} is not the metadata of a checkpoint") from error
    _refuse_larger_tensors(metadata)
    return metadata


def _refuse_larger_tensors(metadata: Metadata) -> None:
    """Refuses tensors that have more bytes than their pieces: nobody could read them."""
    num_bytes = Counter[str]()
    for index, info in metadata.storage_data.items():
        num_bytes[index.fqn] += info.length
    for key, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata)
        whole = math.prod(tensor.size) * tensor.properties.dtype.itemsize
        if whole > num_bytes[key]:
            raise DamageError(
                f"{METADATA} says that {key!r:.200} has {whole} bytes, and its pieces have "
                f"{num_bytes[key]}"
            )


# Each of these makes one object of torch of what the pickle has. All of them raise a TypeError,
# ValueError or LookupError if it has something else. Nothing shows a value: it may be endless.


def _tensor(value: object) -> TensorStorageMetadata:
    fields = _tensor_fields(value)
    chunks = [_chunk(chunk) for chunk in _typed(fields["chunks"], list)]
    return TensorStorageMetadata(_properties(fields["properties"]), _size(fields["size"]), chunks)


def _tensor_fields(value: object) -> dict[str, object]:
    return _fields(value, "TensorStorageMetadata", "properties", "size", "chunks")


def _properties(value: object) -> TensorProperties:
    state = _typed(_record(value, f"{_METADATA}TensorProperties").state, tuple)
    dtype, layout, requires_grad, memory_format, pin_memory = state
    [layout_name] = _record(layout, _LAYOUT).arguments
    [number] = _record(memory_format, _FORMAT).arguments
    return TensorProperties(
        dtype=_DTYPES[_typed(dtype, Name)],
        layout=_LAYOUTS[_text(layout_name)],
        requires_grad=_typed(requires_grad, bool),
        memory_format=_FORMATS[_count(number)],
        pin_memory=_typed(pin_memory, bool),
    )


def _chunk(value: object) -> ChunkStorageMetadata:
    fields = _fields(value, "ChunkStorageMetadata", "offsets", "sizes")
    return ChunkStorageMetadata(_size(fields["offsets"]), _size(fields["sizes"]))


def _index(value: object) -> MetadataIndex:
    fields = _fields(value, "MetadataIndex", "fqn")
    offset, index = fields.get("offset"), fields.get("index")
    return MetadataIndex(
        _text(fields["fqn"]),
        None if offset is None else _size(offset),
        None if index is None else _count(index),
    )


def _info(value: object) -> Any:  # noqa: ANN401 - a private class
    fields = _state(value, _INFO)
    # It names functions that change the bytes.
    if fields.get("transform_descriptors") is not None:
        raise ValueError("bytes that another program has changed")
    name = _text(fields["relative_path"])
    # A file of the folder, and no path to anywhere else.
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise DamageError(f"{METADATA} names the file {name!r:.200}, outside of it")
    return _StorageInfo(name, _count(fields["offset"]), _count(fields["length"]))


def _size(value: object) -> torch.Size:
    [sizes] = _record(value, _SIZE).arguments
    counts = [_count(size) for size in _typed(sizes, tuple)[: _MOST_DIMENSIONS + 1]]
    if len(counts) > _MOST_DIMENSIONS:
        raise ValueError("too many dimensions")
    return torch.Size(counts)


def _count(value: object) -> int:
    if (count := _typed(value, int)) < 0:
        raise ValueError("less than nothing")
    return count


def _text(value: object) -> str:
    return _typed(value, str)


def _fields(value: object, kind: str, *names: str) -> dict[str, object]:
    fields = _state(value, f"{_METADATA}{kind}")
    if missing := [name for name in names if name not in fields]:
        raise LookupError(missing)
    return fields


def _state(value: object, kind: str) -> dict[str, object]:
    return _typed(_record(value, kind).state, dict)


def _is(value: object, kind: str) -> bool:
    return type(value) is Record and value.kind == f"{_METADATA}{kind}"


def _record(value: object, kind: str) -> Record:
    record = _typed(value, Record)
    if record.kind != kind:
        raise TypeError("another class")
    return record


def _typed(value: object, kind: type[T]) -> T:
    if type(value) is not kind:
        raise TypeError(f"{type(value).__name__} in the place of {kind.__name__}")
    return value


class CheckpointReader(FileSystemReader):
    """Reads a checkpoint. Use it in the place of torch's, which executes what ``.metadata`` says.

    Args:
        folder: The folder of the checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.fs = FileSystem()
        self._folder = folder

    def read_metadata(self, *_: object, **__: object) -> Metadata:
        found = read_pickled_metadata(self._folder / METADATA)
        # As torch's own does.
        assert found.storage_meta is not None
        found.storage_meta.load_id = self.load_id
        return found
