"""Routes: the reductions of each gradient, in order, from the results of handlers. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import TypeVar, get_args

from pipegrad.errors import PlanError, in_words
from pipegrad.model.manifest import Manifest
from pipegrad.plugins.handler import (
    Exchange,
    GradientHandler,
    Placement,
    Reduction,
    ReductionStep,
)
from pipegrad.topology import Topology

T = TypeVar("T")
Route = tuple[ReductionStep, ...]

Routes = dict[int, dict[str, Route]]
"""Rank -> key -> route, by ascending rank."""

Divisors = Mapping[str, float]
"""Key -> divisor of its gradient before it is sent, if that is not 1."""


def steps_taken(route: Route, rank: int) -> int:
    """Returns the number of reductions of a route in which `rank` takes part."""
    # After a reduction with OWNER, only the owner continues, because only it has the sum.
    ends = (n for n, s in enumerate(route, 1) if s.placement is Placement.OWNER and rank != s.owner)
    return next(ends, len(route))


def has_result(route: Route, rank: int) -> bool:
    """True if `rank` has a part of the result of a route, if there are several parts."""
    # With SHARD every rank has a part, with REPLICATE every rank has all. With WHOLE the bucket
    # determines the parameters of a rank: see `Plan.main_ranges`.
    return all(rank == step.owner for step in route if step.placement is Placement.OWNER)


def is_counted(route: Route, rank: int) -> bool:
    """True if the result on `rank` counts in a norm. Equal results count once, on the owner."""
    # With SHARD and WHOLE no two ranks have the same element.
    return all(rank == step.owner for step in route if not step.placement.scatters)


def part_of(route: Route, num_steps: int, rank: int) -> list[int | bool]:
    """Returns the part of a gradient that `rank` has after `num_steps` reductions of a route."""
    return [
        h.ranks.index(rank) if h.placement.scatters else rank == h.owner
        for h in route[:num_steps]
        if h.syncs_parameters
    ]


def signature(route: Route) -> tuple[tuple[str, ...], ...]:
    """Returns a route without its ranks: the same on every copy of it."""
    return tuple(step.signature for step in route)


def shared_routes(routes: Routes) -> dict[str, Route]:
    """Returns key -> its route on the lowest rank that holds it."""
    # Routes of other ranks differ in their ranks only; `check_routes` makes sure of that.
    return {key: route for rank in reversed(routes) for key, route in routes[rank].items()}


NamedReductions = Sequence[tuple[str, Reduction]]
"""Reductions of one rank, each with the name of its handler."""


def make_routes(
    manifest: Manifest, topology: Topology, handlers: Sequence[tuple[str, GradientHandler]]
) -> tuple[Routes, Divisors, frozenset[str]]:
    """Returns the routes of all ranks, which are not compared yet, the divisors, and matrices.

    Matrices are the keys that a handler reduces with WHOLE, also over a single rank.

    Raises:
        PlanError: If a handler fails, or returns a wrong reduction on any rank.
    """
    # Every rank can compute the routes of all ranks, and compare them before anything is sent,
    # because handlers are pure.
    for name, handler in handlers:
        attempt(f"{name!r}: check()", partial(handler.check, manifest.parameters, topology))
    known = frozenset(topology.ranks)
    reductions = {
        rank: [
            (name, reduction)
            for name, handler in handlers
            for reduction in _reductions(name, handler, manifest, topology.at(rank), known)
        ]
        for rank in sorted(topology.ranks)
    }
    steps: dict[tuple[object, ...], ReductionStep] = {}
    routes = {r: _routes(manifest, topology.at(r), reductions[r], steps) for r in reductions}
    whole = (r for on_rank in reductions.values() for _, r in on_rank)
    matrices = frozenset(r.record.key for r in whole if r.placement is Placement.WHOLE)
    return routes, _divisors(manifest, topology, reductions), matrices


def attempt(what: str, function: Callable[[], T]) -> T:
    """Calls a method of a handler, which may fail in any way.

    Raises:
        PlanError: If it fails. It begins with `what`: the handler's name and the method.
    """
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise PlanError(f"handler {what} failed: {in_words(error)}") from error


def _reductions(
    name: str,
    handler: GradientHandler,
    manifest: Manifest,
    topology: Topology,
    known: frozenset[int],
) -> list[Reduction]:
    """Returns a handler's reductions on one rank, of the `known` ranks."""
    rank, records = topology.rank, manifest.records(topology)
    reductions = attempt(
        f"{name!r}: reductions() of rank {rank}",
        lambda: list(handler.reductions(records, topology)),
    )
    held = {record.key: record for record in records}
    # Check each group once, because the parameters of a rank share a few groups, and a group may
    # have thousands of ranks.
    checked = set[int]()
    for reduction in reductions:
        if not isinstance(reduction, Reduction):
            raise PlanError(
                f"handler {name!r}: reductions() of rank {rank} gave {reduction!r}, expected "
                f"Reductions"
            )
        if held.get(reduction.record.key) != reduction.record:
            raise PlanError(f"{_subject(name, reduction)} on rank {rank}, which does not hold it")
        if id(reduction.ranks) not in checked:
            _check_ranks(name, reduction, rank, known)
            checked.add(id(reduction.ranks))
        for fault in _faults(name, handler, reduction):
            raise PlanError(fault)
    return reductions


def _subject(name: str, reduction: Reduction) -> str:
    return f"handler {name!r} reduces {reduction.record.key!r} over ranks {list(reduction.ranks)}"


def _check_ranks(name: str, reduction: Reduction, rank: int, known: frozenset[int]) -> None:
    ranks = set(reduction.ranks)
    if rank not in ranks or len(ranks) < len(reduction.ranks):
        raise PlanError(
            f"{_subject(name, reduction)}: expected each rank once, and rank {rank} among them"
        )
    if not ranks <= known:
        raise PlanError(
            f"{_subject(name, reduction)}, but the topology has only ranks {sorted(known)}"
        )


def _faults(name: str, handler: GradientHandler, reduction: Reduction) -> Iterator[str]:
    """Yields the mistakes of a reduction, except for its ranks."""
    op, placement, exchange = reduction.op, reduction.placement, reduction.exchange
    if op not in ("sum", "mean"):
        yield f"{_subject(name, reduction)} by {op!r}: expected 'sum' or 'mean'"
    if not 0 < reduction.divisor < math.inf:
        yield (
            f"{_subject(name, reduction)} with divisor {reduction.divisor!r}: expected a positive "
            f"number"
        )
    if exchange not in get_args(Exchange):
        yield (
            f"{_subject(name, reduction)}, exchange {exchange!r}: expected one of "
            f"{get_args(Exchange)}"
        )
    is_pair = exchange == "asymmetric" and len(reduction.ranks) > 1
    if is_pair and (len(reduction.ranks) != 2 or placement is not Placement.REPLICATE):
        yield (
            f"{_subject(name, reduction)}, placement {placement.value!r}, exchange "
            f"{exchange!r}: that is for the gradients of two ranks, placed by 'replicate'; give "
            f"others the exchange 'all-reduce'"
        )
    kind = op, placement, exchange
    if handler.leaves == "mean" and kind != ("mean", Placement.REPLICATE, "all-reduce"):
        yield (
            f"handler {name!r} has a communication hook, which leaves a mean on every rank, and "
            f"reduces {reduction.record.key!r} by {placement.value}-{op}, {exchange}: expected "
            f"replicate-mean, all-reduce; drop its hook"
        )


def _routes(
    manifest: Manifest,
    topology: Topology,
    reductions: NamedReductions,
    shared_steps: dict[tuple[object, ...], ReductionStep],
) -> dict[str, Route]:
    """Returns key -> route on one rank, without reductions over this rank alone.

    `shared_steps` has the steps of all ranks, because thousands of ranks may share a step. The
    topology gives all of them one tuple of ranks, because comparing an object with itself is fast.
    """
    steps: dict[str, list[ReductionStep]] = {r.key: [] for r in manifest.records(topology)}
    for name, reduction in reductions:
        op, placement, exchange = reduction.op, reduction.placement, reduction.exchange
        if len(reduction.ranks) > 1:
            known = (name, op, placement, exchange, id(reduction.ranks))
            if known not in shared_steps:
                ranks = tuple(sorted(reduction.ranks))
                step = ReductionStep(topology.axes_of(ranks), ranks, op, placement, name, exchange)
                shared_steps[known] = step
            steps[reduction.record.key].append(shared_steps[known])
    routes: dict[tuple[int, ...], Route] = {}
    for key, route in steps.items():
        of_steps = tuple(map(id, route))
        if of_steps not in routes:
            routes[of_steps] = _ordered(key, route, topology)
    return {key: routes[tuple(map(id, route))] for key, route in steps.items() if route}


def _ordered(key: str, steps: Sequence[ReductionStep], topology: Topology) -> Route:
    """Orders a route by placement; with the same placement, reductions across stages are last."""
    # A reduction across stages comes last, because it must wait for other stages: the wait is then
    # as late as possible.
    for first, second in combinations(steps, 2):
        if len(twice := sorted({*first.ranks} & {*second.ranks})) > 1:
            raise PlanError(
                f"{key!r} is reduced twice over ranks {twice}, by handlers "
                f"{[first.handler, second.handler]}: drop one, or reduce along different axes"
            )
    scattering = [step for step in steps if step.placement.scatters]
    if len(scattering) > 1 and any(step.placement is Placement.WHOLE for step in scattering):
        raise PlanError(
            f"{key!r} is reduced by {' and '.join(map(str, scattering))}, handlers "
            f"{[step.handler for step in scattering]}: after 'whole' one rank has all of it, so "
            f"nothing else can be divided; give the others the placement 'replicate'"
        )
    across = {step: step.spans(topology.pipeline) or step.spans("ranks") for step in steps}
    placements = [*Placement]  # the order of a route: see there
    order = sorted(steps, key=lambda h: (placements.index(h.placement), across[h], h.axes))
    for step in order[:-1]:
        # Refuse reductions after an exchange, because it ends late, by its receive, and a later
        # reduction would need its sum earlier.
        if step.is_pair:
            raise PlanError(
                f"{key!r} is reduced by {step}, handler {step.handler!r}, and then by {order[-1]}: "
                f"an exchange must come last; give it the exchange 'all-reduce'"
            )
    return tuple(order)


def _divisors(
    manifest: Manifest, topology: Topology, reductions: Mapping[int, NamedReductions]
) -> Divisors:
    """Returns the divisors of gradients."""
    # All copies of a parameter must have the same divisor, because a sum over ranks would otherwise
    # weight their gradients differently.
    agreed: dict[str, tuple[float, int]] = {}
    for rank, on_rank in reductions.items():
        divisors = dict.fromkeys((r.key for r in manifest.records(topology.at(rank))), 1.0)
        for _, reduction in on_rank:
            divisors[reduction.record.key] *= reduction.divisor
        for key, divisor in divisors.items():
            expected, other = agreed.setdefault(key, (divisor, rank))
            if divisor != expected:
                both = [*on_rank, *reductions[other]]
                names = {n for n, r in both if r.record.key == key and r.divisor != 1}
                raise PlanError(
                    f"the gradient of {key!r} is divided by {divisor:g} on rank {rank}, but by "
                    f"{expected:g} on rank {other}: handlers {sorted(names)} must give one divisor "
                    f"on all ranks that hold it"
                )
    return {key: divisor for key, (divisor, _) in agreed.items() if divisor != 1}
