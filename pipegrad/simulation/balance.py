"""Balance: where stages begin, so that the heaviest one is as light as can be. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate

_UNIT_SECONDS = 1e-9
Cost = Callable[[int, int, int], float]  # of a stage that holds the layers from a start to an end


def balanced_seconds(seconds: Iterable[float], num_stages: int) -> tuple[int, ...]:
    """Returns starts that make the longest stage short, of layers that take so many seconds."""
    # Whole numbers, so that no rounding decides between equal cuts.
    sums = [0, *accumulate(round(own / _UNIT_SECONDS) for own in seconds)]
    starts = balanced(len(sums) - 1, num_stages, lambda _, start, end: sums[end] - sums[start])
    return tuple(starts)


def balanced(num_layers: int, num_stages: int, cost: Cost) -> list[int]:
    """Returns starts that make the heaviest stage light, and then the others even."""
    # best[end]: cost of cutting the first `end` layers into the stages so far, and their starts.
    # Costs are compared by the heaviest stage, then by the sum of squares: an even cut.
    last = num_layers - num_stages + 1  # each later stage needs a layer
    best: dict[int, tuple[tuple[float, float], list[int]]] = {
        end: ((cost(0, 0, end), cost(0, 0, end) ** 2), []) for end in range(1, last + 1)
    }
    for stage in range(1, num_stages):
        best = {
            end: _best_start(best, stage, end, cost) for end in range(stage + 1, last + stage + 1)
        }
    return best[num_layers][1]


def _best_start(
    best: dict[int, tuple[tuple[float, float], list[int]]], stage: int, end: int, cost: Cost
) -> tuple[tuple[float, float], list[int]]:
    """Returns the best cost of the first `end` layers with one more stage, and its starts."""
    lightest = None
    for start in range(min(end - 1, max(best)), stage - 1, -1):
        weight = cost(stage, start, end)
        if lightest is not None and weight > lightest[0][0]:
            break  # a stage of more layers is no lighter
        (heaviest, squares), starts = best[start]
        candidate = (max(heaviest, weight), squares + weight**2), [*starts, start]
        lightest = candidate if lightest is None else min(lightest, candidate)
    assert lightest is not None
    return lightest
