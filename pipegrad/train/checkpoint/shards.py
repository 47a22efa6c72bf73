"""Shards: parameters of which each rank along a dimension of the mesh has one part.

[Note: pieces of a whole tensor] Tensor parallelism cuts a layer's matrix, and expert parallelism
the list of experts. Only the model knows how: a fused matrix may be cut in any order. So
``parallel.shards`` declares it. Pieces that follow each other in the order of ranks make the whole
tensor. A checkpoint has it under its plain name, and each rank writes and reads the boxes that
belong to its piece. So any number of ranks reads it.

A DTensor knows its part, so nothing is declared for it. A shard of the optimizer is a flat range of
a part, which is several boxes of the whole tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

from pipegrad.comm.agreement import agree
from pipegrad.gradients.main_params import Box, Chunk, Locations
from pipegrad.gradients.sync import GradientSync
from pipegrad.model.dtensor import is_dtensor, local
from pipegrad.train.config import Config

_KEY = "parallel.shards"


@dataclass(frozen=True)
class Shard:
    """What this rank has of a whole tensor: a declared piece, or its part of a DTensor.

    Attributes:
        shape: Of the whole tensor.
        boxes: Where its elements lie in the whole tensor, in their order.
        locations: Of all parts, in their order.
    """

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    locations: tuple[str, ...] = ("",)

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Shard:
        """Returns that of a tensor that is not cut."""
        return cls(tuple(shape), (((0,) * len(shape), tuple(shape)),))

    def chunk(self, values: Tensor, begin: int = 0) -> Chunk:
        """Returns elements of the part as a chunk of the whole tensor.

        Args:
            values: Elements of the part in its order, of any shape; or a DTensor with such a part.
            begin: Index of the first of them in the flat part.
        """
        flat, boxes, first = local(values).detach().reshape(-1), list[Box](), 0
        end = begin + flat.numel()
        for corner, shape in self.boxes:
            numel = math.prod(shape)
            inside = max(begin - first, 0), min(end - first, numel)
            for offsets, sizes in boxes_of(*inside, shape):
                at = tuple(c + o for c, o in zip(corner, offsets, strict=True))
                boxes.append((at, sizes))
            first += numel
        return Chunk.in_boxes(flat, self.shape, boxes)


def boxes_of(begin: int, end: int, shape: Sequence[int]) -> Iterator[Box]:
    """Yields the boxes of a flat range of a tensor, in the order of its elements.

    A range in n dimensions is at most 2 n - 1 boxes: a part of its first row, whole rows, and a
    part of its last one.

    Args:
        begin: Index of the first element.
        end: Index behind the last one.
        shape: Of the tensor, one dimension at least.
    """
    if begin >= end:
        return
    inner = shape[1:]
    numel = math.prod(inner)
    first, last = -(-begin // numel), end // numel  # rows that are whole

    def inside(row: int, begin: int, end: int) -> Iterator[Box]:
        for offsets, sizes in boxes_of(begin, end, inner):
            yield (row, *offsets), (1, *sizes)

    if first > last:  # a part of one row
        yield from inside(last, begin - last * numel, end - last * numel)
        return
    if begin < first * numel:
        yield from inside(first - 1, begin - (first - 1) * numel, numel)
    if first < last:
        yield (first, *(0 for _ in inner)), (last - first, *inner)
    yield from inside(last, 0, end - last * numel)


def find_shards(config: Config, sync: GradientSync) -> dict[str, Shard]:
    """Returns the shards of this rank by key: what is declared, and its parts of DTensors.

    Every rank must call it.

    Raises:
        ConfigError: As `_declared`.
    """
    parameters = {record.key: sync.parameter(record) for record in sync.records()}
    locations = Locations(sync.topology, sync.plan)
    own = {key: locations.of(key) for key, p in parameters.items() if is_dtensor(p)}
    of_ranks = agree("the parts of parameters", lambda: own)
    shards = _declared(config, sync)
    for key in own:
        parameter: Any = parameters[key]
        ranks = parameter.device_mesh.mesh.flatten().tolist()
        boxes = [(tuple(c.offsets), tuple(c.sizes)) for c in parameter.__create_chunk_list__()]
        shards[key] = Shard(
            shape=tuple(parameter.shape),
            boxes=tuple(box for box in boxes if math.prod(box[1])),
            locations=tuple(sorted(of_ranks[rank][key] for rank in ranks)),
        )
    return shards


def _declared(config: Config, sync: GradientSync) -> dict[str, Shard]:
    """Returns the shards of this rank that ``parallel.shards`` declares, by key.

    Raises:
        ConfigError: If a pattern matches nothing, pieces do not fit together, or replicas train
            alone. On all ranks.
    """
    patterns = config.parallel.shards
    if not patterns:
        return {}
    locations = Locations(sync.topology, sync.plan)
    mine = {
        record.key: (locations.of(record.key), tuple(record.shape))
        for record in sync.records()
        if any(fnmatchcase(_name(record.key), pattern) for pattern in patterns)
    }
    pieces: dict[str, dict[str, tuple[int, ...]]] = {}
    for of_rank in agree("the shards of parameters", lambda: mine):
        if of_rank and sync.plan.independent_axes:
            config.refuse(
                _KEY,
                f"replicas train alone by handler {sync.plan.independent_by!r}, and each has "
                f"{_name(min(of_rank))!r}: a checkpoint would take replicas for pieces; leave it "
                f"out of {_KEY}, or choose another handler",
            )
        for key, (location, shape) in of_rank.items():
            pieces.setdefault(key, {})[location] = shape
    for pattern in patterns:
        if not any(fnmatchcase(_name(key), pattern) for key in pieces):
            config.refuse(_KEY, f"{pattern!r} matches no parameter")
    # All ranks check the pieces of all ranks, so they refuse alike.
    shards = {key: fitted(config, key, pieces[key]) for key in sorted(pieces)}
    return {key: shards[key][location] for key, (location, _) in mine.items()}


def fitted(config: Config, key: str, pieces: Mapping[str, tuple[int, ...]]) -> dict[str, Shard]:
    """Returns the shard of each location of a parameter.

    One location alone is the whole tensor: its dimension of the mesh has one rank here.
    """
    name = _name(key)
    first, *others = pieces.values()
    dims = set[int]()
    for pattern, dim in config.parallel.shards.items():
        if fnmatchcase(name, pattern):
            if not -len(first) <= dim < len(first):
                config.refuse(_KEY, f"{name!r} has no dimension {dim}: its shape is {first}")
            dims.add(dim % len(first))
    if len(dims) > 1:
        config.refuse(_KEY, f"{name!r} is matched with several dimensions, {sorted(dims)}")
    (dim,) = dims
    if any("," in location for location in pieces):
        config.refuse(
            _KEY,
            f"{name!r} lies apart along several dimensions of the mesh, {min(pieces)}: only one is "
            f"supported",
        )
    if any(_without(other, dim) != _without(first, dim) for other in others):
        config.refuse(_KEY, f"pieces of {name!r} do not fit along dimension {dim}: {dict(pieces)}")
    ordered = sorted(pieces, key=_coordinate)
    shape = list(first)
    shape[dim] = sum(piece[dim] for piece in pieces.values())
    shards, begin = {}, 0
    for location in ordered:
        piece = pieces[location]
        corner = tuple(begin if d == dim else 0 for d in range(len(shape)))
        shards[location] = Shard(tuple(shape), ((corner, piece),), tuple(ordered))
        begin += piece[dim]
    return shards


def _name(key: str) -> str:
    """Returns the name in the uncut model."""
    return key.partition(".")[2]


def _without(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], *shape[dim + 1 :])


def _coordinate(location: str) -> int:
    """Returns the coordinate of a location, ``"[tp=1]"``; 0 of ""."""
    return int(location.strip("]").rpartition("=")[2] or 0)
