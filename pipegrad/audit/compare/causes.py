"""Causes: what the weights of a gradient's parts say, in words."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pipegrad.audit.compare.contributions import Fit

_CLOSE = 0.02  # of a ratio; two causes differ by far more
_EXACT = 1e-3  # of a factor that is to be a count
_NONE = 1e-3  # a share below this is no share
_MOST_REST = 0.05  # of a gradient, if weights are to say what it is made of
_MOST_POWER = 4  # of a count in a factor
_TIMES = ("", " once", " twice", " three times", " four times")


class Cause(NamedTuple):
    """What is wrong, and what to do; "" if nothing is known."""

    words: str
    advice: str = ""


@dataclass(frozen=True)
class Place:
    """Which parts are a rank's own, for the words of a cause.

    Attributes:
        replicas: Whose data the rank has had; several where a sharded gradient lies on them.
        uses: Of a tied parameter on this rank.
        holders: How many ranks of a replica hold the parameter.
        counts: Name -> a number that a gradient may be multiplied or divided by, such as
            ``{"microbatches": 4, "targets": 1024}``.
        weights: The right weights of replicas and microbatches.
        usual: The factor by which parameters of this rank that are not tied are too large.
    """

    replicas: Sequence[int]
    uses: Sequence[int]
    holders: int
    counts: Mapping[str, int]
    weights: Tensor
    usual: float | None = None


class Factors(NamedTuple):
    """Ratios as a product: a number, and factors of each dimension.

    Factors are 1 for what is there once, and 0 for what is missing.
    """

    scale: float
    replicas: list[float]
    microbatches: list[float]
    uses: list[float]


STALE = Cause(
    "the gradient is stale: that of the step before is in it",
    "call optimizer.zero_grad() before each step",
)
OTHER_VALUES = Cause(
    "other values were computed than in one process: the gradient is no sum of parts of the batch",
    "look for what differs from the uncut model: dropout, buffers, weights, random numbers, the "
    "order of layers, activations that arrive changed, losses that are not in loss_fn",
)


def causes(fitted: Fit, place: Place, tolerance: float) -> list[Cause]:
    """Returns why a gradient is wrong, one cause for each; empty if it is right.

    Args:
        fitted: The gradient as a sum of parts.
        place: Of the rank that has it.
        tolerance: Of the gradient, relative to its norm.
    """
    if fitted.rest > max(_MOST_REST, 4 * tolerance):
        return [OTHER_VALUES]  # then weights say nothing
    close = _CLOSE + 2 * tolerance
    found = list[Cause]()
    if abs(fitted.before) > close:
        found.append(STALE)
    if place.weights.numel() > 1 and (means := _means_of_means(fitted.ratios, place, close)):
        found.append(means)
    else:
        factors = factors_of(fitted.ratios, close)
        if factors is None:
            weights = [round(ratio, 3) for ratio in fitted.ratios.flatten().tolist()]
            found.append(Cause(f"parts of the batch have wrong weights in the gradient: {weights}"))
        else:
            found += _of_factors(factors, place, close)
    if fitted.rest > max(4 * tolerance, 1e-3):
        found.append(OTHER_VALUES)
    return found


def factors_of(ratios: Tensor, close: float = _CLOSE) -> Factors | None:
    """Returns ratios as a product of a number and factors; None if they are no product."""
    largest = float(ratios.abs().max())
    if largest < _NONE:
        return Factors(0.0, *([1.0] * size for size in ratios.shape))
    # The smallest one that is not zero is the measure: a use that is counted twice is 2 then.
    sizes = ratios.abs().masked_fill(ratios.abs() < _NONE + close * close * largest, math.inf)
    least = [int(i) for i in (sizes == sizes.min()).nonzero()[0]]
    scale = float(ratios[tuple(least)])
    factors = []
    for dim in range(ratios.ndim):
        index: list[int | slice] = [*least]
        index[dim] = slice(None)
        factors.append((ratios[tuple(index)] / scale).tolist())
    replicas, microbatches, uses = (torch.tensor(f, dtype=ratios.dtype) for f in factors)
    product = scale * replicas[:, None, None] * microbatches[:, None] * uses
    if float((product - ratios).abs().max()) > close * largest:
        return None
    return Factors(scale, *factors)


def _means_of_means(ratios: Tensor, place: Place, close: float) -> Cause | None:
    """Returns the cause if each part counts alike although parts have different weights."""
    weights = place.weights
    shares = (ratios * weights[..., None])[..., :1] * weights.numel()
    uneven = float(weights.max() / weights.min()) if float(weights.min()) > 0 else math.inf
    if uneven < 1 + 2 * close or float((shares - 1).abs().max()) > close:
        return None
    return Cause(
        "the gradient is a mean of means: microbatches count alike, although they have different "
        f"numbers of targets (right weights: {[round(w, 3) for w in weights.flatten().tolist()]})",
        "sum the losses of targets, and divide by the number of targets of the whole step",
    )


def _of_factors(factors: Factors, place: Place, close: float) -> Iterator[Cause]:
    if factors.scale == 0:
        yield Cause(
            "the gradient is missing: it is zero or None",
            "look for a stage without a backward, a detached activation, or a reduction that "
            "skips it",
        )
        return
    yield from _of_microbatches(factors.microbatches, close)
    yield from _of_replicas(factors.replicas, place.replicas, close)
    yield from _of_uses(factors.uses, factors.scale, place.uses, close)
    if len(_present(factors.uses, close)) == len(factors.uses) and not _alike(factors.uses, close):
        return  # no scale is the one of all uses
    # What is not added up may have its own mean: its weight is as much larger.
    natural = [1.0]
    for of_dim in (factors.microbatches, factors.replicas):
        share = len(of_dim) / len(_present(of_dim, close))
        natural += [x * share for x in natural] if share > 1 else []
    scale, usual = factors.scale, place.usual
    if place.holders > 1:
        rest = [scale / x for x in ([usual] if usual else natural)]
        if any(_is(x, place.holders, close) for x in rest):
            scale /= place.holders
            yield Cause(
                f"the tie is reduced twice: the gradient is {place.holders} times too large, and "
                f"{place.holders} ranks hold the parameter",
                "reduce it over these ranks once",
            )
    if not any(_is(scale, x, close) for x in natural):
        is_alone = place.holders <= 1 and usual is not None and _is(usual, 1.0, close)
        counts = {} if is_alone and scale > 0 and len(natural) == 1 else place.counts
        yield _of_scale(scale, max(natural), counts, max(_EXACT, close - _CLOSE))


def _of_microbatches(factors: Sequence[float], close: float) -> Iterator[Cause]:
    present, number = _present(factors, close), len(factors)
    if len(present) < number:
        is_tail = present == list(range(number - len(present), number))
        several = "microbatch is" if len(present) == 1 else f"{len(present)} microbatches are"
        which = f"the last {several}" if is_tail else f"microbatches {present} (from 0) are"
        yield Cause(
            f"only {which} in the gradient, of {number}",
            "add up the gradients of all microbatches: do not set them to zero or overwrite them "
            "between the backwards of a step",
        )
    elif not _alike(factors, close):
        yield Cause(f"microbatches count differently in the gradient: {_rounded(factors)}")


def _of_replicas(factors: Sequence[float], own: Sequence[int], close: float) -> Iterator[Cause]:
    present, number = _present(factors, close), len(factors)
    if len(present) < number and present == sorted(own):
        yield Cause(
            f"the gradient is not reduced over the {number} replicas: each one has that of its own "
            f"data",
            "all-reduce it over the data-parallel group, or wrap the stage in DDP or FSDP2",
        )
    elif len(present) < number:
        yield Cause(f"only replicas {present} (from 0) of {number} are in the gradient")
    elif not _alike(factors, close):
        yield Cause(f"replicas count differently in the gradient: {_rounded(factors)}")


def _of_uses(
    factors: Sequence[float], scale: float, own: Sequence[int], close: float
) -> Iterator[Cause]:
    present, number = _present(factors, close), len(factors)
    if len(present) < number:
        which = "its own use" if present == sorted(own) else f"uses {present} (from 0)"
        yield Cause(
            f"the tie is not reduced: of {number} uses of the parameter, the gradient has that of "
            f"{which} alone",
            "pipegrad.attach(schedule, tied=pipegrad.find_tied(model)), or all-reduce its gradient "
            "over the ranks that hold it",
        )
    elif not _alike(factors, close):
        yield Cause(
            "uses of the tied parameter count differently in its gradient: "
            f"{_rounded([scale * factor for factor in factors])} times",
            "add up the gradient of each use once, in one scale on all stages",
        )


def _of_scale(scale: float, natural: float, counts: Mapping[str, int], close: float) -> Cause:
    """Returns the cause of a factor that all parts have.

    Args:
        scale: The factor.
        natural: The factor of a mean over the parts that are there, instead of over all parts.
        counts: Name -> a number.
        close: Relative error that is allowed.
    """
    for chosen in _products(counts):
        product = math.prod(count**power for _, count, power in chosen)
        for relative in dict.fromkeys([scale / natural, scale]):
            if math.isclose(product, relative, rel_tol=close):
                return _counted(relative, chosen)
    alone = "" if counts else ", and those of other parameters of the rank are right"
    return Cause(
        f"the gradient is multiplied by {scale:.4g}{alone}",
        "look for what scales it; if the step clips by its own code, give clip_norm, or call "
        "pipegrad.audit.before_clipping()",
    )


def _products(counts: Mapping[str, int]) -> Iterator[list[tuple[str, int, int]]]:
    """Yields products of counts by name, number and power: the likely ones first."""
    names = [(name, count) for name, count in counts.items() if count > 1]
    yield from ([(*one, sign)] for one in names for sign in (1, -1))
    # Each stage may scale what the next one has scaled.
    for power in range(2, _MOST_POWER + 1):
        yield from ([(*one, sign * power)] for one in names[:1] for sign in (1, -1))
    for first, second in itertools.combinations(names, 2):
        for signs in ((1, 1), (-1, -1), (1, -1), (-1, 1)):
            yield [(*first, signs[0]), (*second, signs[1])]


def _counted(scale: float, chosen: Sequence[tuple[str, int, int]]) -> Cause:
    """Returns the cause of a factor that is made of counts."""
    words = " and ".join(
        f"{'multiplied' if power > 0 else 'divided'} by the number of {name}, {count},"
        f"{_TIMES[abs(power)]}"
        for name, count, power in chosen
    )
    if scale > 1:
        size, advice = f"{scale:.4g} times too large", "divide the loss or the gradient by it once"
    else:
        size, advice = f"{1 / scale:.4g} times too small", "divide by it once, not again"
    if abs(chosen[0][2]) > 1:
        advice = "scale in one place: here each stage scales what the next one has scaled"
    return Cause(f"the gradient is {size}: it is {words} too often", advice)


def _present(factors: Sequence[float], close: float) -> list[int]:
    return [index for index, factor in enumerate(factors) if abs(factor) > _NONE + close * close]


def _alike(factors: Sequence[float], close: float) -> bool:
    return all(_is(factor, factors[0], close) for factor in factors)


def _is(value: float, expected: float, close: float) -> bool:
    return math.isclose(value, expected, rel_tol=close, abs_tol=close if expected == 0 else 0.0)


def _rounded(values: Sequence[float]) -> list[float]:
    return [float(f"{value:.3g}") for value in values]
