"""Buckets: the gradients that travel together, and the slot of each. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from pipegrad.model.manifest import Manifest
from pipegrad.plan.routes import Route, signature
from pipegrad.plugins.handler import ParameterRecord, Placement, ReductionStep
from pipegrad.printable import printable

_ALIGN_BYTES = 64


@dataclass(frozen=True)
class Slot:
    """Where one gradient is in a flat buffer: element offset, shape and strides."""

    key: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()

    def within(self, region: range) -> range:
        """Returns the elements of this slot, by order in memory, that a region contains."""
        begin = min(max(region.start - self.offset, 0), self.numel)
        return range(begin, max(min(region.stop - self.offset, self.numel), begin))


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients travel together. It differs between ranks in two fields.

    The route has the ranks of the rank's own copy. And a rank with a smaller local shard of a
    DTensor has a smaller shape in that slot. The shard begins where the slot begins, as on all
    ranks with which it is reduced.

    Attributes:
        index: Its number among the buckets of all ranks, in the order in which they become ready.
        ready: Tick at which the gradients of its last holder are final.
        holders: Stages that hold its parameters.
        dtype: dtype in which its gradients accumulate.
        wire_dtype: dtype in which they are sent.
        sum_dtype: dtype in which the parts of ranks are added: that of the wire, or a wider one.
        parameter_dtype: dtype of its parameters, also in a parameter sync.
        route: The reductions, in order.
        slots: By reverse position in the model, which is the order in which backward fills them.
            With WHOLE the slots of each rank lie together.
        payload_numel: Elements of all slots, with padding. The flags follow, one for each slot.
            Only with SHARD is it a multiple of the number of ranks.
        whole_numels: With WHOLE, the elements of each rank of that reduction, by its order of
            ranks. No slot crosses from one rank to the next.
        divisor: Its gradients are divided by this, besides the divisor of each step.
    """

    index: int
    ready: int
    holders: tuple[int, ...]
    dtype: torch.dtype
    wire_dtype: torch.dtype
    sum_dtype: torch.dtype
    parameter_dtype: torch.dtype
    route: Route
    slots: tuple[Slot, ...]
    payload_numel: int
    whole_numels: tuple[int, ...] = ()
    divisor: float = 1.0

    @property
    def names(self) -> str:
        """A short text for its parameters."""
        return printable(in_few_words([slot.key for slot in self.slots]))

    @property
    def numel(self) -> int:
        """Elements on the wire: the payload, and a contributed flag for each slot."""
        return self.payload_numel + len(self.slots)

    def region(self, rank: int, num_steps: int) -> range:
        """Returns the elements of the payload that `rank` has after `num_steps` reductions.

        The flags of all slots lie right after this region. See [Note: shards].
        """
        region = range(self.payload_numel)
        for number, step in enumerate(self.route[:num_steps]):
            if step.placement.scatters:
                numels, index = self._scattered(number, len(region)), step.ranks.index(rank)
                begin = sum(numels[:index])
                region = region[begin : begin + numels[index]]
        return region

    def scattered(self, step: int, rank: int) -> tuple[int, ...]:
        """Returns how many elements each rank of a reduction has after it, by its order of ranks.

        Without SHARD or WHOLE all have what they had.
        """
        return self._scattered(step, len(self.region(rank, step)))

    def _scattered(self, step: int, numel: int) -> tuple[int, ...]:
        reduction = self.route[step]
        if reduction.placement is Placement.WHOLE:
            return self.whole_numels
        shards = len(reduction.ranks) if reduction.placement is Placement.SHARD else 1
        return (numel // shards,) * len(reduction.ranks)

    def pieces(self, rank: int, num_steps: int) -> tuple[Slot, ...]:
        """Returns the part of each slot that `rank` has, with offsets inside its region.

        Once the bucket was scattered, a part is flat. It is empty if the region has no element of
        the slot.
        """
        region = self.region(rank, num_steps)
        if not any(step.placement.scatters for step in self.route[:num_steps]):
            return self.slots
        return tuple(_piece(slot, region) for slot in self.slots)

    def name_of(self, step: int) -> str:
        """Returns the name of a reduction of its route, for people."""
        reduction = self.route[step]
        return f"bucket {self.index}: {reduction} over ranks {list(reduction.ranks)}"

    def nbytes(self, step: int, rank: int) -> int:
        """Returns the bytes of a reduction on a rank: payload and flags."""
        return (len(self.region(rank, step)) + len(self.slots)) * self.wire_dtype.itemsize

    def parameter_nbytes(self, step: int, rank: int) -> int:
        """Returns the bytes on a rank of the parameter sync along a reduction."""
        return len(self.region(rank, step)) * self.parameter_dtype.itemsize

    @property
    def syncs_parameters(self) -> bool:
        """Whether its parameters need a parameter sync after the optimizer's step."""
        return any(step.syncs_parameters for step in self.route)


def _piece(slot: Slot, region: range) -> Slot:
    """Returns the elements of a slot that lie in a region, counted from its start."""
    part = slot.within(region)
    offset = slot.offset + part.start - region.start if part else 0
    return Slot(slot.key, offset, (len(part),), (1,))


# [Note: shards] After a reduction with SHARD or WHOLE, a rank continues with one region of the
# payload, and with the flags. The flags are copied to right behind the region, over elements that
# belong to other ranks now. So the later reductions of the route also have one flat tensor, the
# rank's part. When the step ends it is copied into new memory, and that of the whole bucket goes.
# The part goes with the last gradient that is in it.


def empty_bucket(
    record: ParameterRecord,
    route: Route,
    ticks: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    wire_dtype: torch.dtype | None = None,
    sum_dtype: torch.dtype | None = None,
    divisor: float = 1.0,
) -> Bucket:
    """Returns a bucket of the kind of a parameter, without slots. Its dtype is the default."""
    dtype = dtype or record.dtype
    wire = wire_dtype or dtype
    wide = torch.promote_types(wire, sum_dtype or wire)
    ready = max(ticks[stage] for stage in record.holders)
    holders, sent = record.holders, record.dtype
    return Bucket(0, ready, holders, dtype, wire, wide, sent, route, (), 0, divisor=divisor)


def _kind(bucket: Bucket) -> tuple[object, ...]:
    """Returns what is equal for parameters that may share a bucket. It contains no rank."""
    # Buckets must be equal on all ranks. So the route counts by its mesh axes, and the holders by
    # their stages. The dtype of the parameter counts only if parameters are sent.
    sent = str(bucket.parameter_dtype) if bucket.syncs_parameters else ""
    dtypes = (str(bucket.dtype), str(bucket.wire_dtype), sent)
    return (bucket.ready, bucket.holders, signature(bucket.route), dtypes, bucket.divisor)


def in_few_words(keys: Sequence[str]) -> str:
    """Returns a text with the number of keys, the first and the last key."""
    return f"{len(keys)} parameters, {keys[0]} .. {keys[-1]}" if len(keys) > 1 else keys[0]


def make_buckets(
    manifest: Manifest, kinds: Iterable[tuple[ParameterRecord, Bucket]], capacity_bytes: int
) -> list[Bucket]:
    """Returns buckets of parameters of one kind, in reverse position, numbered by readiness.

    Args:
        manifest: The agreed model.
        kinds: Each parameter, with its `empty_bucket`.
        capacity_bytes: Bytes on the wire at which a bucket is closed.
    """
    # Backward completes gradients in the reverse order of the model. With buckets in this order,
    # the first bucket is complete early, and its collective runs beside the rest of the backward.
    families: dict[tuple[object, ...], tuple[Bucket, list[ParameterRecord]]] = {}
    for record, kind in sorted(kinds, key=lambda x: (x[0].position, x[0].key), reverse=True):
        families.setdefault(_kind(kind), (kind, []))[1].append(record)
    cuts = [
        (kind, cut)
        for kind, family in families.values()
        for cut in _cut(kind, family, capacity_bytes)
    ]
    # Two buckets may be ready in the same tick, in one stage. The later position in the model is
    # complete first.
    cuts.sort(key=lambda x: (x[0].ready, -x[1][-1].position, str(_kind(x[0]))))
    owners = Owners()
    return [
        _filled(replace(kind, index=index), cut, manifest, owners)
        for index, (kind, cut) in enumerate(cuts)
    ]


def step_cost(shape: Sequence[int]) -> int:
    """Returns what a step of a matrix costs, in any unit: as an iteration of Newton-Schulz.

    More than two dimensions count as one matrix, with the rows of the first.
    """
    rows, numel = shape[0] if shape else 1, math.prod(shape)
    return numel * min(rows, numel // rows) if rows else 0


class Owners:
    """Chooses owners for one bucket after the other, and remembers what each rank has so far."""

    def __init__(self) -> None:
        self._costs: dict[tuple[int, ...], list[int]] = {}

    def choose(self, ranks: tuple[int, ...], shapes: Sequence[tuple[int, ...]]) -> list[int]:
        """Returns the index of the owner of each parameter of a bucket, among `ranks`.

        The costliest one goes first, to the rank whose steps cost least so far.
        """
        # Balance inside a bucket also matters: the rank that owns most of it receives most.
        costs = self._costs.setdefault(ranks, [0] * len(ranks))
        owners = [0] * len(shapes)
        for index in sorted(range(len(shapes)), key=lambda i: (-step_cost(shapes[i]), i)):
            owners[index] = min(range(len(ranks)), key=lambda rank: (costs[rank], rank))
            costs[owners[index]] += step_cost(shapes[index])
        return owners


def _whole_step(route: Route) -> ReductionStep | None:
    """Returns the reduction with WHOLE of a route; `make_routes` allows one."""
    return next((step for step in route if step.placement is Placement.WHOLE), None)


def _cut(
    kind: Bucket, records: Iterable[ParameterRecord], capacity_bytes: int
) -> Iterable[list[ParameterRecord]]:
    """Yields runs of at most `capacity_bytes`. A larger gradient is a run by itself.

    With WHOLE, a run has a parameter for each rank, even if it is larger then.
    """
    # If fewer ranks owned a bucket, all the others would send to these few at once.
    whole = _whole_step(kind.route)
    least = 1 if whole is None else len(whole.ranks)
    cut: list[ParameterRecord] = []
    filled = 0
    for record in records:
        nbytes = _aligned(record.numel, kind.wire_dtype) * kind.wire_dtype.itemsize
        if len(cut) >= least and filled + nbytes > capacity_bytes:
            yield cut
            cut, filled = [], 0
        cut.append(record)
        filled += nbytes
    yield cut


def _aligned(numel: int, dtype: torch.dtype, num_shards: int = 1) -> int:
    step = max(1, _ALIGN_BYTES // dtype.itemsize) * num_shards
    return -(-numel // step) * step


def _filled(
    kind: Bucket, cut: Sequence[ParameterRecord], manifest: Manifest, owners: Owners
) -> Bucket:
    """Returns a bucket of some parameters. With WHOLE the slots of each rank lie together."""
    if step := _whole_step(kind.route):
        chosen = owners.choose(step.ranks, [record.shape for record in cut])
        numels = [0] * len(step.ranks)
        for record, owner in zip(cut, chosen, strict=True):
            numels[owner] += _aligned(record.numel, kind.wire_dtype)
        cut = [cut[i] for i in sorted(range(len(cut)), key=lambda i: chosen[i])]
        kind = replace(kind, whole_numels=tuple(numels))
    slots, offset = [], 0
    for record in cut:
        slots.append(Slot(record.key, offset, record.shape, _common_stride(manifest, record)))
        offset += _aligned(record.numel, kind.wire_dtype)
    return replace(kind, slots=tuple(slots), payload_numel=_padded(offset, len(slots), kind))


def _padded(numel: int, num_flags: int, kind: Bucket) -> int:
    """Returns the number of elements of a payload, so that all shards have the same size."""
    # The flags are written right behind a shard, over a shard of another rank; see [Note: shards].
    # So no shard may be smaller than the flags.
    scattered = (s for s in kind.route if s.placement is Placement.SHARD)
    shards = math.prod(len(step.ranks) for step in scattered)
    minimum = num_flags * shards if shards > 1 else 0
    return _aligned(max(numel, minimum), kind.wire_dtype, shards)


def _common_stride(manifest: Manifest, record: ParameterRecord) -> tuple[int, ...]:
    """Returns the parameter's strides if they are dense and equal on all holders, else row-major.

    Autograd needs a gradient with the strides of its parameter; otherwise it copies. And a
    reduction adds elements by position, so all holders must have the same strides.
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
    """Returns the buckets of one rank, with that rank's routes and local shards.

    Args:
        buckets: Of all ranks.
        routes: Key -> route on that rank.
        shapes: Key -> shape of the rank's local shard of a DTensor.
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
    """Returns a slot for a local shard, row-major."""
    # The strides of the slot are those of the largest shard. They would leave gaps in a smaller
    # one.
    if shape is None:
        return slot
    return replace(slot, shape=shape, stride=tuple(torch.empty(shape, device="meta").stride()))
