"""Metadata: reads ``.metadata`` of a checkpoint, which is a pickle, and executes nothing.

torch reads this file with pickle, and a pickle may call any function. Here only the classes of
torch's own metadata are known, and everything else is refused. Tensors are read with
``weights_only``. torch would also read entries that are no tensors, and without that; so a
checkpoint with such entries is refused.
"""

from __future__ import annotations

import pickle
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)

from pipegrad.interop.private import pickled_in_checkpoints
from pipegrad.printable import printable, shortened
from pipegrad.train.checkpoint.checksums import METADATA, DamageError

if TYPE_CHECKING:
    from typing_extensions import TypeIs

_STORAGE_INFO, _layout_of_name = pickled_in_checkpoints()
_KNOWN: dict[tuple[str, str], Any] = {
    **{
        ("torch.distributed.checkpoint.metadata", name): getattr(metadata, name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    },
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _STORAGE_INFO,
    (
        "torch.serialization",
        "_get_layout",
    ): _layout_of_name,  # by its name
    ("torch", "Size"): torch.Size,
    # A path is only text here. Python 3.13 names the class by another module.
    ("pathlib", "PosixPath"): PurePosixPath,
    ("pathlib._local", "PosixPath"): PurePosixPath,
}


class _Unpickler(pickle.Unpickler):
    """Knows the classes of torch's metadata, and the dtypes of torch."""

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 - as pickle's
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        shown = printable(shortened(f"{module}.{name}"))
        raise DamageError(
            f"{METADATA} names {shown}, which no checkpoint needs, and to read it would execute it"
        )


def read_pickled_metadata(path: Path) -> Metadata:
    """Returns the content of ``.metadata``. Reading executes nothing.

    Raises:
        DamageError: If it is not the metadata of a checkpoint of tensors.
        OSError: If the file cannot be read.
    """
    with path.open("rb") as file:
        try:
            found: object = _Unpickler(file).load()
        except (DamageError, OSError):
            raise
        except Exception as error:  # whatever pickle says of a damaged file
            said = printable(shortened(repr(error), 200))
            raise DamageError(f"{METADATA} cannot be read: {said}") from error
    if not _is_metadata(found):
        raise DamageError(f"{METADATA} is not the metadata of a checkpoint")
    others = [
        key for key, value in found.state_dict_metadata.items()
        if not isinstance(value, TensorStorageMetadata)
    ]  # fmt: skip
    if others:
        raise DamageError(f"its {others[0]!r} is no tensor: another program wrote it")
    for info in found.storage_data.values():
        # A file of the folder, and no path to anywhere else.
        if Path(info.relative_path).name != info.relative_path:
            raise DamageError(f"{METADATA} names the file {info.relative_path!r}, outside of it")
    return found


def _is_metadata(found: object) -> TypeIs[Metadata]:
    """True if the parts that are used are of the types that they should be."""
    return (
        isinstance(found, Metadata)
        and _is_dict_of(getattr(found, "state_dict_metadata", None), str, object)
        and _is_dict_of(getattr(found, "storage_data", None), MetadataIndex, _STORAGE_INFO)
    )


def _is_dict_of(found: object, key: type, value: type) -> bool:
    return isinstance(found, dict) and all(
        isinstance(k, key) and isinstance(v, value) for k, v in found.items()
    )


class CheckpointReader(FileSystemReader):
    """Reads a checkpoint. Use it in the place of torch's, which executes what ``.metadata`` says.

    Args:
        folder: The folder of the checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder

    def read_metadata(self, *_: object, **__: object) -> Metadata:
        found = read_pickled_metadata(self._folder / METADATA)
        # As torch's own does.
        found.storage_meta = found.storage_meta or StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found
