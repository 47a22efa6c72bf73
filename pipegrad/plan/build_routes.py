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

# OWNER comes first: behind it only the owner takes part. SHARD comes before REPLICATE: then each
# rank replicates only its shard, which is less to send.
_ORDER = (Placement.OWNER, Placement.SHARD, Placement.REPLICATE)


def make_routes(
    manifest: Manifest,
    topology: Topology,
    handlers: Sequence[tuple[str, GradientHandler]],
    allow_unsynced: Sequence[str],
) -> tuple[Routes, Divisors]:
    """Returns the routes of all ranks, checked against each other, and the divisors.

    Raises:
        PlanError: If handlers contradict each other or the topology, or leave a tie uncovered.
    """
    # Handlers are pure. So every rank can compute the routes of all ranks, and compare them before
    # anything is sent.
    for name, handler in handlers:
        _check_options(name, handler, manifest, topology)
    reductions = {
        rank: _named_reductions(manifest, topology.at(rank), handlers)
        for rank in sorted(topology.ranks)
    }
    routes = {r: _routes(manifest, topology.at(r), reductions[r]) for r in reductions}
    check_routes(manifest, topology, routes, allow_unsynced)
    return routes, _divisors(manifest, topology, reductions)


NamedReductions = Sequence[tuple[str, Reduction]]
"""Reductions of one rank, each with the name of its handler."""


def _named_reductions(
    manifest: Manifest, topology: Topology, handlers: Sequence[tuple[str, GradientHandler]]
) -> NamedReductions:
    """Returns the reductions of all handlers on one rank."""
    records = manifest.records(topology)
    held = set(records)
    named = []
    for name, handler in handlers:
        for reduction in _reductions_of(name, handler, records, topology):
            _check_reduction(name, reduction, held, topology)
            if handler.hook is not None:
                _check_hooked(name, reduction)
            named.append((name, reduction))
    return named


def _routes(
    manifest: Manifest, topology: Topology, reductions: NamedReductions
) -> dict[str, Route]:
    """Returns key -> route on one rank, without reductions over this rank alone."""
    steps: dict[str, list[ReductionStep]] = {r.key: [] for r in manifest.records(topology)}
    for name, reduction in reductions:
        ranks = tuple(sorted(reduction.ranks))
        if len(ranks) > 1:
            axes = topology.axes_of(ranks)
            step = ReductionStep(
                axes, ranks, reduction.op, reduction.placement, name, reduction.exchange
            )
            steps[reduction.record.key].append(step)
    return {key: _ordered(key, route, topology) for key, route in steps.items() if route}


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


def _check_reduction(
    name: str, reduction: Reduction, held: set[ParameterRecord], topology: Topology
) -> None:
    record, ranks = reduction.record, reduction.ranks
    subject = f"handler {name!r} reduces {record.key!r} over ranks {list(ranks)}"
    if record not in held:
        raise PlanError(f"{subject} on rank {topology.rank}, which does not hold it")
    if topology.rank not in ranks or len(set(ranks)) < len(ranks):
        raise PlanError(f"{subject}: expected each rank once, and rank {topology.rank} among them")
    if not set(ranks) <= set(topology.ranks):
        raise PlanError(f"{subject}, but the topology has only ranks {list(topology.ranks)}")
    if reduction.op not in ("sum", "mean"):
        raise PlanError(f"{subject} by {reduction.op!r}: expected 'sum' or 'mean'")
    divisor = reduction.divisor
    if not 0 < divisor < math.inf:
        raise PlanError(f"{subject} with divisor {divisor!r}: expected a positive number")
    _check_exchange(subject, reduction)


def _check_exchange(subject: str, reduction: Reduction) -> None:
    if reduction.exchange not in get_args(Exchange):
        raise PlanError(
            f"{subject}, exchange {reduction.exchange!r}: expected one of {get_args(Exchange)}"
        )
    is_pair = reduction.exchange in PAIR_EXCHANGES and len(reduction.ranks) > 1
    if is_pair and (len(reduction.ranks) != 2 or reduction.placement is not Placement.REPLICATE):
        raise PlanError(
            f"{subject}, placement {reduction.placement.value!r}, exchange {reduction.exchange!r}: "
            f"that is for the gradients of two ranks, placed by 'replicate'; give others the "
            f"exchange 'all-reduce'"
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
