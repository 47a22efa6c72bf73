"""Packed entries of a checkpoint are no larger than they are."""

from __future__ import annotations

import io
import zipfile
from typing import Any

import pytest
import torch

from pipegrad.train.checkpoint.packed import pack, unpack, unpack_entry
from pipegrad.train.checkpoint.storage import DamageError

STATE: dict[str, Any] = {"a": torch.arange(2**12), "b": [1, "text"]}


def test_a_state_comes_back() -> None:
    found = unpack(pack(STATE))
    assert torch.equal(found["a"], STATE["a"])
    assert found["b"] == STATE["b"]


def test_what_was_deflated_is_not_inflated() -> None:
    """Security, F6. 262 KB became 256 MiB."""
    packed, out = pack({"a": torch.zeros(2**20)}), io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(packed.numpy().tobytes())) as source,
        zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for entry in source.infolist():
            target.writestr(entry.filename, source.read(entry))
    small = torch.frombuffer(bytearray(out.getvalue()), dtype=torch.uint8)
    assert small.numel() < packed.numel() / 100
    with pytest.raises(DamageError, match=r"its 'x' cannot be read: .*are compressed"):
        unpack_entry("x", small)
