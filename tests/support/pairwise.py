"""Pairwise arrays: a few rows of a product that hold every pair of values of any two factors."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any


def everything() -> bool:
    """Returns whether whole products are to run, as ``scripts/test --all`` does for the night."""
    return os.environ.get("PIPEGRAD_TESTS") == "all"


def pairwise(
    *factors: Iterable[Any], allowed: Callable[..., bool] = lambda *_: True
) -> list[tuple[Any, ...]]:
    """Returns rows of the product; the whole product if everything is to run.

    Args:
        *factors: Values of each factor.
        allowed: Whether a row can be.
    """
    product = [row for row in itertools.product(*factors) if allowed(*row)]
    if everything():
        return product
    # Greedy: each row taken holds the most pairs that no row before it has. Ties go to the first,
    # so that all processes have the same rows.
    missing = {pair for row in product for pair in _pairs(row)}
    rows = []
    while missing:
        best = max(product, key=lambda row: len(_pairs(row) & missing))
        missing -= _pairs(best)
        rows.append(best)
    return rows


def _pairs(row: Sequence[Any]) -> set[tuple[int, Any, int, Any]]:
    """Returns the pairs of a row, each value with the number of its factor."""
    return {(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(row)), 2)}
