"""Causes: what the weights of a gradient's parts say, in words."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from pipegrad.audit.contributions import Fit

_CLOSE = 0.02  # of a ratio; two causes differ by far more


@dataclass(frozen=True)
class Place:
    """Which parts are a rank's own, for the words of a cause.

    Attributes:
        replica: Of this rank.
        use: Of a tied parameter on this rank.
        counts: Name -> a number that a gradient may be multiplied or divided by, such as
            ``{"microbatches": 4, "tokens": 1024}``.
    """

    replica: int
    use: int
    counts: Mapping[str, int]


def causes(fitted: Fit, place: Place, tolerance: float) -> list[str]:
    """Returns why a gradient is wrong, one cause for each; empty if it is right.

    Args:
        fitted: The gradient as a sum of parts.
        place: Of the rank that has it.
        tolerance: Of the gradient, relative to its norm.
    """
    found = []
    if abs(fitted.before) > _CLOSE:
        found.append(
            f"stale: it has {fitted.before:.3g} times the gradient of the step before: call "
            f"optimizer.zero_grad() before each step"
        )
    factors = _factors(fitted.ratios)
    if factors is None:
        found.append(f"parts are missing or wrong: their weights are {_listed(fitted.ratios)}")
    else:
        scale, replicas, microbatches, uses = factors
        found += [
            *_of_microbatches(microbatches),
            *_of_replicas(replicas, place.replica),
            *_of_uses(uses, place.use),
            *_of_scale(scale, place.counts),
        ]
    if fitted.rest > tolerance:
        found.append(
            f"{100 * fitted.rest:.2g} % of it is in no part of the batch: other values were "
            f"computed, as with another dropout, other buffers or other parameters"
        )
    return found


def _factors(ratios: Tensor) -> tuple[float, list[float], list[float], list[float]] | None:
    """Returns ratios as a product of a number and factors of each dimension; None if they are not.

    Factors are 1 for what is there once, and 0 for what is missing.
    """
    largest = float(ratios.abs().max())
    if largest < _CLOSE:
        return 0.0, *([1.0] * size for size in ratios.shape)  # type: ignore[return-value]
    # The smallest one that is not zero is the measure: a use that is counted twice is 2 then.
    sizes = ratios.abs().masked_fill(ratios.abs() < _CLOSE * largest, math.inf)
    least = [int(i) for i in (sizes == sizes.min()).nonzero()[0]]
    scale = float(ratios[tuple(least)])
    factors = []
    for dim in range(ratios.ndim):
        index: list[int | slice] = [*least]
        index[dim] = slice(None)
        factors.append((ratios[tuple(index)] / scale).tolist())
    product = scale * Tensor(factors[0]).double()[:, None, None]
    product = product * Tensor(factors[1]).double()[:, None] * Tensor(factors[2]).double()
    if float((product - ratios).abs().max()) > _CLOSE * largest:
        return None
    return scale, factors[0], factors[1], factors[2]


def _of_microbatches(factors: Sequence[float]) -> Iterator[str]:
    present = _present(factors)
    if len(present) < len(factors):
        what = "only the last microbatch" if present == [len(factors) - 1] else f"only {present}"
        yield f"{what} of {len(factors)} microbatches is in it"
    elif not _alike(factors):
        yield f"microbatches have different weights, {_rounded(factors)}"


def _of_replicas(factors: Sequence[float], own: int) -> Iterator[str]:
    present = _present(factors)
    if present == [own] and len(factors) > 1:
        yield f"it is not reduced over the {len(factors)} replicas: it has the data of its own alone"
    elif len(present) < len(factors):
        yield f"only replicas {present} of {len(factors)} are in it"
    elif not _alike(factors):
        yield f"replicas have different weights, {_rounded(factors)}"


def _of_uses(factors: Sequence[float], own: int) -> Iterator[str]:
    present = _present(factors)
    if present == [own] and len(factors) > 1:
        yield "the tie is not reduced: it has the gradient of its own use alone"
    elif len(present) < len(factors):
        yield f"only uses {present} of the tie are in it"
    elif not _alike(factors):
        yield f"uses of the tie have different weights, {_rounded(factors)}: one is counted twice"


def _of_scale(scale: float, counts: Mapping[str, int]) -> Iterator[str]:
    if _is(scale, 0.0):
        yield "it is missing: the gradient is zero or None"
    elif not _is(scale, 1.0):
        yield f"it is {scale:.4g} times too large{_named(scale, counts)}"


def _named(scale: float, counts: Mapping[str, int]) -> str:
    """Returns which counts a factor is made of, the simplest product of at most two."""
    powers = [
        (name, count, sign) for name, count in counts.items() if count > 1 for sign in (1, -1)
    ]
    for number in (1, 2):
        for chosen in itertools.combinations_with_replacement(powers, number):
            product = math.prod(count**sign for _, count, sign in chosen)
            if math.isclose(product, scale, rel_tol=_CLOSE):
                words = (
                    f"{'multiplied' if sign > 0 else 'divided'} by the number of {name}, {count}"
                    for name, count, sign in chosen
                )
                return f": it is {' and '.join(words)}, once too often"
    return ""


def _present(factors: Sequence[float]) -> list[int]:
    return [index for index, factor in enumerate(factors) if not _is(factor, 0.0)]


def _alike(factors: Sequence[float]) -> bool:
    return all(_is(factor, factors[0]) for factor in factors)


def _is(value: float, expected: float) -> bool:
    return math.isclose(value, expected, rel_tol=_CLOSE, abs_tol=_CLOSE)


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 3) for value in values]


def _listed(ratios: Tensor) -> list[float]:
    return _rounded(ratios.flatten().tolist())
