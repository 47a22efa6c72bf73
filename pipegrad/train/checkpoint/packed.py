"""Packed: small state of any shape as one tensor of bytes in a checkpoint."""

from __future__ import annotations

import io
import zipfile
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from pipegrad.train.checkpoint.checksums import DamageError


def pack(state: dict[str, Any]) -> Tensor:
    """Returns a state as bytes, ``(numel,)`` of uint8.

    Raises:
        Exception: If it could not be read again: it is not of numbers, strings and CPU tensors.
    """
    file = io.BytesIO()
    torch.save(state, file)
    packed = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
    # It is read back at once, because an error at the next resume is too late.
    unpack(packed)
    return packed


def unpack(packed: Tensor) -> dict[str, Any]:
    """Returns a state from bytes. Reading executes nothing.

    Raises:
        Exception: If torch cannot read it.
    """
    file = io.BytesIO(packed.numpy().tobytes())
    # torch would also inflate what was deflated, to a thousand times its size, and read the same
    # bytes for many entries. It writes neither.
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
    is_stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
    if not is_stored or sum(entry.file_size for entry in entries) > packed.numel():
        raise ValueError("its entries are compressed, or share bytes: torch writes none so")
    file.seek(0)
    state: dict[str, Any] = torch.load(file, weights_only=True)
    return state


def unpack_entry(key: str, packed: Tensor) -> dict[str, Any]:
    """Returns the state of an entry of a checkpoint, as `unpack` does.

    Raises:
        DamageError: If torch cannot read it.
    """
    try:
        return unpack(packed)
    except Exception as error:
        raise DamageError(f"its {key!r} cannot be read: {error!r}".partition("\\n")[0]) from error


def empty_like_saved(key: str, metadata: Metadata) -> Tensor:
    """Returns an empty tensor with the size and dtype of a saved tensor."""
    saved = metadata.state_dict_metadata[key]
    assert isinstance(saved, TensorStorageMetadata)
    return torch.empty(saved.size, dtype=saved.properties.dtype)
