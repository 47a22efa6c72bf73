"""Routes: every gradient's reductions, in order, as all ranks must see them. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from pipegrad.errors import PlanError, in_words
from pipegrad.gradients.shared import matches_any
from pipegrad.handler import (
    Exchange,
    GradientHandler,
    Op,
    ParameterRecord,
    Placement,
    Reduction,
)

if TYPE_CHECKING:
    from pipegrad.gradients.manifest import Manifest
    from pipegrad.topology import Topology

_ORDER = (Placement.OWNER, Placement.SHARD, Placement.REPLICATE)


@dataclass(frozen=True)
class RouteHop:
    """One reduction of a route: which mesh axes it spans, and over which ranks here.

    Attributes:
        axes: The ranks along the mesh dimensions (``"dp"``, ``"pp[0,3]"``): alike on every copy.
        ranks: Global ranks, ascending, of this copy.
        op: Sum or mean.
        placement: Where the result lives.
        handler: Name of the handler that asked for it.
        exchange: How the result gets there.
    """

    axes: str
    ranks: tuple[int, ...]
    op: Op
    placement: Placement
    handler: str
    exchange: Exchange = "all-reduce"

    @property
    def signature(self) -> tuple[str, ...]:
        """What this hop is, whichever copy of the group one looks at."""
        return (self.axes, self.op, self.placement.value, self.handler, self.exchange)

    @property
    def mirrored(self) -> bool:
        """Whether updated parameters come back along it."""
        return self.placement is not Placement.REPLICATE

    @property
    def handed_down(self) -> bool:
        """Whether a rank's part goes to the one before it, which expects it when a step begins."""
        return self.placement is Placement.OWNER or self.exchange != "all-reduce"

    def spans(self, axis: str) -> bool:
        """Whether it goes along this mesh dimension; unknown, so False, for ``"ranks[..]"``."""
        return axis in {part.partition("[")[0] for part in self.axes.split("+")}

    def __str__(self) -> str:
        exchange = "" if self.exchange == "all-reduce" else f"{self.exchange}-"
        return f"{exchange}{self.placement.value}-{self.op}({self.axes})"


Route = tuple[RouteHop, ...]

Routes = Mapping[int, Mapping[str, Route]]
"""Rank -> key -> route, by ascending rank."""

Divisors = Mapping[str, float]
"""Key -> what its gradient is divided by before it leaves, where that is not 1."""


def make_routes(
    manifest: Manifest,
    topology: Topology,
    handlers: Sequence[tuple[str, GradientHandler]],
    allow_unsynced: Sequence[str],
) -> tuple[Routes, Divisors]:
    """Returns every rank's routes, checked against each other, and what gradients are divided by.

    Raises:
        PlanError: If handlers contradict each other or the topology, or leave a tie uncovered.
    """
    for name, handler in handlers:
        _check_options(name, handler, manifest, topology)
    asked = {r: _asked_of_all(manifest, topology.at(r), handlers) for r in sorted(topology.ranks)}
    routes = {r: _routes(manifest, topology.at(r), asked[r]) for r in asked}
    _check_members(routes)
    _check_copies(manifest, topology, routes)
    _check_places(routes)
    _check_wrappers(manifest, topology, routes)
    _check_shards(manifest, topology, routes)
    _check_left_out(manifest, topology, routes, allow_unsynced)
    _check_ties(manifest, topology, routes, allow_unsynced)
    return routes, _divisors(manifest, topology, asked)


Asked = Sequence[tuple[str, Reduction]]


def _asked_of_all(
    manifest: Manifest, topology: Topology, handlers: Sequence[tuple[str, GradientHandler]]
) -> Asked:
    """Returns what all handlers say on one rank, each reduction with its handler's name."""
    records = manifest.records(topology)
    known = set(records)
    asked = []
    for name, handler in handlers:
        for reduction in _asked(name, handler, records, topology):
            _check_reduction(name, reduction, known, topology)
            if handler.hook is not None:
                _check_hooked(name, reduction)
            asked.append((name, reduction))
    return asked


def _routes(manifest: Manifest, topology: Topology, asked: Asked) -> dict[str, Route]:
    """Returns key -> route on one rank, without the hops that would stay on that rank."""
    hops: dict[str, list[RouteHop]] = {r.key: [] for r in manifest.records(topology)}
    for name, reduction in asked:
        ranks = tuple(sorted(reduction.ranks))
        if len(ranks) > 1:
            axes = topology.axes_of(ranks)
            hop = RouteHop(axes, ranks, reduction.op, reduction.placement, name, reduction.exchange)
            hops[reduction.record.key].append(hop)
    return {key: _ordered(key, route, topology) for key, route in hops.items() if route}


def _divisors(manifest: Manifest, topology: Topology, asked: Mapping[int, Asked]) -> Divisors:
    """Returns what gradients are divided by: alike on all copies, or sums would be weighted."""
    agreed: dict[str, tuple[float, int]] = {}
    for rank, mine in asked.items():
        here = dict.fromkeys((r.key for r in manifest.records(topology.at(rank))), 1.0)
        for _, reduction in mine:
            here[reduction.record.key] *= reduction.divisor
        for key, divisor in here.items():
            there, other = agreed.setdefault(key, (divisor, rank))
            if divisor != there:
                both = [*mine, *asked[other]]
                names = {n for n, r in both if r.record.key == key and r.divisor != 1}
                raise PlanError(
                    f"the gradient of {key!r} is divided by {divisor:g} on rank {rank}, but by "
                    f"{there:g} on rank {other}: handlers {sorted(names)} must give one divisor "
                    f"on all ranks that hold it"
                )
    return {key: divisor for key, (divisor, _) in agreed.items() if divisor != 1}


def _check_options(
    name: str, handler: GradientHandler, manifest: Manifest, topology: Topology
) -> None:
    """Lets a handler see the whole model; what it raises names it."""
    try:
        handler.check(manifest.parameters, topology)
    except Exception as error:
        raise PlanError(f"handler {name!r}: check() failed: {in_words(error)}") from error


def _asked(
    name: str,
    handler: GradientHandler,
    records: Sequence[ParameterRecord],
    topology: Topology,
) -> list[Reduction]:
    """Returns what a handler says on one rank; what it raises names it."""
    try:
        asked = list(handler.reductions(records, topology))
    except Exception as error:
        raise PlanError(
            f"handler {name!r}: reductions() of rank {topology.rank} failed: {in_words(error)}"
        ) from error
    for reduction in asked:
        if not isinstance(reduction, Reduction):
            raise PlanError(
                f"handler {name!r}: reductions() of rank {topology.rank} gave {reduction!r}, "
                f"expected Reductions"
            )
    return asked


def _check_reduction(
    name: str, reduction: Reduction, known: set[ParameterRecord], topology: Topology
) -> None:
    record, ranks = reduction.record, reduction.ranks
    asked = f"handler {name!r} reduces {record.key!r} over ranks {list(ranks)}"
    if record not in known:
        raise PlanError(f"{asked} on rank {topology.rank}, which does not hold it")
    if topology.rank not in ranks or len(set(ranks)) < len(ranks):
        raise PlanError(f"{asked}: expected each rank once, and rank {topology.rank} among them")
    if not set(ranks) <= set(topology.ranks):
        raise PlanError(f"{asked}, but the topology has only ranks {list(topology.ranks)}")
    if reduction.op not in ("sum", "mean"):
        raise PlanError(f"{asked} by {reduction.op!r}: expected 'sum' or 'mean'")
    divisor = reduction.divisor
    if not 0 < divisor < math.inf:
        raise PlanError(f"{asked} with divisor {divisor!r}: expected a positive number")
    _check_exchange(asked, reduction)


def _check_exchange(asked: str, reduction: Reduction) -> None:
    if reduction.exchange not in get_args(Exchange):
        raise PlanError(
            f"{asked}, exchange {reduction.exchange!r}: expected one of {get_args(Exchange)}"
        )
    is_plain = reduction.exchange == "all-reduce" or len(reduction.ranks) == 1
    if not is_plain and (
        len(reduction.ranks) != 2 or reduction.placement is not Placement.REPLICATE
    ):
        raise PlanError(
            f"{asked}, placement {reduction.placement.value!r}, exchange {reduction.exchange!r}: "
            f"that is for the gradients of two ranks, placed by 'replicate'; give others the "
            f"exchange 'all-reduce'"
        )


def _check_hooked(name: str, reduction: Reduction) -> None:
    asked = reduction.op, reduction.placement, reduction.exchange
    if asked != ("mean", Placement.REPLICATE, "all-reduce"):
        raise PlanError(
            f"handler {name!r} has a communication hook, which leaves a mean on every rank, and "
            f"reduces {reduction.record.key!r} by {reduction.placement.value}-{reduction.op}, "
            f"{reduction.exchange}: expected replicate-mean, all-reduce; drop its hook"
        )


def _ordered(key: str, hops: Sequence[RouteHop], topology: Topology) -> Route:
    """Orders a route by placement, a reduction across stages last among its like."""
    for ranks, times in Counter(hop.ranks for hop in hops).items():
        if times > 1:
            names = [h.handler for h in hops if h.ranks == ranks]
            raise PlanError(
                f"{key!r} is reduced twice over ranks {list(ranks)}, by handlers {names}: drop one"
            )
    across = {hop: hop.spans(topology.pipeline) or hop.spans("ranks") for hop in hops}
    order = sorted(hops, key=lambda h: (_ORDER.index(h.placement), across[h], h.axes))
    for hop in order[:-1]:
        if hop.exchange != "all-reduce":  # the sum of which ends late
            raise PlanError(
                f"{key!r} is reduced by {hop}, handler {hop.handler!r}, and then by {order[-1]}: "
                f"an exchange must come last; give it the exchange 'all-reduce'"
            )
    return tuple(order)


def hops_taken(route: Route, rank: int) -> int:
    """Returns how many hops of a route `rank` takes: after OWNER the rest is the owner's."""
    for index, hop in enumerate(route):
        if hop.placement is Placement.OWNER and rank != hop.ranks[0]:
            return index + 1
    return len(route)


def has_result(route: Route, rank: int) -> bool:
    """Whether `rank` has what a route makes, or a row of it: OWNER leaves it to the owner."""
    return all(rank == h.ranks[0] for h in route if h.placement is Placement.OWNER)


def is_counted(route: Route, rank: int) -> bool:
    """Whether `rank` is the one whose result counts, of those that have the same."""
    return all(rank == h.ranks[0] for h in route if h.placement is not Placement.SHARD)


def _check_members(routes: Routes) -> None:
    """Every member of a reduction must have asked for the same one, or its peers would hang."""
    for rank, mine in routes.items():
        for key, route in mine.items():
            for hop in route:
                # All against the lowest member, and that one against all: no pair is left out.
                for member in hop.ranks if rank == hop.ranks[0] else hop.ranks[:1]:
                    theirs = routes[member].get(key, ())
                    if hop not in theirs:
                        raise PlanError(
                            f"handler {hop.handler!r}: rank {rank} reduces {key!r} by {hop} "
                            f"over ranks {list(hop.ranks)}, but rank {member} has "
                            f"{[str(h) for h in theirs] or 'no reduction of it'}; a handler must "
                            f"say the same for every rank of a reduction"
                        )


def _check_places(routes: Routes) -> None:
    """Members of a reduction must be left with the same by those before it: a row, or the sum."""
    for rank, mine in routes.items():
        for key, route in mine.items():
            for number, hop in enumerate(route[: hops_taken(route, rank)]):
                for member in hop.ranks:
                    if _left(routes[member][key], number, member) != _left(route, number, rank):
                        raise PlanError(
                            f"{key!r}: before {hop} over ranks {list(hop.ranks)}, rank {rank} and "
                            f"rank {member} are left with different parts of it: number the ranks "
                            f"so that they ascend along every dimension of the mesh"
                        )


def _left(route: Route, num_hops: int, rank: int) -> list[int | bool]:
    """Returns which part of a gradient a rank has after so many hops."""
    return [
        h.ranks.index(rank) if h.placement is Placement.SHARD else rank == h.ranks[0]
        for h in route[:num_hops]
        if h.mirrored
    ]


def _check_copies(manifest: Manifest, topology: Topology, routes: Routes) -> None:
    """Every copy of a parameter must take the same route, or the copies' buckets would differ."""
    agreed = shared_routes(routes)
    for rank, mine in routes.items():
        for record in manifest.records(topology.at(rank)):
            route, expected = mine.get(record.key, ()), agreed.get(record.key, ())
            if signature(route) != signature(expected):
                raise PlanError(
                    f"{record.key!r} takes the route {[str(h) for h in route]} on rank {rank}, but "
                    f"{[str(h) for h in expected]} on another rank that holds it: handlers "
                    f"{sorted({h.handler for h in (*route, *expected)})} must treat copies alike"
                )


def signature(route: Route) -> tuple[tuple[str, ...], ...]:
    """Returns a route without its ranks: the same on every copy of it."""
    return tuple(hop.signature for hop in route)


def _check_wrappers(manifest: Manifest, topology: Topology, routes: Routes) -> None:
    for stage, wrapper in manifest.wrappers:
        if wrapper == "FSDPModule":
            continue
        if wrapper != "DistributedDataParallel":
            raise PlanError(
                f"stage {stage} has parameters of {wrapper}, whose flat gradients pipegrad cannot "
                f"reduce: use fully_shard (FSDP2), or plain modules with handler 'data-parallel'"
            )
        rank = next(r for r in routes if stage in topology.at(r).local_stages)
        for key, route in routes[rank].items():
            held = any(s == stage for s, _ in manifest.places(key))
            for hop in route:
                if held and any(map(hop.spans, topology.data_axes)):
                    raise PlanError(
                        f"stage {stage} is wrapped by DistributedDataParallel and handler "
                        f"{hop.handler!r} reduces {key!r} over {hop.axes} too: it would be reduced "
                        f"twice; unwrap the stage, or drop the handler"
                    )


def _check_shards(manifest: Manifest, topology: Topology, routes: Routes) -> None:
    """A DTensor's own ranks reduce among themselves; along others the same parts must meet."""
    for rank, mine in routes.items():
        for key, route in mine.items():
            shard = manifest.shard(rank, key)
            if shard is None:
                continue
            layout = manifest.entries(key)[0].layout
            for hop in route:
                asked = f"handler {hop.handler!r} reduces {key!r} by {hop} over {list(hop.ranks)}"
                if hop.mirrored:
                    raise PlanError(
                        f"{asked}, but it is a DTensor, {layout}: only whole parameters can be "
                        f"stepped elsewhere; take REPLICATE, FSDP2 shards what is stepped"
                    )
                twice = set(hop.ranks) & set(shard.members)
                if len(twice) > 1:
                    of_data = twice <= set(topology.at(rank).ranks_along(topology.data_axes))
                    way_out = (
                        "drop the handler, ['pipeline-shared'] is enough"
                        if of_data
                        else "leave it out of the parameters that the handler is given"
                    )
                    raise PlanError(
                        f"{asked}, but it is a DTensor, {layout}, on ranks "
                        f"{list(shard.members)}, which reduce it among themselves: it would be "
                        f"reduced twice; {way_out}"
                    )
                places = {r: manifest.shard(r, key) for r in hop.ranks}
                parts = {r: s and (s.coordinate, s.shape) for r, s in places.items()}
                if len(set(parts.values())) > 1:
                    raise PlanError(
                        f"{asked}, where it is a DTensor, {layout}, but these ranks have different "
                        f"parts of it, (coordinate, shape): {parts}; number the ranks of its mesh "
                        f"alike in all stages"
                    )


def _check_left_out(
    manifest: Manifest, topology: Topology, routes: Routes, allow_unsynced: Sequence[str]
) -> None:
    """What FSDP2 has left out of a stage, nobody would reduce over its mesh."""
    for stage, wrapper in manifest.wrappers:
        rank = next(r for r in routes if stage in topology.at(r).local_stages)
        held = [
            (record.key, manifest.shard(rank, record.key))
            for record in manifest.records(topology.at(rank))
            if record.requires_grad and any(s == stage for s, _ in manifest.places(record.key))
        ]
        shards = [shard for _, shard in held if shard is not None]
        meshes = {shard.members for shard in shards if len(shard.members) > 1}
        if wrapper != "FSDPModule" or not meshes:
            continue
        members = min(meshes)
        for key, shard in held:
            covered = any(set(members) <= set(hop.ranks) for hop in routes[rank].get(key, ()))
            names = (key, *(name for _, name in manifest.places(key)))
            if shard is None and not covered and not matches_any(allow_unsynced, names):
                raise PlanError(
                    f"{key!r} is a whole parameter in stage {stage}, of which FSDP2 shards others "
                    f"over ranks {list(members)}, and nobody reduces its gradient over them: call "
                    f"fully_shard on the stage itself, or name it in allow_unsynced"
                )


def _check_ties(
    manifest: Manifest,
    topology: Topology,
    routes: Routes,
    allow_unsynced: Sequence[str],
) -> None:
    for rank in routes:
        view = topology.at(rank)
        for record in filter(lambda r: r.shared, manifest.records(view)):
            ranks = set(view.ranks_of(record.holders))
            covered = any(ranks <= set(hop.ranks) for hop in routes[rank].get(record.key, ()))
            names = (record.key, *(name for _, name in manifest.places(record.key)))
            if len(ranks) > 1 and not covered and not matches_any(allow_unsynced, names):
                places = [f"{name!r} on stage {s}" for s, name in manifest.places(record.key)]
                raise PlanError(
                    f"{' and '.join(places)} are one parameter, but no handler reduces its "
                    f"gradient over ranks {sorted(ranks)}: add 'pipeline-shared' to the handlers, "
                    f"or name it in allow_unsynced to let the copies drift apart"
                )


def shared_routes(routes: Routes) -> dict[str, Route]:
    """Returns key -> route as the lowest rank that holds it sees it."""
    found: dict[str, Route] = {}
    for mine in routes.values():
        for key, route in mine.items():
            found.setdefault(key, route)
    return found
