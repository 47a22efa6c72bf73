"""Plan: routes, buckets and the order of collectives. Pure and printable, for any rank, offline."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from pipegrad.gradients.route import (
    Route,
    RouteHop,
    Routes,
    has_result,
    hops_taken,
    make_routes,
    shared_routes,
    signature,
)
from pipegrad.handler import GradientHandler, ParameterRecord, Placement

if TYPE_CHECKING:
    from pipegrad.gradients.manifest import Manifest
    from pipegrad.topology import Topology

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


@dataclass(frozen=True)
class Bucket:
    """Parameters that travel together. The same on every rank but for the ranks in its route.

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
        keys = [slot.key for slot in self.slots]
        return f"{len(keys)} parameters, {keys[0]} .. {keys[-1]}" if len(keys) > 1 else keys[0]

    @property
    def numel(self) -> int:
        """Elements on the wire: the payload and one contributed flag a slot."""
        return self.payload_numel + len(self.slots)

    def region(self, rank: int, num_hops: int) -> range:
        """Returns which elements of the payload `rank` still has after so many hops: a SHARD's row.

        The flags of all slots follow it, wherever it ends. See [Note: rows].
        """
        region = range(self.payload_numel)
        for hop in self.route[:num_hops]:
            if hop.placement is Placement.SHARD:
                numel, row = len(region) // len(hop.ranks), hop.ranks.index(rank)
                region = region[row * numel : (row + 1) * numel]
        return region

    def nbytes(self, hop: int) -> int:
        """Returns the bytes on the wire of a hop: payload and flags."""
        num_shards = _num_rows(self.route[:hop])
        return (self.payload_numel // num_shards + len(self.slots)) * self.wire_dtype.itemsize

    @property
    def mirrored(self) -> bool:
        """Whether updated parameters come back."""
        return any(hop.mirrored for hop in self.route)


# [Note: rows] After a SHARD each rank goes on with one row of the payload, where it lies, and with
# the flags, which are moved right behind it: over what other ranks have by now. So later hops have
# one flat tensor as well, and nothing is copied or allocated.


@dataclass(frozen=True)
class Launch:
    """One collective: a hop of a bucket, in its lane."""

    bucket: int
    hop: int
    ready: int
    lane: int


@dataclass(frozen=True)
class Publish:
    """One movement of updated parameters, back along a hop, in the bucket's lane.

    Attributes:
        bucket: Whose parameters.
        hop: Against which hop.
        lane: Where.
        use: Its place in the order: the first stage, over all ranks, that waits for it.
        readers: Stages of the copy whose parameters come by it: those of an owner do not.
    """

    bucket: int
    hop: int
    lane: int
    use: int
    readers: tuple[int, ...]


@dataclass(frozen=True)
class Share:
    """What a rank's optimizer steps of a parameter: elements ``begin:end``, as they lie in memory.

    All of it, as it is, unless it is `sharded`.
    """

    key: str
    begin: int
    end: int
    sharded: bool


@dataclass(frozen=True)
class Plan:
    """Everything one rank does with gradients, in order.

    Attributes:
        rank: Whose plan it is.
        buckets: The buckets this rank takes part in, by index.
        launches: Its collectives, in the order of ``(ready, hop, bucket)``.
        publishes: What moves back after the optimizer's step, by first use.
        shares: What the optimizer steps on this rank, by stage and position.
        trained_numel: Elements of all trained parameters that this rank holds.
        routes: Key -> route, for every parameter that this rank reduces or keeps equal.
        packs: Buckets of parameters (frozen ones too), for making replicas equal.
        groups: Process groups of all ranks, as (ranks, lane): made by every rank in this order.
        digest: Of all ranks' routes and buckets: equal on ranks whose plans fit together.
    """

    rank: int
    buckets: tuple[Bucket, ...]
    launches: tuple[Launch, ...]
    publishes: tuple[Publish, ...]
    shares: tuple[Share, ...]
    trained_numel: int
    routes: tuple[tuple[str, Route], ...]
    packs: tuple[Bucket, ...]
    groups: tuple[tuple[tuple[int, ...], int], ...]
    digest: str

    @property
    def reduced_bytes(self) -> int:
        """Bytes that this rank's collectives reduce in one step."""
        buckets = {bucket.index: bucket for bucket in self.buckets}
        return sum(buckets[launch.bucket].nbytes(launch.hop) for launch in self.launches)

    @property
    def chains(self) -> frozenset[tuple[int, ...]]:
        """Ranks that hand gradients down to an owner, and its parameters up."""
        hops = [hop for _, route in self.routes for hop in route]
        return frozenset(hop.ranks for hop in hops if hop.placement is Placement.OWNER)

    @property
    def stepped_numel(self) -> int:
        """Elements that this rank's optimizer steps, and keeps state of."""
        return sum(share.end - share.begin for share in self.shares)

    def __str__(self) -> str:
        summary = (
            f"rank {self.rank}: {len(self.buckets)} buckets, {len(self.launches)} collectives, "
            f"{self.reduced_bytes / 2**20:.2f} MiB a step; the optimizer steps "
            f"{self.stepped_numel:,} of {self.trained_numel:,} elements"
        )
        lines = [summary]
        if self.launches:
            lines.append("launch  bucket  lane  ready  MiB        reduction")
        buckets = {bucket.index: bucket for bucket in self.buckets}
        for number, launch in enumerate(self.launches):
            bucket = buckets[launch.bucket]
            hop = bucket.route[launch.hop]
            lines.append(
                f"{number:<8}{bucket.index:<8}{launch.lane:<6}{launch.ready:<7}"
                f"{bucket.nbytes(launch.hop) / 2**20:<11.3f}{hop} over ranks {list(hop.ranks)}: "
                f"{bucket.names}"
            )
        if self.publishes:
            lines.append("publish bucket  lane  for stages")
        for number, publish in enumerate(self.publishes):
            hop = buckets[publish.bucket].route[publish.hop]
            readers = ", ".join(map(str, publish.readers))
            lines.append(
                f"{number:<8}{publish.bucket:<8}{publish.lane:<6}{readers:<18}back along {hop}"
            )
        return "\n".join(lines)


def make_plan(
    manifest: Manifest,
    topology: Topology,
    handlers: Sequence[tuple[str, GradientHandler]],
    **options: Any,  # noqa: ANN401 - those of make_plans, checked there
) -> Plan:
    """Returns the plan of ``topology.rank``. Pure: any rank's plan can be made on any machine.

    Takes what `make_plans` takes, and raises what it raises.
    """
    return make_plans(manifest, topology, handlers, ranks=[topology.rank], **options)[topology.rank]


def make_plans(
    manifest: Manifest,
    topology: Topology,
    handlers: Sequence[tuple[str, GradientHandler]],
    *,
    bucket_bytes: int,
    reduce_dtype: torch.dtype | None = None,
    lanes: int = 1,
    stage_ticks: Sequence[int] | None = None,
    shared_ticks: Sequence[int] | None = None,
    allow_unsynced: Sequence[str] = (),
    ranks: Sequence[int] | None = None,
) -> dict[int, Plan]:
    """Returns the plans of several ranks. Pure.

    Args:
        manifest: The agreed model.
        topology: Ranks and stages, from any rank's point of view.
        handlers: Name and instance, in the order of the configuration (which changes nothing).
        bucket_bytes: Wire bytes at which a bucket is closed; a larger gradient travels alone.
        reduce_dtype: dtype on the wire; the gradient's own if None.
        lanes: Number of lanes; a bucket stays in lane ``index % lanes``.
        stage_ticks: For each stage when its gradients are final, in any unit. By default stages
            become final from the last to the first, as in every 1F1B-like schedule.
        shared_ticks: The same for gradients that stages on several ranks hold; by default
            `stage_ticks`.
        allow_unsynced: Shell-style patterns of keys or names that may stay without a reduction.
        ranks: Whose plans; all by default.

    Raises:
        PlanError: If handlers contradict each other or the topology, or leave a tie uncovered.
    """
    routes = make_routes(manifest, topology, handlers, allow_unsynced)
    alone = stage_ticks or range(topology.num_stages - 1, -1, -1)
    shared = shared_ticks or alone
    records = {r.key: r for rank in routes for r in manifest.records(topology.at(rank))}
    agreed = [(records[key], route) for key, route in shared_routes(routes).items()]
    gradients = [
        _Kind(r, route, shared if topology.crosses(r.holders) else alone, reduce_dtype, manifest)
        for r, route in agreed
        if r.requires_grad
    ]
    buckets = _buckets(manifest, gradients, bucket_bytes)
    packs = _buckets(manifest, [_Kind(*pair, alone) for pair in agreed], bucket_bytes)
    groups = _groups(routes, buckets, lanes)
    digest = hashlib.sha256(repr((routes, buckets, packs)).encode()).hexdigest()
    plans: dict[int, Plan] = {}
    for rank in topology.ranks if ranks is None else ranks:
        view, mine = topology.at(rank), _localised(buckets, routes[rank])
        trained = [r for r in manifest.records(view) if r.requires_grad]
        plans[rank] = Plan(
            rank=rank,
            buckets=mine,
            launches=_launches(mine, rank, lanes),
            publishes=_publishes(mine, view, routes, lanes),
            shares=tuple(_shares(trained, mine, routes[rank], rank)),
            trained_numel=sum(r.numel for r in trained),
            routes=tuple(routes[rank].items()),
            packs=_localised(packs, routes[rank]),
            groups=groups,
            digest=digest,
        )
    return plans


class _Kind:
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
        back = str(self.record.dtype) if any(hop.mirrored for hop in self.route) else ""
        dtypes = (str(self.dtype), str(self.wire_dtype), back)
        return (self.ready, self.record.holders, signature(self.route), dtypes)


def _buckets(manifest: Manifest, kinds: Iterable[_Kind], capacity_bytes: int) -> list[Bucket]:
    """Cuts each kind, in reverse position, where it exceeds the capacity; numbers the result."""
    families: dict[tuple[object, ...], list[_Kind]] = {}
    for kind in sorted(kinds, key=lambda k: (k.record.position, k.record.key), reverse=True):
        families.setdefault(kind.key, []).append(kind)
    cuts = [cut for family in families.values() for cut in _cut(family, capacity_bytes)]
    # Within one tick the bucket that backward completes first goes first.
    cuts.sort(key=lambda cut: (cut[0].ready, -cut[-1].record.position, str(cut[0].key)))
    return [_bucket(index, cut, manifest) for index, cut in enumerate(cuts)]


def _cut(family: Iterable[_Kind], capacity_bytes: int) -> Iterable[list[_Kind]]:
    cut: list[_Kind] = []
    filled = 0
    for kind in family:
        nbytes = _aligned(kind.record.numel, kind.wire_dtype) * kind.wire_dtype.itemsize
        if cut and filled + nbytes > capacity_bytes:
            yield cut
            cut, filled = [], 0
        cut.append(kind)
        filled += nbytes
    yield cut


def _aligned(numel: int, dtype: torch.dtype, num_rows: int = 1) -> int:
    step = max(1, _ALIGN_BYTES // dtype.itemsize) * num_rows
    return -(-numel // step) * step


def _num_rows(route: Route) -> int:
    """Returns into how many rows a route cuts a bucket."""
    return math.prod(len(hop.ranks) for hop in route if hop.placement is Placement.SHARD)


def _bucket(index: int, cut: Sequence[_Kind], manifest: Manifest) -> Bucket:
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


def _padded(numel: int, num_flags: int, kind: _Kind) -> int:
    """Returns the elements of a payload, in rows of one size, none smaller than the flags."""
    num_rows = _num_rows(kind.route)
    behind = num_flags * num_rows if num_rows > 1 else 0
    return _aligned(max(numel, behind), kind.wire_dtype, num_rows)


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


def _localised(buckets: Iterable[Bucket], routes: Mapping[str, Route]) -> tuple[Bucket, ...]:
    """Returns the buckets of one rank, with the ranks of its own copy of each group."""
    return tuple(
        replace(bucket, route=routes[bucket.slots[0].key])
        for bucket in buckets
        if bucket.slots[0].key in routes
    )


def _launches(buckets: Iterable[Bucket], rank: int, lanes: int) -> tuple[Launch, ...]:
    """Orders a rank's collectives. See [Note: order of collectives]."""
    launches = [
        Launch(bucket.index, hop, bucket.ready + hop, bucket.index % lanes)
        for bucket in buckets
        for hop in range(hops_taken(bucket.route, rank))
    ]
    return tuple(sorted(launches, key=lambda x: (x.ready, x.hop, x.bucket)))


def _publishes(
    buckets: Iterable[Bucket], view: Topology, routes: Routes, lanes: int
) -> tuple[Publish, ...]:
    """Orders what moves back to or from a rank, by first use. See [Note: order of publishes]."""
    found = []
    for bucket in buckets:
        for number, hop in enumerate(bucket.route[: hops_taken(bucket.route, view.rank)]):
            if hop.mirrored:
                use, readers = _use(bucket, number, view, routes), _readers(bucket, hop, view)
                found.append(Publish(bucket.index, number, bucket.index % lanes, use, readers))
    return tuple(sorted(found, key=lambda x: (x.use, -x.hop, x.bucket)))


def _use(bucket: Bucket, number: int, view: Topology, routes: Routes) -> int:
    """Returns the first stage that waits for a hop's way back, or for one that comes before it."""
    hop = bucket.route[number]
    before = [
        _use(theirs, later, view.at(rank), routes)
        for rank in hop.ranks
        for theirs in _localised([bucket], routes[rank])
        for later in range(number + 1, hops_taken(theirs.route, rank))
        if theirs.route[later].mirrored
    ]
    return max(min(_readers(bucket, hop, view)), *before, 0)


def _readers(bucket: Bucket, hop: RouteHop, view: Topology) -> tuple[int, ...]:
    """Returns the stages whose parameters come by the way back along a hop."""
    taking = hop.ranks[1:] if hop.placement is Placement.OWNER else hop.ranks
    places = {view.at(rank).coordinate(view.pipeline) for rank in taking}
    return tuple(s for s in bucket.holders if view.stage_to_rank[s] in places)


# [Note: order of publishes] All that is published leaves at one point, when all gradients are
# there, and no rank waits for another's compute in it. So as long as all ranks sort by the same
# key it ends; by first use, so that the stages whose forwards come first wait least. Along a
# bucket's route it goes backwards, whatever the stages: the owner gathers rows, then passes on.


def _shares(
    records: Iterable[ParameterRecord],
    buckets: Sequence[Bucket],
    routes: Mapping[str, Route],
    rank: int,
) -> Iterator[Share]:
    """Yields what a rank's optimizer steps."""
    places = {slot.key: (bucket, slot) for bucket in buckets for slot in bucket.slots}
    for record in records:
        route = routes.get(record.key, ())
        if not has_result(route, rank):
            continue
        if _num_rows(route) == 1:
            yield Share(record.key, 0, record.numel, sharded=False)
            continue
        bucket, slot = places[record.key]
        region = bucket.region(rank, len(route))
        begin = max(region.start - slot.offset, 0)
        end = min(region.stop - slot.offset, slot.numel)
        if begin < end:
            yield Share(record.key, begin, end, sharded=True)


# [Note: order of collectives] All ranks sort by the same key, and each issues its own part of that
# one list, per lane, strictly in that order. Nothing computes while it waits for a collective
# before finish, so the least collective not yet complete can always complete: every member has
# issued all that comes before it. A bucket's hops share a lane, so a hop follows the one before it.


def _groups(
    routes: Routes, buckets: Sequence[Bucket], lanes: int
) -> tuple[tuple[tuple[int, ...], int], ...]:
    """Returns every (ranks, lane) that any rank launches on; lane 0 also makes replicas equal."""
    lane_of = {slot.key: bucket.index % lanes for bucket in buckets for slot in bucket.slots}
    wanted = {
        (hop.ranks, lane)
        for mine in routes.values()
        for key, route in mine.items()
        for hop in route
        for lane in {0, lane_of.get(key, 0)}
    }
    return tuple(sorted(wanted))
