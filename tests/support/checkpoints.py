"""Checkpoints that a test writes, reads and changes in one process."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from pipegrad.checkpoint.files import Files, Index, write
from pipegrad.checkpoint.folders import INDEX, publish, unfinished
from pipegrad.checkpoint.saving import write_checkpoint
from pipegrad.checkpoint.state import Place
from pipegrad.comm.sync_points import Done

RANK_0 = "rank-0.safetensors"
HEAD: dict[str, Any] = {"step": 7, "layout": [("pp", 1)], "run": {}, "tied": {}}


def written(folder: Path, tensors: Mapping[str, Tensor], **head: Any) -> Path:
    """Writes a checkpoint of whole tensors; returns its folder."""
    partial = unfinished(folder)
    partial.mkdir(parents=True)
    file, begins = write(partial / RANK_0, tensors)
    rows: Any = {
        key: {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": tuple(tensor.shape),
            "slices": [(Place.whole(tensor.shape).part(tensor).range, RANK_0, begins[key])],
        }
        for key, tensor in tensors.items()
    }
    index = Index(**{**HEAD, **head}, files={RANK_0: file}, tensors=rows)
    (partial / INDEX).write_bytes(index.sealed())
    publish(folder)
    return folder


class Alone:
    """A group of one rank."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1

    def allgather(self, rows: list[list[Tensor]], own: list[Tensor]) -> Done:
        rows[0][0].copy_(own[0])
        return Done()


def save_together(folder: Path, tensors: Mapping[str, Tensor], **head: Any) -> None:
    """Writes a checkpoint as the only rank of a group."""
    parts = {key: Place.whole(t.shape).part(t) for key, t in tensors.items()}
    group = cast("dist.ProcessGroup", Alone())
    write_checkpoint(folder, lambda: parts, {**HEAD, **head}, group, lambda _: None)


def index_of(folder: Path) -> dict[str, Any]:
    """Returns the index of a checkpoint."""
    index: dict[str, Any] = json.loads((folder / INDEX).read_bytes())["index"]
    return index


def reseal(folder: Path, change: Callable[[dict[str, Any]], object] = lambda _: None) -> None:
    """Changes the index of a checkpoint, and makes all checksums right."""
    index = index_of(folder)
    for name in index["files"]:
        content = (folder / name).read_bytes()
        index["files"][name] = [len(content), zlib.crc32(content)]
    change(index)
    content = json.dumps(index).encode()
    (folder / INDEX).write_bytes(b'{"crc32": %d, "index": %b}' % (zlib.crc32(content), content))


def values(folder: Path) -> dict[str, Tensor]:
    """Returns all tensors of a checkpoint."""
    files = Files(folder)
    files.verify()
    return {key: files.whole(key) for key in files.index.tensors}


def differences(one: Path, other: Path) -> list[str]:
    """Returns the keys whose bits differ between two checkpoints."""
    own, others = values(one), values(other)
    both = own.keys() | others.keys()
    return sorted(k for k in both if k not in own or k not in others or not same(own[k], others[k]))


def same(one: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors have the same bits."""
    return one.dtype == other.dtype and torch.equal(one, other)
