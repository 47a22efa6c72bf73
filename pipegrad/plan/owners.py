"""Owners: which rank steps which whole parameter, so that all ranks have similar work. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence


def step_cost(shape: Sequence[int]) -> int:
    """Returns what a step of a matrix costs, in any unit: as an iteration of Newton-Schulz.

    More than two dimensions count as one matrix, with the rows of the first.
    """
    rows, numel = shape[0] if shape else 1, math.prod(shape)
    return numel * min(rows, numel // rows) if rows else 0


class Owners:
    """Chooses owners for one bucket after the other, and remembers what each rank has so far."""

    def __init__(self) -> None:
        self._costs: dict[tuple[int, ...], list[int]] = {}

    def choose(self, ranks: tuple[int, ...], shapes: Sequence[tuple[int, ...]]) -> list[int]:
        """Returns the index of the owner of each parameter of a bucket, among `ranks`.

        The costliest one goes first, to the rank whose steps cost least so far.
        """
        # Balance inside a bucket also matters: the rank that owns most of it receives most.
        costs = self._costs.setdefault(ranks, [0] * len(ranks))
        owners = [0] * len(shapes)
        for index in sorted(range(len(shapes)), key=lambda i: (-step_cost(shapes[i]), i)):
            owners[index] = min(range(len(ranks)), key=lambda rank: (costs[rank], rank))
            costs[owners[index]] += step_cost(shapes[index])
        return owners
