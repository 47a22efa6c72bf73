"""Plan: everything that a rank does with gradients, in order. Pure, for any rank, and printable."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from pipegrad.errors import PlanError
from pipegrad.model.manifest import Manifest
from pipegrad.plan.buckets import (
    Bucket,
    in_few_words,
    localised,
    make_buckets,
)
from pipegrad.plan.check import check_routes, check_sums
from pipegrad.plan.options import DEFAULT_OPTIONS, GradientOptions
from pipegrad.plan.routes import (
    Divisors,
    Route,
    Routes,
    attempt,
    has_result,
    is_counted,
    make_routes,
    part_of,
    shared_routes,
    steps_taken,
)
from pipegrad.plugins.handler import GradientHandler, ParameterRecord, Placement, ReductionStep
from pipegrad.topology import Topology


@dataclass(frozen=True)
class Launch:
    """One collective: a reduction of a bucket, on a comm stream.

    Attributes:
        bucket: Index of the bucket.
        step: The number of the reduction in the bucket's route.
        ready: Tick at which it may be launched.
        comm_stream: The number of its comm stream.
    """

    bucket: int
    step: int
    ready: int
    comm_stream: int


@dataclass(frozen=True)
class Publish:
    """One parameter sync, backwards along a reduction, on the bucket's comm stream.

    Attributes:
        bucket: Index of the bucket.
        step: The number of that reduction in the bucket's route.
        comm_stream: The number of its comm stream.
        use: Sort key: the first stage, over all ranks, that waits for it. If an earlier sync of the
            same bucket has a later first use, the key is that later use.
        readers: Stages of this rank that receive parameters by it; none on an owner.
    """

    bucket: int
    step: int
    comm_stream: int
    use: int
    readers: tuple[int, ...]


@dataclass(frozen=True)
class MainRange:
    """The part of a parameter that a rank's optimizer steps.

    The elements ``begin:end``, in the order of memory. Without `sharded`, the whole parameter.
    """

    key: str
    begin: int
    end: int
    sharded: bool


@dataclass(frozen=True)
class Plan:
    """Everything one rank does with gradients, in order.

    Attributes:
        rank: The rank of this plan.
        buckets: The buckets of this rank, by index.
        launches: Its collectives, in the order of ``(ready, step, bucket)``.
        publishes: Its parameter syncs after the optimizer's step, by first use.
        main_ranges: Parts that the optimizer of this rank steps, by stage and position.
        trained_numel: Elements of all trained parameters that this rank holds.
        syncs_parameters: Whether any rank needs a parameter sync.
        routes: Key -> route, for every parameter that this rank reduces or keeps equal, also frozen
            ones. By key, because all ranks make copies equal in this order.
        groups: Process groups of all ranks, as (ranks, comm stream or `second_communicator` of a
            comm stream). All ranks make them in this order.
        digest: Digest of the routes and buckets of all ranks. Plans with equal digests fit
            together.
        divisors: Key -> divisor of its gradient before it is sent, if that is not 1.
        independent_axes: Data dimensions along which replicas train alone; mostly none.
        independent_by: Name of the handler that joins them; "" if there is none.
        matrices: Keys of the parameters of all ranks that a handler reduces with WHOLE, also over
            a single rank.
    """

    rank: int
    buckets: tuple[Bucket, ...]
    launches: tuple[Launch, ...]
    publishes: tuple[Publish, ...]
    main_ranges: tuple[MainRange, ...]
    trained_numel: int
    syncs_parameters: bool
    routes: tuple[tuple[str, Route], ...]
    groups: tuple[tuple[tuple[int, ...], int], ...]
    digest: str
    divisors: tuple[tuple[str, float], ...] = ()
    independent_axes: tuple[str, ...] = ()
    independent_by: str = ""
    matrices: frozenset[str] = frozenset()

    @cached_property
    def _bucket(self) -> dict[int, Bucket]:
        return {bucket.index: bucket for bucket in self.buckets}

    @cached_property
    def reduced_bytes(self) -> int:
        """Bytes that this rank's collectives reduce in one step."""
        return sum(self._bucket[x.bucket].nbytes(x.step, self.rank) for x in self.launches)

    @cached_property
    def published_bytes(self) -> int:
        """Bytes of parameters that this rank sends or receives in the parameter sync of a step."""
        return sum(
            self._bucket[x.bucket].parameter_nbytes(x.step, self.rank) for x in self.publishes
        )

    @property
    def chains(self) -> frozenset[tuple[int, ...]]:
        """Sets of ranks that run reduce chains, broadcast chains or pair exchanges."""
        steps = [step for _, route in self.routes for step in route]
        return frozenset(step.ranks for step in steps if step.is_point_to_point)

    @property
    def launching(self) -> frozenset[str]:
        """Names of the handlers that launch a collective on this rank, or join replicas."""
        steps = (self._bucket[x.bucket].route[x.step] for x in self.launches)
        return frozenset({self.independent_by, *(step.handler for step in steps)} - {""})

    @property
    def sharded(self) -> frozenset[str]:
        """Keys of this rank's parameters that ranks step in shards."""
        return frozenset(
            key
            for key, route in self.routes
            if any(step.placement is Placement.SHARD for step in route)
        )

    @property
    def main_numel(self) -> int:
        """Elements that this rank's optimizer steps, and keeps state of."""
        return sum(main_range.end - main_range.begin for main_range in self.main_ranges)

    def __str__(self) -> str:
        lines = [
            (
                f"rank {self.rank}: {len(self.buckets)} buckets, {len(self.launches)} collectives, "
                f"{self.reduced_bytes / 2**20:.2f} MiB a step; the optimizer steps "
                f"{self.main_numel:,} of {self.trained_numel:,} elements"
            )
        ]
        if whole := [m.key for m in self.main_ranges if m.key in self.matrices and not m.sharded]:
            lines.append(f"it steps whole: {in_few_words(whole)}")
        for divisor in sorted({divisor for _, divisor in self.divisors}):
            keys = [key for key, by in self.divisors if by == divisor]
            lines.append(f"divided by {divisor:g} before they leave: {in_few_words(keys)}")
        if self.launches:
            lines.append("launch  bucket  stream  ready  MiB        reduction")
        for number, launch in enumerate(self.launches):
            bucket = self._bucket[launch.bucket]
            step, nbytes = bucket.route[launch.step], bucket.nbytes(launch.step, self.rank)
            lines.append(
                f"{number:<8}{bucket.index:<8}{launch.comm_stream:<8}{launch.ready:<7}"
                f"{nbytes / 2**20:<11.3f}{step} over ranks {list(step.ranks)}: {bucket.names}"
            )
        if self.publishes:
            lines.append("publish bucket  stream  for stages        MiB        movement")
        for number, publish in enumerate(self.publishes):
            bucket = self._bucket[publish.bucket]
            step = bucket.route[publish.step]
            nbytes = bucket.parameter_nbytes(publish.step, self.rank)
            readers = ", ".join(map(str, publish.readers)) or "others"
            lines.append(
                f"{number:<8}{publish.bucket:<8}{publish.comm_stream:<8}{readers:<18}"
                f"{nbytes / 2**20:<11.3f}back along {step} over ranks {list(step.ranks)}"
            )
        if self.independent_axes:
            axes = "+".join(self.independent_axes)
            lines.append(f"replicas along {axes} train alone, joined by {self.independent_by}")
        return "\n".join(lines)


def make_plan(
    manifest: Manifest,
    topology: Topology,
    handlers: Sequence[tuple[str, GradientHandler]],
    options: GradientOptions = DEFAULT_OPTIONS,
) -> Plan:
    """Returns the plan of ``topology.rank``. Pure: any rank's plan can be made on any machine.

    See `make_plans` for arguments and errors.
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
        topology: Ranks and stages, from the view of any rank.
        handlers: Name and instance. Their order changes nothing.
        options: Options of the gradient layer.
        ranks: The ranks of the plans; all by default.

    Raises:
        PlanError: If handlers contradict each other or the topology, or leave a tie uncovered.
    """
    # Bucket numbers and communicators need no further message, because every rank computes this
    # from the same manifest, with the same result. `digest` is compared as a check.
    routes, divisors, matrices = make_routes(manifest, topology, handlers)
    check_routes(manifest, topology, routes, options.allow_unsynced)
    axes, by = independent_axes(manifest, topology, handlers, routes)
    shared = shared_routes(routes)
    buckets = make_buckets(
        [r for r in manifest.parameters if r.requires_grad and r.key in shared],
        shared,
        manifest=manifest,
        topology=topology,
        divisors=divisors,
        options=options,
    )
    check_sums(buckets, dict(handlers))
    # The shared routes are enough, because `check_routes` has checked that the mesh and a
    # parameter's route on one rank determine its routes on all ranks.
    decided = (topology.axes, topology.ranks, shared, buckets, divisors, axes, by)
    of_rank = partial(
        Plan,
        syncs_parameters=any(bucket.syncs_parameters for bucket in buckets),
        groups=_groups(topology, axes, routes, buckets, options.comm_streams),
        digest=hashlib.sha256(repr(decided).encode()).hexdigest(),
        independent_axes=axes,
        independent_by=by,
        matrices=matrices,
    )
    return {
        rank: _plan_of(
            of_rank,
            topology.at(rank),
            manifest,
            options,
            routes=routes,
            divisors=divisors,
            buckets=buckets,
        )
        for rank in (topology.ranks if ranks is None else ranks)
    }


def _plan_of(
    of_rank: Callable[..., Plan],
    view: Topology,
    manifest: Manifest,
    options: GradientOptions,
    *,
    routes: Routes,
    divisors: Divisors,
    buckets: Iterable[Bucket],
) -> Plan:
    """Makes the plan of ``view.rank``; `of_rank` has the fields that are equal on all ranks."""
    rank, route_of = view.rank, routes[view.rank]
    held = manifest.records(view)
    trained = [record for record in held if record.requires_grad]
    shapes = {r.key: shard.shape for r in held if (shard := manifest.shard(rank, r.key))}
    local = localised(buckets, route_of, shapes)
    return of_rank(
        rank=rank,
        buckets=local,
        launches=_launches(local, rank, options.comm_streams),
        publishes=_publishes(local, view, routes, options.comm_streams),
        main_ranges=tuple(_main_ranges(trained, local, route_of, rank)),
        trained_numel=sum(record.numel for record in trained),
        routes=tuple(sorted(route_of.items())),
        divisors=tuple((r.key, divisors[r.key]) for r in held if r.key in divisors),
    )


def buckets_alone(manifest: Manifest, plan: Plan, view: Topology) -> tuple[Bucket, ...]:
    """Returns buckets for gradients of a rank without a reduction, with negative numbers."""
    reduced = {slot.key for bucket in plan.buckets for slot in bucket.slots}
    held = [r for r in manifest.records(view) if r.requires_grad and r.key not in reduced]
    shapes = {r.key: shard.shape for r in held if (shard := manifest.shard(view.rank, r.key))}
    routes = dict.fromkeys([r.key for r in held], ())
    buckets = make_buckets(
        held,
        routes,
        manifest=manifest,
        topology=view,
        divisors=dict(plan.divisors),
        options=GradientOptions(bucket_bytes=sys.maxsize),
    )
    alone = (replace(bucket, index=~bucket.index) for bucket in buckets)
    return localised(alone, routes, shapes)


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
    """Orders the parameter syncs of a rank by first use. See [Note: order of publishes]."""
    publishes = [
        Publish(
            bucket.index,
            number,
            bucket.index % comm_streams,
            _use(bucket, number, view, routes),
            _readers(bucket, step, [view.rank], view),
        )
        for bucket in buckets
        for number, step in enumerate(bucket.route[: steps_taken(bucket.route, view.rank)])
        if step.syncs_parameters
    ]
    return tuple(sorted(publishes, key=lambda x: (x.use, -x.step, x.bucket)))


def _use(bucket: Bucket, number: int, view: Topology, routes: Routes) -> int:
    """Returns the sort key of a parameter sync; see `Publish.use`."""
    # The key may not be smaller than the keys of later reductions in the route, on any member,
    # because their syncs come first: this sync sends their result.
    step = bucket.route[number]
    before = [
        _use(on_rank, later, view.at(rank), routes)
        for rank in step.ranks
        for on_rank in localised([bucket], routes[rank])
        for later in range(number + 1, steps_taken(on_rank.route, rank))
        if on_rank.route[later].syncs_parameters
    ]
    return max(min(_readers(bucket, step, step.ranks, view)), *before, 0)


def _readers(
    bucket: Bucket, step: ReductionStep, ranks: Sequence[int], view: Topology
) -> tuple[int, ...]:
    """Returns the stages on `ranks` that receive parameters by the sync along a reduction."""
    owner = step.owner if step.placement is Placement.OWNER else None
    locations = {view.at(rank).coordinate(view.pipeline) for rank in ranks if rank != owner}
    return tuple(s for s in bucket.holders if view.stage_to_rank[s] in locations)


# [Note: order of publishes] All parameter syncs end if all ranks sort them by the same key, because
# they are launched at one point, after the optimizer's step, and none of them waits for a compute
# of another rank. The key is the first use: stages whose forwards come first wait least. Along the
# route of a bucket, the syncs run backwards: the owner gathers shards first, and then sends the
# whole parameters. See step 9 of the journey of a gradient.


def _main_ranges(
    records: Iterable[ParameterRecord],
    buckets: Sequence[Bucket],
    routes: Mapping[str, Route],
    rank: int,
) -> Iterator[MainRange]:
    """Yields the part of each parameter that a rank's optimizer steps."""
    locations = {slot.key: (bucket, slot) for bucket in buckets for slot in bucket.slots}
    for record in records:
        route = routes.get(record.key, ())
        if not has_result(route, rank):
            continue
        part = range(record.numel)
        if any(step.placement.scatters for step in route):
            bucket, slot = locations[record.key]
            part = slot.within(bucket.region(rank, len(route)))
            if not part:
                continue
        sharded = any(step.placement is Placement.SHARD for step in route)
        yield MainRange(record.key, part.start, part.stop, sharded=sharded)


# [Note: order of collectives] There is one list of all collectives, sorted by one key. Each rank
# launches its part of the list in this order, on each comm stream. Computes always go on, because
# no rank waits for a collective before `finish`. The first collective of the list that is not
# complete can always complete, because all its members have launched everything before it. All
# reductions of a bucket are on one comm stream, because each must start after the previous one. See
# step 5 of the journey of a gradient.


def second_communicator(comm_stream: int) -> int:
    """Returns the number of a comm stream's second communicator, for pair exchanges."""
    # Use a second one, because the receive of the first message is posted early: on the same
    # communicator it would block the message in the other direction, as NCCL has no tags.
    return ~comm_stream


def _groups(
    topology: Topology,
    independent: tuple[str, ...],
    routes: Routes,
    buckets: Sequence[Bucket],
    comm_streams: int,
) -> tuple[tuple[tuple[int, ...], int], ...]:
    """Returns (ranks, comm stream) of all process groups of all ranks, in a fixed order."""
    comm_stream_of = {
        slot.key: bucket.index % comm_streams for bucket in buckets for slot in bucket.slots
    }
    # Distinguish steps by identity, because comparing ranks would take long: a group may have
    # thousands of ranks, and each of them has the step in its routes.
    used = {
        (id(step), comm_stream_of.get(key)): step
        for by_key in routes.values()
        for key, route in by_key.items()
        for step in route
    }
    alone = topology.ranks if independent else ()
    specs = {(topology.at(rank).ranks_along(independent), 0) for rank in alone}
    for (_, comm_stream), step in used.items():
        # Add comm stream 0 for every set of ranks, because it makes replicas equal before the first
        # step.
        specs |= {(step.ranks, 0), (step.ranks, comm_stream or 0)}
        if comm_stream is not None and step.is_pair:
            specs.add((step.ranks, second_communicator(comm_stream)))
    # Sort, because torch requires that all ranks make all groups in one order, and each rank
    # computes this alone.
    return tuple(sorted(specs))


def independent_axes(
    manifest: Manifest,
    topology: Topology,
    handlers: Sequence[tuple[str, GradientHandler]],
    routes: Routes,
) -> tuple[tuple[str, ...], str]:
    """Returns the dimensions of several ranks along which replicas train alone, and the handler.

    Raises:
        PlanError: If several handlers have such dimensions, if they are not of data, if a gradient
            is reduced along them, or if replicas step different parts.
    """
    independent = [
        (name, axes) for name, handler in handlers if (axes := _axes(name, handler, topology))
    ]
    if not independent:
        return (), ""
    (name, axes), *others = independent
    if others or not set(axes) <= set(topology.data_axes):
        listing = " and ".join(f"along {'+'.join(a)!r} by handler {by!r}" for by, a in independent)
        raise PlanError(
            f"replicas train alone {listing}: expected one handler, and one or several dimensions "
            f"of {list(topology.data_axes)}, along which ranks see different data"
        )
    replica = {rank: topology.at(rank).coordinate(axes) for rank in topology.ranks}
    # By identity, because comparing steps of thousands of ranks takes long.
    steps = {id(s): s for by_key in routes.values() for route in by_key.values() for s in route}
    reducing: list[tuple[str, Sequence[int]]] = [
        *((f"handler {s.handler!r} reduces gradients by {s}", s.ranks) for s in steps.values()),
        *(
            (f"DistributedDataParallel reduces gradients of stage {stage}", topology.ranks)
            for stage in manifest.reduced_by_ddp
        ),
        *(
            (f"'{stage}.{name}' is a DTensor, whose gradient is reduced", shard.members)
            for parts in manifest.shards.values()
            for (stage, name), shard in parts.items()
        ),
    ]
    for subject, ranks in reducing:
        if len({replica[rank] for rank in ranks}) > 1:
            raise PlanError(
                f"{subject} over ranks {list(ranks)}, of replicas that train alone along "
                f"{'+'.join(axes)!r} and are joined by handler {name!r}: drop one of them, or give "
                f"each an axis of its own"
            )
    for rank, by_key in routes.items():
        other = topology.at(rank).ranks_along(axes)[0]
        for key, route in by_key.items():
            there = routes[other].get(key, ())
            if _updated_part(route, rank) != _updated_part(there, other):
                raise PlanError(
                    f"{key!r}: rank {rank} and rank {other}, of replicas that train alone, step "
                    f"different parts of it: number the ranks so that they ascend along every "
                    f"dimension of the mesh"
                )
    return axes, name


def _updated_part(route: Route, rank: int) -> tuple[list[int | bool], bool]:
    """Returns the part of a parameter that a rank steps, and True if it counts in a norm."""
    return part_of(route, len(route), rank), is_counted(route, rank)


def _axes(name: str, handler: GradientHandler, topology: Topology) -> tuple[str, ...]:
    """Returns the dimensions of a handler that have several ranks."""
    return attempt(
        f"{name!r}: independent_axes()",
        lambda: tuple(a for a in handler.independent_axes(topology) if topology.size(a) > 1),
    )
