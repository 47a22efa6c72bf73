"""Routes: every gradient's reductions, in order, and what they leave on a rank. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from pipegrad.plugins.handler import Placement, ReductionStep

Route = tuple[ReductionStep, ...]

Routes = Mapping[int, Mapping[str, Route]]
"""Rank -> key -> route, by ascending rank."""

Divisors = Mapping[str, float]
"""Key -> what its gradient is divided by before it leaves, where that is not 1."""


def steps_taken(route: Route, rank: int) -> int:
    """Returns how many reductions of a route `rank` takes part in.

    Behind a reduction with OWNER only the owner goes on.
    """
    for index, step in enumerate(route):
        if step.placement is Placement.OWNER and rank != step.owner:
            return index + 1
    return len(route)


def has_result(route: Route, rank: int) -> bool:
    """Whether `rank` has the result of a route, or a shard of it: OWNER leaves it to the owner."""
    return all(rank == step.owner for step in route if step.placement is Placement.OWNER)


def is_counted(route: Route, rank: int) -> bool:
    """Whether the result of `rank` counts, where several ranks have the same result."""
    return all(rank == step.owner for step in route if step.placement is not Placement.SHARD)


def signature(route: Route) -> tuple[tuple[str, ...], ...]:
    """Returns a route without its ranks: the same on every copy of it."""
    return tuple(step.signature for step in route)


def shared_routes(routes: Routes) -> dict[str, Route]:
    """Returns key -> route as the lowest rank that holds it sees it."""
    found: dict[str, Route] = {}
    for mine in routes.values():
        for key, route in mine.items():
            found.setdefault(key, route)
    return found
