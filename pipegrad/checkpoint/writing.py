"""Writing: all ranks write one checkpoint together, each slice once.

Ranks exchange plain data over a gloo group of their own: what each has, what each has written, and
that the index is there. If one of them fails, all learn it in the next exchange, and nothing stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from pipegrad import run_files
from pipegrad.checkpoint.files import Index, Part, write
from pipegrad.checkpoint.folders import INDEX, publish, unfinished
from pipegrad.comm import plain
from pipegrad.errors import CheckpointError, PipegradError

T = TypeVar("T")


def write_checkpoint(
    folder: Path,
    collect: Callable[[], Mapping[str, Part]],
    head: Mapping[str, Any],
    group: dist.ProcessGroup,
) -> None:
    """Writes a checkpoint into a folder, which appears when it is whole. All ranks call it.

    Args:
        folder: Of the checkpoint.
        collect: Returns what this rank has; its error is that of all ranks.
        head: What else the index says.
        group: A gloo group of all ranks that nobody else uses now.

    Raises:
        CheckpointError: If a rank fails; on all ranks. Nothing of the checkpoint stays.
    """
    partial, is_first = unfinished(folder), group.rank() == 0

    def prepare() -> tuple[Mapping[str, Part], dict[str, Any]]:
        parts = collect()
        if is_first:  # no rank writes before it knows that all have come here
            run_files.make_folder(partial)
            run_files.empty(partial)
        described = {
            key: (part.values.dtype, part.shape, [tuple(each) for each in part.ranges])
            for key, part in parts.items()
        }
        return parts, described

    def finish() -> tuple[None, None]:
        if is_first:
            run_files.replace(partial / INDEX, _index(tables, written, head).sealed())
            publish(folder)
        return None, None

    try:
        parts, tables = _together(partial, prepare, group)
        mine = _shared_out(tables)[group.rank()]
        name = f"rank-{group.rank()}.safetensors"
        _, written = _together(partial, lambda: (None, _write(partial / name, parts, mine)), group)
        _together(partial, finish, group)
    except BaseException:
        # The disk may be full, so what was written gives its space back. No rank writes any more:
        # an error comes when all ranks have replied.
        if is_first:
            run_files.remove(partial)
        raise


def _shared_out(tables: Sequence[Mapping[str, Any]]) -> list[set[tuple[str, Any]]]:
    """Returns for each rank the slices that it writes: each slice once, of who has it.

    Raises:
        CheckpointError: If ranks disagree on a tensor.
    """
    holders: dict[tuple[str, Any], list[int]] = {}
    kinds: dict[str, Any] = {}
    for rank, table in enumerate(tables):
        for key, (*kind, ranges) in table.items():
            if kinds.setdefault(key, kind) != kind:
                raise CheckpointError(f"ranks have {key!r} as {kinds[key]} and {kind}")
            for each in ranges:
                holders.setdefault((key, each), []).append(rank)
    num_bytes, mine = [0] * len(tables), [set[tuple[str, Any]]() for _ in tables]
    for (key, each), ranks in holders.items():
        rank = min(ranks, key=num_bytes.__getitem__)
        num_bytes[rank] += (each[3] - each[2]) * kinds[key][0].itemsize
        mine[rank].add((key, each))
    return mine


def _write(path: Path, parts: Mapping[str, Part], mine: set[tuple[str, Any]]) -> tuple[Any, ...]:
    """Writes slices of this rank; returns file, size and checksum, and where each slice lies."""
    slices, values = {}, {}
    for key, part in parts.items():
        split = part.values.split([each.end - each.begin for each in part.ranges])
        for each, value in zip(part.ranges, split, strict=True):
            if (key, each) in mine:
                is_whole = value.numel() == math.prod(part.shape)
                name = key if is_whole else f"{key} {[*each]}"
                values[name] = value.view(part.shape) if is_whole else value
                slices[name] = key, each
    file, begins = write(path, values)
    return (
        path.name,
        file,
        [(key, tuple(each), begins[name]) for name, (key, each) in slices.items()],
    )


def _index(
    tables: Sequence[Mapping[str, Any]], written: Sequence[Any], head: Mapping[str, Any]
) -> Index:
    tensors: dict[str, Any] = {}
    for table in tables:
        for key, (dtype, shape, _) in table.items():
            tensors[key] = {
                "dtype": str(dtype).removeprefix("torch."),
                "shape": shape,
                "slices": [],
            }
    for name, _, slices in written:
        for key, each, begin in slices:
            tensors[key]["slices"].append((each, name, begin))
    index = Index(**head, files={name: file for name, file, _ in written}, tensors=tensors)
    try:
        index.check()
    except ValueError as error:
        raise CheckpointError(
            f"{error}: a rank has no state of its piece: give an expert without a token a gradient "
            f"of zeros"
        ) from error
    return index


def _together(
    folder: Path, function: Callable[[], tuple[T, Any]], group: dist.ProcessGroup
) -> tuple[T, list[Any]]:
    """Calls a function on all ranks; returns what this rank keeps, and the replies of all.

    Raises:
        CheckpointError: If a rank failed; on all ranks. It names the first one.
    """
    kept, words, cause = None, "", None
    try:
        kept, reply = function()
    except BaseException as error:  # noqa: BLE001 - all ranks learn it first
        cause, reply = error, None
        is_ours = isinstance(error, PipegradError)
        words = str(error) if is_ours else run_files.why_not_written(folder, error)
    replies = _gathered((words, reply), group)
    if cause is not None and not isinstance(cause, Exception):
        raise cause
    for rank, (complaint, _) in enumerate(replies):
        if complaint:
            raise CheckpointError(f"rank {rank}: {complaint}") from cause
    return kept, [reply for _, reply in replies]  # type: ignore[return-value]  # none without it


def _gathered(value: object, group: dist.ProcessGroup) -> list[Any]:
    """Returns the plain data of all ranks of a gloo group, by rank."""
    content = torch.frombuffer(bytearray(plain.dumps(value)), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    group.allgather([sizes], [torch.tensor([content.numel()])]).wait()
    rows = [torch.empty(int(max(sizes)), dtype=torch.uint8) for _ in sizes]
    padded = rows[0].new_zeros(rows[0].shape)
    padded[: content.numel()] = content
    group.allgather([rows], [padded]).wait()
    both = zip(rows, sizes, strict=True)
    return [plain.loads(row[: int(size)].numpy().tobytes()) for row, size in both]
