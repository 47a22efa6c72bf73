"""Plan: what a rank does with gradients, in order. Pure and printable, for any rank, offline."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from pipegrad.model.manifest import Manifest
from pipegrad.plan.buckets import (
    Bucket,
    Kind,
    in_few_words,
    localised,
    make_buckets,
    num_shards,
)
from pipegrad.plan.build_routes import make_routes
from pipegrad.plan.options import DEFAULT_OPTIONS, GradientOptions
from pipegrad.plan.routes import (
    Divisors,
    Route,
    Routes,
    has_result,
    shared_routes,
    steps_taken,
)
from pipegrad.plugins.handler import GradientHandler, ParameterRecord, Placement, ReductionStep
from pipegrad.topology import Topology


@dataclass(frozen=True)
class Launch:
    """One collective: a reduction of a bucket, in its comm stream.

    Attributes:
        bucket: Its index.
        step: The number of the reduction in the bucket's route.
        ready: Tick at which it may leave.
        comm_stream: Where it runs.
    """

    bucket: int
    step: int
    ready: int
    comm_stream: int


@dataclass(frozen=True)
class Publish:
    """One movement of updated parameters, back along a reduction, in the bucket's comm stream.

    Attributes:
        bucket: Whose parameters.
        step: The number of that reduction in the bucket's route.
        comm_stream: Where.
        use: Its place in the order: the first stage, over all ranks, that waits for it, unless one
            that comes before it on the way is waited for later.
        readers: Stages of this rank whose parameters come by it: none of an owner's.
    """

    bucket: int
    step: int
    comm_stream: int
    use: int
    readers: tuple[int, ...]


@dataclass(frozen=True)
class MainRange:
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
        launches: Its collectives, in the order of ``(ready, step, bucket)``.
        publishes: What moves back after the optimizer's step, by first use.
        shares: What the optimizer steps on this rank, by stage and position.
        trained_numel: Elements of all trained parameters that this rank holds.
        moves: Whether updated parameters move back on any rank.
        routes: Key -> route, for every parameter that this rank reduces or keeps equal.
        packs: Buckets of parameters (frozen ones too), for making replicas equal.
        groups: Process groups of all ranks, as (ranks, comm stream, or `way_back` of one): made by
            every rank in this order.
        digest: Of all ranks' routes and buckets: equal on ranks whose plans fit together.
        divisors: Key -> what its gradient is divided by before it leaves, where that is not 1.
    """

    rank: int
    buckets: tuple[Bucket, ...]
    launches: tuple[Launch, ...]
    publishes: tuple[Publish, ...]
    main_ranges: tuple[MainRange, ...]
    trained_numel: int
    moves: bool
    routes: tuple[tuple[str, Route], ...]
    packs: tuple[Bucket, ...]
    groups: tuple[tuple[tuple[int, ...], int], ...]
    digest: str
    divisors: tuple[tuple[str, float], ...] = ()

    @cached_property
    def reduced_bytes(self) -> int:
        """Bytes that this rank's collectives reduce in one step."""
        buckets = {bucket.index: bucket for bucket in self.buckets}
        return sum(buckets[launch.bucket].nbytes(launch.step) for launch in self.launches)

    @cached_property
    def published_bytes(self) -> int:
        """Bytes of parameters that move back to this rank, or from it, in one step."""
        buckets = {bucket.index: bucket for bucket in self.buckets}
        return sum(
            buckets[publish.bucket].parameter_nbytes(publish.step) for publish in self.publishes
        )

    @property
    def chains(self) -> frozenset[tuple[int, ...]]:
        """Ranks that hand gradients down, one to the next, and what becomes of them up."""
        steps = [step for _, route in self.routes for step in route]
        return frozenset(step.ranks for step in steps if step.is_point_to_point)

    @property
    def launching(self) -> frozenset[str]:
        """Names of the handlers that launch a collective on this rank."""
        routes = {bucket.index: bucket.route for bucket in self.buckets}
        return frozenset(routes[x.bucket][x.step].handler for x in self.launches)

    @property
    def main_numel(self) -> int:
        """Elements that this rank's optimizer steps, and keeps state of."""
        return sum(main_range.end - main_range.begin for main_range in self.main_ranges)

    def __str__(self) -> str:
        summary = (
            f"rank {self.rank}: {len(self.buckets)} buckets, {len(self.launches)} collectives, "
            f"{self.reduced_bytes / 2**20:.2f} MiB a step; the optimizer steps "
            f"{self.main_numel:,} of {self.trained_numel:,} elements"
        )
        lines = [summary]
        for divisor in sorted({divisor for _, divisor in self.divisors}):
            keys = [key for key, by in self.divisors if by == divisor]
            lines.append(f"divided by {divisor:g} before they leave: {in_few_words(keys)}")
        if self.launches:
            lines.append("launch  bucket  stream  ready  MiB        reduction")
        buckets = {bucket.index: bucket for bucket in self.buckets}
        for number, launch in enumerate(self.launches):
            bucket = buckets[launch.bucket]
            step = bucket.route[launch.step]
            lines.append(
                f"{number:<8}{bucket.index:<8}{launch.comm_stream:<8}{launch.ready:<7}"
                f"{bucket.nbytes(launch.step) / 2**20:<11.3f}{step} over ranks {list(step.ranks)}: "
                f"{bucket.names}"
            )
        if self.publishes:
            lines.append("publish bucket  stream  for stages        MiB        movement")
        for number, publish in enumerate(self.publishes):
            step = buckets[publish.bucket].route[publish.step]
            readers = ", ".join(map(str, publish.readers)) or "others"
            lines.append(
                f"{number:<8}{publish.bucket:<8}{publish.comm_stream:<8}{readers:<18}"
                f"{buckets[publish.bucket].parameter_nbytes(publish.step) / 2**20:<11.3f}"
                f"back along {step} over ranks {list(step.ranks)}"
            )
        return "\n".join(lines)


def make_plan(
    manifest: Manifest,
    topology: Topology,
    handlers: Sequence[tuple[str, GradientHandler]],
    options: GradientOptions = DEFAULT_OPTIONS,
) -> Plan:
    """Returns the plan of ``topology.rank``. Pure: any rank's plan can be made on any machine.

    Takes what `make_plans` takes, and raises what it raises.
    """
    return make_plans(manifest, topology, handlers, options, ranks=[topology.rank])[topology.rank]


def make_plans(
    manifest: Manifest,
    topology: Topology,
    handlers: Sequence[tuple[str, GradientHandler]],
    options: GradientOptions = DEFAULT_OPTIONS,
    *,
    ranks: Sequence[int] | None = None,
) -> dict[int, Plan]:
    """Returns the plans of several ranks. Pure.

    Args:
        manifest: The agreed model.
        topology: Ranks and stages, from any rank's point of view.
        handlers: Name and instance, in the order of the configuration (which changes nothing).
        options: Of the gradient layer.
        ranks: Whose plans; all by default.

    Raises:
        PlanError: If handlers contradict each other or the topology, or leave a tie uncovered.
    """
    shared = _plan_shared(manifest, topology, handlers, options)
    chosen = topology.ranks if ranks is None else ranks
    return {rank: _plan_of(topology.at(rank), manifest, shared, options) for rank in chosen}


@dataclass(frozen=True)
class _Shared:
    """The part of a plan that is the same on all ranks."""

    routes: Routes
    divisors: Divisors
    buckets: tuple[Bucket, ...]
    packs: tuple[Bucket, ...]
    groups: tuple[tuple[tuple[int, ...], int], ...]
    digest: str


def _plan_shared(
    manifest: Manifest,
    topology: Topology,
    handlers: Sequence[tuple[str, GradientHandler]],
    options: GradientOptions,
) -> _Shared:
    """Makes the routes and buckets of all ranks."""
    routes, divisors = make_routes(manifest, topology, handlers, options.allow_unsynced)
    alone = options.stage_ticks or range(topology.num_stages - 1, -1, -1)
    several = options.shared_ticks or alone
    records = {r.key: r for rank in routes for r in manifest.records(topology.at(rank))}
    agreed = [(records[key], route) for key, route in shared_routes(routes).items()]
    gradients = [
        Kind(
            record,
            route,
            several if topology.crosses(record.holders) else alone,
            options.reduce_dtype,
            manifest,
        )
        for record, route in agreed
        if record.requires_grad
    ]
    buckets = tuple(make_buckets(manifest, gradients, options.bucket_bytes))
    kinds = [Kind(*pair, alone) for pair in agreed]
    packs = tuple(make_buckets(manifest, kinds, options.bucket_bytes))
    return _Shared(
        routes=routes,
        divisors=divisors,
        buckets=buckets,
        packs=packs,
        groups=_groups(routes, buckets, options.comm_streams),
        digest=hashlib.sha256(repr((routes, buckets, packs, divisors)).encode()).hexdigest(),
    )


def _plan_of(view: Topology, manifest: Manifest, shared: _Shared, options: GradientOptions) -> Plan:
    """Makes the plan of ``view.rank``."""
    rank, route_of = view.rank, shared.routes[view.rank]
    held = manifest.records(view)
    trained = [record for record in held if record.requires_grad]
    shards = {record.key: manifest.shard(rank, record.key) for record in held}
    shapes = {key: shard.shape for key, shard in shards.items() if shard is not None}
    buckets = localised(shared.buckets, route_of, shapes)
    return Plan(
        rank=rank,
        buckets=buckets,
        launches=_launches(buckets, rank, options.comm_streams),
        publishes=_publishes(buckets, view, shared.routes, options.comm_streams),
        main_ranges=tuple(_main_ranges(trained, buckets, route_of, rank)),
        trained_numel=sum(record.numel for record in trained),
        moves=any(bucket.syncs_parameters for bucket in shared.buckets),
        routes=tuple(route_of.items()),
        packs=localised(shared.packs, route_of, shapes),
        groups=shared.groups,
        digest=shared.digest,
        divisors=tuple((r.key, shared.divisors[r.key]) for r in held if r.key in shared.divisors),
    )


def _launches(buckets: Iterable[Bucket], rank: int, comm_streams: int) -> tuple[Launch, ...]:
    """Orders a rank's collectives. See [Note: order of collectives]."""
    launches = [
        Launch(bucket.index, step, bucket.ready + step, bucket.index % comm_streams)
        for bucket in buckets
        for step in range(steps_taken(bucket.route, rank))
    ]
    return tuple(sorted(launches, key=lambda x: (x.ready, x.step, x.bucket)))


def _publishes(
    buckets: Iterable[Bucket], view: Topology, routes: Routes, comm_streams: int
) -> tuple[Publish, ...]:
    """Orders what moves back to or from a rank, by first use. See [Note: order of publishes]."""
    found = []
    for bucket in buckets:
        for number, step in enumerate(bucket.route[: steps_taken(bucket.route, view.rank)]):
            if step.syncs_parameters:
                use = _use(bucket, number, view, routes)
                readers = _readers(bucket, step, [view.rank], view)
                found.append(
                    Publish(bucket.index, number, bucket.index % comm_streams, use, readers)
                )
    return tuple(sorted(found, key=lambda x: (x.use, -x.step, x.bucket)))


def _use(bucket: Bucket, number: int, view: Topology, routes: Routes) -> int:
    """Returns the first stage that waits for the parameters of a reduction, or of one behind it."""
    step = bucket.route[number]
    before = [
        _use(theirs, later, view.at(rank), routes)
        for rank in step.ranks
        for theirs in localised([bucket], routes[rank])
        for later in range(number + 1, steps_taken(theirs.route, rank))
        if theirs.route[later].syncs_parameters
    ]
    return max(min(_readers(bucket, step, step.ranks, view)), *before, 0)


def _readers(
    bucket: Bucket, step: ReductionStep, ranks: Sequence[int], view: Topology
) -> tuple[int, ...]:
    """Returns the stages on some of a reduction's ranks whose parameters come by its way back."""
    owner = step.owner if step.placement is Placement.OWNER else None
    locations = {view.at(rank).coordinate(view.pipeline) for rank in ranks if rank != owner}
    return tuple(s for s in bucket.holders if view.stage_to_rank[s] in locations)


# [Note: order of publishes] All that is published leaves at one point, when all gradients are
# there, and no rank waits for another's compute in it. So as long as all ranks sort by the same
# key it ends; by first use, so that the stages whose forwards come first wait least. Along a
# bucket's route it goes backwards, whatever the stages: the owner gathers shards, then passes on.


def _main_ranges(
    records: Iterable[ParameterRecord],
    buckets: Sequence[Bucket],
    routes: Mapping[str, Route],
    rank: int,
) -> Iterator[MainRange]:
    """Yields what a rank's optimizer steps."""
    locations = {slot.key: (bucket, slot) for bucket in buckets for slot in bucket.slots}
    for record in records:
        route = routes.get(record.key, ())
        if not has_result(route, rank):
            continue
        if num_shards(route) == 1:
            yield MainRange(record.key, 0, record.numel, sharded=False)
            continue
        bucket, slot = locations[record.key]
        part = slot.within(bucket.region(rank, len(route)))
        if part:
            yield MainRange(record.key, part.start, part.stop, sharded=True)


# [Note: order of collectives] All ranks sort by the same key, and each issues its own part of that
# one list, per comm stream, strictly in that order. Nothing computes while it waits for a
# collective before finish, so the least collective not yet complete can always complete: every
# member has issued all that comes before it. A bucket's reductions share a comm stream, so each
# follows the one before it.


def way_back(comm_stream: int) -> int:
    """Returns the number of a comm stream's other communicator, for what two ranks exchange."""
    return ~comm_stream


def _groups(
    routes: Routes, buckets: Sequence[Bucket], comm_streams: int
) -> tuple[tuple[tuple[int, ...], int], ...]:
    """Returns every (ranks, comm stream) of any rank; comm stream 0 also makes replicas equal."""
    comm_stream_of = {
        slot.key: bucket.index % comm_streams for bucket in buckets for slot in bucket.slots
    }
    exchanged = {
        (step.ranks, way_back(comm_stream_of[key]))
        for mine in routes.values()
        for key, route in mine.items()
        for step in route
        if key in comm_stream_of and step.exchange != "all-reduce"
    }
    wanted = exchanged | {
        (step.ranks, comm_stream)
        for mine in routes.values()
        for key, route in mine.items()
        for step in route
        for comm_stream in {0, comm_stream_of.get(key, 0)}
    }
    return tuple(sorted(wanted))
