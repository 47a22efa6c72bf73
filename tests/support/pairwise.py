"""Pairwise arrays: a few rows of a product that hold every pair of values of any two factors."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any


def everything() -> bool:
    """Returns whether whole products are to run, as ``.ci/night products`` does."""
    return os.environ.get("PIPEGRAD_TESTS") == "all"


def pairwise(
    *factors: Iterable[Any], allowed: Callable[..., bool] = lambda *_: True
) -> list[tuple[Any, ...]]:
    """Returns rows of the product; the whole product if everything is to run.

    Args:
        *factors: Values of each factor.
        allowed: Whether a row can be.
    """
    values = [list(factor) for factor in factors]

    def row(numbers: Sequence[int]) -> tuple[Any, ...]:
        return tuple(factor[number] for factor, number in zip(values, numbers, strict=True))

    product = [n for n in itertools.product(*map(range, map(len, values))) if allowed(*row(n))]
    if everything():
        return [row(numbers) for numbers in product]
    # Greedy: each row taken holds the most pairs that no row before it has. Ties go to the first,
    # so that all processes have the same rows.
    missing = {pair for numbers in product for pair in _pairs(numbers)}
    rows = []
    while missing:
        best = max(product, key=lambda numbers: len(_pairs(numbers) & missing))
        missing -= _pairs(best)
        rows.append(row(best))
    return rows


def _pairs(numbers: Sequence[int]) -> set[tuple[int, int, int, int]]:
    """Returns the pairs of values of a row; a value is a factor, and a number in it."""
    places = range(len(numbers))
    return {(i, numbers[i], j, numbers[j]) for i, j in itertools.combinations(places, 2)}
