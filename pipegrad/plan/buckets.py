"""Buckets: which parameters travel together, and where each lies. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from pipegrad.model.manifest import Manifest
from pipegrad.plan.routes import Route, signature
from pipegrad.plugins.handler import ParameterRecord, Placement

_ALIGN_BYTES = 64


@dataclass(frozen=True)
class Slot:
    """Where one parameter lies in a flat buffer: element offset, shape and strides."""

    key: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()

    def within(self, region: range) -> range:
        """Returns which of its elements, as they lie in memory, lie in a region of the buffer."""
        begin = min(max(region.start - self.offset, 0), self.numel)
        return range(begin, max(min(region.stop - self.offset, self.numel), begin))


@dataclass(frozen=True)
class Bucket:
    """Parameters that travel together. The same on every rank but for the ranks in its route.

    And but for the shapes of slots where a rank has a smaller local shard: it lies together, at the
    beginning of its slot, as it does on all ranks that this one reduces it with.

    Attributes:
        index: Its number, counted over all ranks' buckets in the order they become ready.
        ready: Tick at which its last holder's gradient is final.
        holders: Stages that hold its parameters.
        dtype: dtype in which its gradients accumulate.
        wire_dtype: dtype in which they travel.
        parameter_dtype: dtype of its parameters; the one in which they travel back, if they do.
        route: The reductions, in order.
        slots: Reverse position in the model: the order in which backward completes them.
        payload_numel: Elements of all slots, padding included; the flags follow, one a slot.
    """

    index: int
    ready: int
    holders: tuple[int, ...]
    dtype: torch.dtype
    wire_dtype: torch.dtype
    parameter_dtype: torch.dtype
    route: Route
    slots: tuple[Slot, ...]
    payload_numel: int

    @property
    def names(self) -> str:
        """Its parameters in few words."""
        return in_few_words([slot.key for slot in self.slots])

    @property
    def numel(self) -> int:
        """Elements on the wire: the payload and one contributed flag a slot."""
        return self.payload_numel + len(self.slots)

    def region(self, rank: int, num_steps: int) -> range:
        """Returns which elements of the payload `rank` still has after so many reductions.

        The flags of all slots follow it, wherever it ends. See [Note: shards].
        """
        region = range(self.payload_numel)
        for step in self.route[:num_steps]:
            if step.placement is Placement.SHARD:
                numel, shard = len(region) // len(step.ranks), step.ranks.index(rank)
                region = region[shard * numel : (shard + 1) * numel]
        return region

    def pieces(self, rank: int, num_steps: int) -> tuple[Slot, ...]:
        """Returns where what `rank` still has of each slot lies, in its region.

        In a shard it is flat, and empty if the shard has nothing of it.
        """
        region = self.region(rank, num_steps)
        if len(region) == self.payload_numel:
            return self.slots
        return tuple(_piece(slot, region) for slot in self.slots)

    def nbytes(self, step: int) -> int:
        """Returns the bytes on the wire of a reduction: payload and flags."""
        size = self.payload_numel // num_shards(self.route[:step])
        return (size + len(self.slots)) * self.wire_dtype.itemsize

    def parameter_nbytes(self, step: int) -> int:
        """Returns the bytes of parameters that move back along a reduction."""
        return self.payload_numel // num_shards(self.route[:step]) * self.parameter_dtype.itemsize

    @property
    def syncs_parameters(self) -> bool:
        """Whether updated parameters come back."""
        return any(step.syncs_parameters for step in self.route)


def _piece(slot: Slot, region: range) -> Slot:
    """Returns the elements of a slot that lie in a region, counted from its start."""
    part = slot.within(region)
    offset = slot.offset + part.start - region.start if part else 0
    return Slot(slot.key, offset, (len(part),), (1,))


# [Note: shards] After a SHARD each rank goes on with one shard of the payload, where it lies, and
# with the flags. The flags are moved right behind the shard, over elements that other ranks have by
# now. So later reductions have one flat tensor as well, and nothing is copied or allocated.


class Kind:
    """What decides with whom a parameter may share a bucket, and when that bucket is ready."""

    def __init__(
        self,
        record: ParameterRecord,
        route: Route,
        ticks: Sequence[int],
        wire_dtype: torch.dtype | None = None,
        gradients_of: Manifest | None = None,
    ) -> None:
        entry_dtype = gradients_of and gradients_of.entries(record.key)[0].gradient_dtype
        self.record = record
        self.route = route
        self.dtype = entry_dtype or record.dtype
        self.wire_dtype = wire_dtype or self.dtype
        self.ready = max(ticks[stage] for stage in record.holders)

    @property
    def key(self) -> tuple[object, ...]:
        """The bucket key. Route as mesh axes, not ranks; holders as stages."""
        back = str(self.record.dtype) if any(step.syncs_parameters for step in self.route) else ""
        dtypes = (str(self.dtype), str(self.wire_dtype), back)
        return (self.ready, self.record.holders, signature(self.route), dtypes)


def in_few_words(keys: Sequence[str]) -> str:
    """Returns how many parameters these are, the first and the last."""
    return f"{len(keys)} parameters, {keys[0]} .. {keys[-1]}" if len(keys) > 1 else keys[0]


def make_buckets(manifest: Manifest, kinds: Iterable[Kind], capacity_bytes: int) -> list[Bucket]:
    """Cuts each kind, in reverse position, where it exceeds the capacity; numbers the result."""
    families: dict[tuple[object, ...], list[Kind]] = {}
    for kind in sorted(kinds, key=lambda k: (k.record.position, k.record.key), reverse=True):
        families.setdefault(kind.key, []).append(kind)
    cuts = [cut for family in families.values() for cut in _cut(family, capacity_bytes)]
    # Within one tick the bucket that backward completes first goes first.
    cuts.sort(key=lambda cut: (cut[0].ready, -cut[-1].record.position, str(cut[0].key)))
    return [_bucket(index, cut, manifest) for index, cut in enumerate(cuts)]


def _cut(family: Iterable[Kind], capacity_bytes: int) -> Iterable[list[Kind]]:
    cut: list[Kind] = []
    filled = 0
    for kind in family:
        nbytes = _aligned(kind.record.numel, kind.wire_dtype) * kind.wire_dtype.itemsize
        if cut and filled + nbytes > capacity_bytes:
            yield cut
            cut, filled = [], 0
        cut.append(kind)
        filled += nbytes
    yield cut


def _aligned(numel: int, dtype: torch.dtype, num_shards: int = 1) -> int:
    step = max(1, _ALIGN_BYTES // dtype.itemsize) * num_shards
    return -(-numel // step) * step


def num_shards(route: Route) -> int:
    """Returns into how many shards a route cuts a bucket."""
    return math.prod(len(step.ranks) for step in route if step.placement is Placement.SHARD)


def _bucket(index: int, cut: Sequence[Kind], manifest: Manifest) -> Bucket:
    first, slots, offset = cut[0], [], 0
    for kind in cut:
        record = kind.record
        slots.append(Slot(record.key, offset, record.shape, _common_stride(manifest, record)))
        offset += _aligned(record.numel, kind.wire_dtype)
    return Bucket(
        index=index,
        ready=first.ready,
        holders=first.record.holders,
        dtype=first.dtype,
        wire_dtype=first.wire_dtype,
        parameter_dtype=first.record.dtype,
        route=first.route,
        slots=tuple(slots),
        payload_numel=_padded(offset, len(slots), first),
    )


def _padded(numel: int, num_flags: int, kind: Kind) -> int:
    """Returns the elements of a payload, in shards of one size, none smaller than the flags."""
    rows = num_shards(kind.route)
    behind = num_flags * rows if rows > 1 else 0
    return _aligned(max(numel, behind), kind.wire_dtype, rows)


def _common_stride(manifest: Manifest, record: ParameterRecord) -> tuple[int, ...]:
    """Returns the parameter's strides if all holders agree and they fill the slot, else row-major.

    Autograd wants a gradient strided like its parameter; elements must lie alike on all holders.
    """
    strides = {entry.stride for entry in manifest.entries(record.key)}
    stride = min(strides)
    row_major = torch.empty(record.shape, device="meta").stride()
    dims = sorted(zip(stride, record.shape, strict=True))
    expected = 1
    for step, size in dims:
        if size != 1 and step != expected:
            return tuple(row_major)
        expected *= size
    return stride if len(strides) == 1 else tuple(row_major)


def localised(
    buckets: Iterable[Bucket],
    routes: Mapping[str, Route],
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> tuple[Bucket, ...]:
    """Returns the buckets of one rank, with the ranks of its own copy of each group.

    Args:
        buckets: Of all ranks.
        routes: Key -> route on that rank.
        shapes: Key -> shape of the rank's local shard, where it has one.
    """
    return tuple(
        replace(
            bucket,
            route=routes[bucket.slots[0].key],
            slots=tuple(_shard(slot, (shapes or {}).get(slot.key)) for slot in bucket.slots),
        )
        for bucket in buckets
        if bucket.slots[0].key in routes
    )


def _shard(slot: Slot, shape: tuple[int, ...] | None) -> Slot:
    """Returns a slot with a local shard in it, row-major: the largest's strides would have gaps."""
    if shape is None:
        return slot
    return replace(slot, shape=shape, stride=tuple(torch.empty(shape, device="meta").stride()))
