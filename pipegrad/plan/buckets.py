"""Buckets: gradients that are reduced together, and the slot of each. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from pipegrad.model.manifest import Manifest
from pipegrad.plan.options import GradientOptions
from pipegrad.plan.routes import Divisors, Route, signature
from pipegrad.plugins.handler import ParameterRecord, Placement
from pipegrad.printable import printable
from pipegrad.topology import Topology

_ALIGN_BYTES = 64


@dataclass(frozen=True)
class Slot:
    """The place of one gradient in a flat buffer: element offset, shape and strides."""

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


@dataclass(frozen=True, kw_only=True)
class Kind:
    """The facts that the gradients of a bucket share. They contain no rank.

    Attributes:
        ready: Tick at which the gradients of the last holder are final.
        holders: Stages that hold the parameters.
        dtype: dtype in which gradients accumulate.
        wire_dtype: dtype in which they are sent.
        sum_dtype: dtype in which the parts of ranks are added: `wire_dtype`, or a wider one.
        divisor: Gradients are divided by this, in addition to the divisor of each step.
    """

    ready: int
    holders: tuple[int, ...]
    dtype: torch.dtype
    wire_dtype: torch.dtype
    sum_dtype: torch.dtype
    divisor: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Bucket(Kind):
    """Parameters whose gradients are reduced together. It differs between ranks in two fields.

    The route has the ranks of this rank's copy. And a rank with a smaller local shard of a DTensor
    has a smaller shape in that slot. The shard begins where the slot begins, as on all ranks with
    which it is reduced.

    Attributes:
        index: Its number among the buckets of all ranks, in the order in which they become ready.
            Negative if its gradients are not reduced.
        parameter_dtype: dtype of its parameters in a parameter sync.
        route: The reductions, in order.
        slots: Slots by reverse position in the model, which is the order of backward. With WHOLE
            the slots of each rank lie together.
        payload_numel: Elements of all slots, with padding. The flags follow, one for each slot.
            Only with SHARD is it a multiple of the number of ranks.
        whole_numels: With WHOLE, the elements of each rank of that reduction, by its order of
            ranks. No slot crosses from one rank to the next.
    """

    index: int
    parameter_dtype: torch.dtype
    route: Route
    slots: tuple[Slot, ...]
    payload_numel: int
    whole_numels: tuple[int, ...] = ()

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
                numels, index = self.scattered(number, rank), step.ranks.index(rank)
                begin = sum(numels[:index])
                region = region[begin : begin + numels[index]]
        return region

    def scattered(self, step: int, rank: int) -> tuple[int, ...]:
        """Returns the count of elements of each rank after a reduction, by its order of ranks.

        Without SHARD or WHOLE the counts do not change.
        """
        reduction = self.route[step]
        if reduction.placement is Placement.WHOLE:
            return self.whole_numels
        shards = len(reduction.ranks) if reduction.placement is Placement.SHARD else 1
        return (len(self.region(rank, step)) // shards,) * len(reduction.ranks)

    def pieces(self, rank: int, num_steps: int) -> tuple[Slot, ...]:
        """Returns the slot of each gradient; one for the whole region once it was scattered."""
        if not any(step.placement.scatters for step in self.route[:num_steps]):
            return self.slots
        return (Slot("", 0, (len(self.region(rank, num_steps)),), (1,)),)

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
        """True if its parameters need a parameter sync after the optimizer's step."""
        return any(step.syncs_parameters for step in self.route)


# [Note: shards] After a reduction with SHARD or WHOLE, a rank continues with one region of the
# payload, and with the flags. The flags are copied to the memory right after the region, over
# elements that belong to other ranks now, because later reductions of the route also need one flat
# tensor, the rank's part.


def in_few_words(keys: Sequence[str]) -> str:
    """Returns a text with the number of keys, the first and the last key."""
    return f"{len(keys)} parameters, {keys[0]} .. {keys[-1]}" if len(keys) > 1 else keys[0]


def make_buckets(
    records: Iterable[ParameterRecord],
    routes: Mapping[str, Route],
    *,
    manifest: Manifest,
    topology: Topology,
    divisors: Divisors,
    options: GradientOptions,
) -> tuple[Bucket, ...]:
    """Returns the buckets of trained parameters, numbered by readiness."""
    alone = options.stage_ticks or range(topology.num_stages - 1, -1, -1)
    several = options.shared_ticks or alone
    # Reverse order of the model, because backward completes gradients in this order: the first
    # bucket is complete early, and its collective runs during the rest of the backward.
    families: dict[tuple[Kind, object], list[ParameterRecord]] = {}
    for record in sorted(records, key=lambda x: (x.position, x.key), reverse=True):
        route = routes[record.key]
        ticks = several if topology.crosses(record.holders) else alone
        dtype = manifest.entries(record.key)[0].gradient_dtype
        wire = options.reduce_dtype or dtype
        kind = Kind(
            ready=max(ticks[stage] for stage in record.holders),
            holders=record.holders,
            dtype=dtype,
            wire_dtype=wire,
            sum_dtype=torch.promote_types(wire, options.sum_dtype or wire),
            divisor=divisors.get(record.key, 1.0),
        )
        # The route counts without its ranks, because buckets must be equal on all ranks. The dtype
        # of the parameter counts only if parameters are sent.
        is_sent = any(step.syncs_parameters for step in route)
        along = signature(route), record.dtype if is_sent else None
        families.setdefault((kind, along), []).append(record)
    cuts = [
        (kind, along, cut)
        for (kind, along), family in families.items()
        for cut in cut_by_bytes(
            family, kind.wire_dtype, options.bucket_bytes, _num_owners(routes[family[0].key])
        )
    ]
    # Two buckets may be ready in the same tick, in one stage. The later position in the model is
    # complete first.
    cuts.sort(key=lambda x: (x[0].ready, -x[2][-1].position, str(x[:2])))
    costs: dict[tuple[int, ...], list[int]] = {}  # ranks of a WHOLE -> cost of each rank so far
    return tuple(
        _bucket(index, kind, cut, manifest=manifest, route=routes[cut[0].key], costs=costs)
        for index, (kind, _, cut) in enumerate(cuts)
    )


def _num_owners(route: Route) -> int:
    """Returns the number of ranks that divide whole parameters; `make_routes` allows one WHOLE."""
    return max((len(s.ranks) for s in route if s.placement is Placement.WHOLE), default=1)


def cut_by_bytes(
    records: Iterable[ParameterRecord], dtype: torch.dtype, capacity_bytes: int, least: int = 1
) -> Iterator[list[ParameterRecord]]:
    """Yields runs of at most `capacity_bytes`. A larger parameter is a separate run.

    A run has at least `least` parameters, even if it is larger then.
    """
    cut: list[ParameterRecord] = []
    filled = 0
    for record in records:
        nbytes = _aligned(record.numel, dtype) * dtype.itemsize
        if len(cut) >= least and filled + nbytes > capacity_bytes:
            yield cut
            cut, filled = [], 0
        cut.append(record)
        filled += nbytes
    yield cut


def step_cost(shape: Sequence[int]) -> int:
    """Returns the cost of a step of a matrix, in any unit: an iteration of Newton-Schulz.

    More than two dimensions count as one matrix, with the rows of the first.
    """
    rows, numel = shape[0] if shape else 1, math.prod(shape)
    return numel * min(rows, numel // rows) if rows else 0


def share_out(records: Iterable[ParameterRecord], costs: list[int]) -> list[list[ParameterRecord]]:
    """Returns the parameters of a bucket that each rank owns.

    The costliest one comes first, and goes to the rank whose steps cost least so far.
    """
    # Balance inside a bucket also matters, because the rank that owns most of it receives most.
    shares: list[list[ParameterRecord]] = [[] for _ in costs]
    for record in sorted(records, key=lambda x: step_cost(x.shape), reverse=True):
        owner = costs.index(min(costs))
        shares[owner].append(record)
        costs[owner] += step_cost(record.shape)
    return shares


def _bucket(
    index: int,
    kind: Kind,
    records: Sequence[ParameterRecord],
    *,
    manifest: Manifest,
    route: Route,
    costs: dict[tuple[int, ...], list[int]],
) -> Bucket:
    """Returns a bucket of some parameters. With WHOLE the slots of each rank lie together."""
    wire, numels = kind.wire_dtype, tuple[int, ...]()
    for step in route:
        if step.placement is Placement.WHOLE:
            shares = share_out(records, costs.setdefault(step.ranks, [0] * len(step.ranks)))
            records = [record for share in shares for record in share]
            numels = tuple(sum(_aligned(x.numel, wire) for x in share) for share in shares)
    slots, offset = [], 0
    for record in records:
        slots.append(Slot(record.key, offset, record.shape, _common_stride(manifest, record)))
        offset += _aligned(record.numel, wire)
    # All shards have the same size. No shard may be smaller than the flags, because these are
    # written right after a shard, over a shard of another rank; see [Note: shards].
    num_shards = math.prod(len(s.ranks) for s in route if s.placement is Placement.SHARD)
    minimum = len(slots) * num_shards if num_shards > 1 else 0
    return Bucket(
        **vars(kind),
        index=index,
        parameter_dtype=records[0].dtype,
        route=route,
        slots=tuple(slots),
        payload_numel=_aligned(max(offset, minimum), wire, num_shards),
        whole_numels=numels,
    )


def _aligned(numel: int, dtype: torch.dtype, num_shards: int = 1) -> int:
    step = max(1, _ALIGN_BYTES // dtype.itemsize) * num_shards
    return -(-numel // step) * step


def _common_stride(manifest: Manifest, record: ParameterRecord) -> tuple[int, ...]:
    """Returns the parameter's strides if they are dense and equal on all holders, else row-major.

    Dense, because autograd copies a gradient that does not have the strides of its parameter.
    Equal, because a reduction adds elements by position.
    """
    strides = {entry.stride for entry in manifest.entries(record.key)}
    example = torch.empty_strided(record.shape, min(strides), device="meta")
    if len(strides) == 1 and torch.ops.aten.is_non_overlapping_and_dense(example):
        return example.stride()
    return torch.empty(record.shape, device="meta").stride()


def localised(
    buckets: Iterable[Bucket],
    routes: Mapping[str, Route],
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> tuple[Bucket, ...]:
    """Returns the buckets of one rank, with that rank's routes and local shards."""
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
    # Compute the strides, because the slot has the strides of the largest shard. They would leave
    # gaps in a smaller one.
    if shape is None:
        return slot
    return replace(slot, shape=shape, stride=tuple(torch.empty(shape, device="meta").stride()))
