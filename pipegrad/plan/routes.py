"""Routes: the reductions of each gradient, in order, and the ranks that have results. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from pipegrad.plugins.handler import Placement, ReductionStep

Route = tuple[ReductionStep, ...]

Routes = Mapping[int, Mapping[str, Route]]
"""Rank -> key -> route, by ascending rank."""

Divisors = Mapping[str, float]
"""Key -> divisor of its gradient before it is sent, if that is not 1."""


def steps_taken(route: Route, rank: int) -> int:
    """Returns in how many reductions of a route `rank` takes part."""
    # After a reduction with OWNER, only the owner has the sum, so only the owner continues.
    for index, step in enumerate(route):
        if step.placement is Placement.OWNER and rank != step.owner:
            return index + 1
    return len(route)


def has_result(route: Route, rank: int) -> bool:
    """Whether `rank` has a part of the result of a route, if there are several parts."""
    # With SHARD every rank has a part, with REPLICATE every rank has all. With WHOLE the bucket
    # says which parameters a rank has: see `Plan.main_ranges`.
    return all(rank == step.owner for step in route if step.placement is Placement.OWNER)


def is_counted(route: Route, rank: int) -> bool:
    """Whether the result on `rank` counts in a norm. Equal results count once, on the owner."""
    # With SHARD and WHOLE no two ranks have the same element.
    return all(rank == step.owner for step in route if not step.placement.scatters)


def signature(route: Route) -> tuple[tuple[str, ...], ...]:
    """Returns a route without its ranks: the same on every copy of it."""
    return tuple(step.signature for step in route)


def shared_routes(routes: Routes) -> dict[str, Route]:
    """Returns key -> its route on the lowest rank that holds it."""
    # Routes of other ranks differ in their ranks only; `check_routes` makes sure of that.
    shared: dict[str, Route] = {}
    for by_key in routes.values():
        for key, route in by_key.items():
            shared.setdefault(key, route)
    return shared
