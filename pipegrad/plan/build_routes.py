"""Makes the routes of all ranks from the reductions that handlers return. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import get_args

from pipegrad.errors import PlanError, in_words
from pipegrad.model.manifest import Manifest
from pipegrad.plan.check_routes import check_routes
from pipegrad.plan.routes import Divisors, Route, Routes
from pipegrad.plugins.handler import (
    PAIR_EXCHANGES,
    Exchange,
    GradientHandler,
    ParameterRecord,
    Placement,
    Reduction,
    ReductionStep,
)
from pipegrad.topology import Topology

# OWNER comes first: behind it only the owner takes part. WHOLE and SHARD come before REPLICATE:
# then each rank replicates only its part, which is less to send.
_EXCHANGES = get_args(Exchange)
_ORDER = (Placement.OWNER, Placement.WHOLE, Placement.SHARD, Placement.REPLICATE)


def make_routes(
    manifest: Manifest,
    topology: Topology,
    handlers: Sequence[tuple[str, GradientHandler]],
    allow_unsynced: Sequence[str],
) -> tuple[Routes, Divisors, frozenset[str]]:
    """Returns the routes of all ranks, checked against each other, the divisors, and matrices.

    Matrices are the keys that a handler reduces with WHOLE, also over a single rank.

    Raises:
        PlanError: If handlers contradict each other or the topology, or leave a tie uncovered.
    """
    # Handlers are pure. So every rank can compute the routes of all ranks, and compare them before
    # anything is sent.
    for name, handler in handlers:
        _check_options(name, handler, manifest, topology)
    known = frozenset(topology.ranks)
    reductions = {
        rank: _named_reductions(manifest, topology.at(rank), handlers, known)
        for rank in sorted(topology.ranks)
    }
    steps: _Steps = {}
    routes = {r: _routes(manifest, topology.at(r), reductions[r], steps) for r in reductions}
    check_routes(manifest, topology, routes, allow_unsynced)
    whole = (r for on_rank in reductions.values() for _, r in on_rank)
    matrices = frozenset(r.record.key for r in whole if r.placement is Placement.WHOLE)
    return routes, _divisors(manifest, topology, reductions), matrices


NamedReductions = Sequence[tuple[str, Reduction]]
"""Reductions of one rank, each with the name of its handler."""

_Steps = dict[tuple[object, ...], ReductionStep]
"""Every step once. Thousands of ranks share it, and comparing an object with itself is fast."""


def _named_reductions(
    manifest: Manifest,
    topology: Topology,
    handlers: Sequence[tuple[str, GradientHandler]],
    known: frozenset[int],
) -> NamedReductions:
    """Returns the reductions of all handlers on one rank, of the `known` ranks."""
    records = manifest.records(topology)
    held = {record.key: record for record in records}
    named = []
    for name, handler in handlers:
        reductions = _reductions_of(name, handler, records, topology)
        # The parameters of a rank share a few groups, and a group may have thousands of ranks.
        checked = set[int]()
        for reduction in reductions:
            _check_record(name, reduction, held, topology)
            if id(reduction.ranks) not in checked:
                _check_ranks(name, reduction, topology.rank, known)
                checked.add(id(reduction.ranks))
            _check_numbers(name, reduction)
            if handler.hook is not None:
                _check_hooked(name, reduction)
            named.append((name, reduction))
    return named


def _routes(
    manifest: Manifest, topology: Topology, reductions: NamedReductions, made: _Steps
) -> dict[str, Route]:
    """Returns key -> route on one rank, without reductions over this rank alone."""
    steps: dict[str, list[ReductionStep]] = {r.key: [] for r in manifest.records(topology)}
    own: dict[tuple[object, ...], ReductionStep] = {}
    for name, reduction in reductions:
        if len(reduction.ranks) > 1:
            kind = (name, reduction.op, reduction.placement, reduction.exchange)
            known = (*kind, id(reduction.ranks))
            if known not in own:
                own[known] = _step(name, reduction, topology, made)
            steps[reduction.record.key].append(own[known])
    routes: dict[tuple[int, ...], Route] = {}
    for key, route in steps.items():
        of_steps = tuple(map(id, route))
        if of_steps not in routes:
            routes[of_steps] = _ordered(key, route, topology)
    return {key: routes[tuple(map(id, route))] for key, route in steps.items() if route}


def _step(name: str, reduction: Reduction, topology: Topology, made: _Steps) -> ReductionStep:
    """Returns the step of a reduction, the same object on all its ranks."""
    ranks = tuple(sorted(reduction.ranks))
    kind = (name, reduction.op, reduction.placement, reduction.exchange, ranks)
    if kind not in made:
        axes, placement = topology.axes_of(ranks), reduction.placement
        made[kind] = ReductionStep(axes, ranks, reduction.op, placement, name, reduction.exchange)
    return made[kind]


def _divisors(
    manifest: Manifest, topology: Topology, reductions: Mapping[int, NamedReductions]
) -> Divisors:
    """Returns the divisors of gradients."""
    # All copies of a parameter must have the same divisor. Otherwise a sum over ranks would weight
    # their gradients differently.
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


def _check_options(
    name: str, handler: GradientHandler, manifest: Manifest, topology: Topology
) -> None:
    """Calls a handler's `check`; its error is raised with the handler's name."""
    try:
        handler.check(manifest.parameters, topology)
    except (Exception, SystemExit) as error:
        raise PlanError(f"handler {name!r}: check() failed: {in_words(error)}") from error


def _reductions_of(
    name: str,
    handler: GradientHandler,
    records: Sequence[ParameterRecord],
    topology: Topology,
) -> list[Reduction]:
    """Returns a handler's reductions on one rank; its error is raised with the handler's name."""
    try:
        reductions = list(handler.reductions(records, topology))
    except (Exception, SystemExit) as error:
        raise PlanError(
            f"handler {name!r}: reductions() of rank {topology.rank} failed: {in_words(error)}"
        ) from error
    for reduction in reductions:
        if not isinstance(reduction, Reduction):
            raise PlanError(
                f"handler {name!r}: reductions() of rank {topology.rank} gave {reduction!r}, "
                f"expected Reductions"
            )
    return reductions


def _subject(name: str, reduction: Reduction) -> str:
    key, ranks = reduction.record.key, list(reduction.ranks)
    return f"handler {name!r} reduces {key!r} over ranks {ranks}"


def _check_record(
    name: str, reduction: Reduction, held: Mapping[str, ParameterRecord], topology: Topology
) -> None:
    record = reduction.record
    if held.get(record.key) != record:
        raise PlanError(
            f"{_subject(name, reduction)} on rank {topology.rank}, which does not hold it"
        )


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


def _check_numbers(name: str, reduction: Reduction) -> None:
    if reduction.op not in ("sum", "mean"):
        raise PlanError(
            f"{_subject(name, reduction)} by {reduction.op!r}: expected 'sum' or 'mean'"
        )
    if not 0 < reduction.divisor < math.inf:
        raise PlanError(
            f"{_subject(name, reduction)} with divisor {reduction.divisor!r}: expected a positive "
            f"number"
        )
    if reduction.exchange not in _EXCHANGES:
        raise PlanError(
            f"{_subject(name, reduction)}, exchange {reduction.exchange!r}: expected one of "
            f"{_EXCHANGES}"
        )
    is_pair = reduction.exchange in PAIR_EXCHANGES and len(reduction.ranks) > 1
    if is_pair and (len(reduction.ranks) != 2 or reduction.placement is not Placement.REPLICATE):
        raise PlanError(
            f"{_subject(name, reduction)}, placement {reduction.placement.value!r}, exchange "
            f"{reduction.exchange!r}: that is for the gradients of two ranks, placed by "
            f"'replicate'; give others the exchange 'all-reduce'"
        )


def _check_hooked(name: str, reduction: Reduction) -> None:
    kind = reduction.op, reduction.placement, reduction.exchange
    if kind != ("mean", Placement.REPLICATE, "all-reduce"):
        raise PlanError(
            f"handler {name!r} has a communication hook, which leaves a mean on every rank, and "
            f"reduces {reduction.record.key!r} by {reduction.placement.value}-{reduction.op}, "
            f"{reduction.exchange}: expected replicate-mean, all-reduce; drop its hook"
        )


def _ordered(key: str, steps: Sequence[ReductionStep], topology: Topology) -> Route:
    """Orders a route by placement; with the same placement, reductions across stages are last."""
    # A reduction across stages must wait for other stages, reductions inside a stage need not. With
    # this order the wait is as late as possible.
    for ranks, times in Counter(step.ranks for step in steps).items():
        if times > 1:
            names = [h.handler for h in steps if h.ranks == ranks]
            raise PlanError(
                f"{key!r} is reduced twice over ranks {list(ranks)}, by handlers {names}: drop one"
            )
    scattering = [step for step in steps if step.placement.scatters]
    if len(scattering) > 1 and any(step.placement is Placement.WHOLE for step in scattering):
        raise PlanError(
            f"{key!r} is reduced by {' and '.join(map(str, scattering))}, handlers "
            f"{[step.handler for step in scattering]}: after 'whole' one rank has all of it, so "
            f"nothing else can be divided; give the others the placement 'replicate'"
        )
    across = {step: step.spans(topology.pipeline) or step.spans("ranks") for step in steps}
    order = sorted(steps, key=lambda h: (_ORDER.index(h.placement), across[h], h.axes))
    for step in order[:-1]:
        # An exchange ends late, by its receive. A later reduction would need its sum earlier.
        if step.is_pair:
            raise PlanError(
                f"{key!r} is reduced by {step}, handler {step.handler!r}, and then by {order[-1]}: "
                f"an exchange must come last; give it the exchange 'all-reduce'"
            )
    return tuple(order)
