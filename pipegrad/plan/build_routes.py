"""Handlers are asked, and what they say becomes every rank's routes. Pure."""

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
    Exchange,
    GradientHandler,
    ParameterRecord,
    Placement,
    Reduction,
    ReductionStep,
)
from pipegrad.topology import Topology

_ORDER = (Placement.OWNER, Placement.SHARD, Placement.REPLICATE)


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
    check_routes(manifest, topology, routes, allow_unsynced)
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
    """Returns key -> route on one rank, without the reductions that would stay on that rank."""
    steps: dict[str, list[ReductionStep]] = {r.key: [] for r in manifest.records(topology)}
    for name, reduction in asked:
        ranks = tuple(sorted(reduction.ranks))
        if len(ranks) > 1:
            axes = topology.axes_of(ranks)
            step = ReductionStep(
                axes, ranks, reduction.op, reduction.placement, name, reduction.exchange
            )
            steps[reduction.record.key].append(step)
    return {key: _ordered(key, route, topology) for key, route in steps.items() if route}


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
    except (Exception, SystemExit) as error:
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
    except (Exception, SystemExit) as error:
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


def _ordered(key: str, steps: Sequence[ReductionStep], topology: Topology) -> Route:
    """Orders a route by placement, a reduction across stages last among its like."""
    for ranks, times in Counter(step.ranks for step in steps).items():
        if times > 1:
            names = [h.handler for h in steps if h.ranks == ranks]
            raise PlanError(
                f"{key!r} is reduced twice over ranks {list(ranks)}, by handlers {names}: drop one"
            )
    across = {step: step.spans(topology.pipeline) or step.spans("ranks") for step in steps}
    order = sorted(steps, key=lambda h: (_ORDER.index(h.placement), across[h], h.axes))
    for step in order[:-1]:
        if step.exchange != "all-reduce":  # the sum of which ends late
            raise PlanError(
                f"{key!r} is reduced by {step}, handler {step.handler!r}, and then by {order[-1]}: "
                f"an exchange must come last; give it the exchange 'all-reduce'"
            )
    return tuple(order)
