"""Routes: every gradient's reductions, in order, and what they leave on a rank. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipegrad.plugins.handler import (
    Exchange,
    Op,
    Placement,
)


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


def signature(route: Route) -> tuple[tuple[str, ...], ...]:
    """Returns a route without its ranks: the same on every copy of it."""
    return tuple(hop.signature for hop in route)


def shared_routes(routes: Routes) -> dict[str, Route]:
    """Returns key -> route as the lowest rank that holds it sees it."""
    found: dict[str, Route] = {}
    for mine in routes.values():
        for key, route in mine.items():
            found.setdefault(key, route)
    return found
