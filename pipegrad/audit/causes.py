"""Causes: what the ratios of a gradient's parts say, in words.

[Note: the cheapest explanation] Several sums of parts may make one gradient. Each is put in words,
and words cost: a known cause, such as a count that is applied twice, costs 1, and a number that
nothing explains costs more. The cheapest one is said. If no sum makes the gradient, other values
were computed, and nothing more is known.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from pipegrad.audit.loss_parts import BEFORE, BEHIND, MICROBATCHES, REPLICAS, Fit
from pipegrad.audit.report import shown

_CLOSE = 0.02  # of a ratio; two causes differ by far more
_EXACT = 1e-3  # of a factor that is to be a count
_NONE = 1e-3  # a share below this is no share
_FREE = 4  # cost of what no known cause explains
_MOST_POWER = 4  # of a count in a factor
_TIMES = ("", " once", " twice", " three times", " four times")
GRADIENT = "gradient"  # a view in which the gradient has no parts


class Cause(NamedTuple):
    """What is wrong, and what to do; "" if nothing is known."""

    words: str
    advice: str = ""


class Said(NamedTuple):
    """A cause in one explanation, and what it costs; see [Note: the cheapest explanation]."""

    words: str
    advice: str = ""
    cost: int = 1


@dataclass(frozen=True)
class Place:
    """What is known of a rank and of its other gradients, for the words of a cause.

    Attributes:
        replicas: Whose data the rank has had; several where a sharded gradient lies on them.
        uses: Of a tied parameter on this rank.
        holders: How many ranks of a replica hold the parameter.
        counts: Name -> a number that a gradient may be multiplied or divided by, such as
            ``{"microbatches": 4, "targets": 1024}``.
        num_replicas: Of different data.
        stages: Ranks of a replica.
        targets: Of each replica and microbatch.
        terms: Paths of the output's tensors that the loss depends on.
        usual: The factor by which parameters of this rank that are not tied are too large.
        usual_of_uses: The same of the ranks that have each use.
        is_apart: Whether the parameter has the data of the own replica alone on all ranks.
        is_coupled: Whether no parts of microbatches make the gradient of the batch.
        after: Factor by which the rank multiplies gradients after it has clipped them.
    """

    replicas: Sequence[int]
    uses: Sequence[int]
    holders: int
    counts: Mapping[str, int]
    num_replicas: int = 1
    stages: int = 1
    targets: Sequence[int] = ()
    terms: Sequence[str] = ("",)
    usual: float | None = None
    usual_of_uses: Sequence[float | None] = ()
    is_apart: bool = True
    is_coupled: bool = False
    after: float = 1.0


class Factors(NamedTuple):
    """Ratios as a product: a number, and factors of each dimension.

    Factors are 1 for what is there once, and 0 for what is missing.
    """

    scale: float
    replicas: list[float]
    microbatches: list[float]
    terms: list[float]
    uses: list[float]


STALE = Cause(
    "the gradient is stale: that of the step before is in it",
    "call optimizer.zero_grad() before each step",
)
OTHER_VALUES = Cause(
    "other values were computed than in one process: the gradient is no sum of parts of the batch",
    "look for what differs from the uncut model: dropout, buffers, weights, random numbers, the "
    "order of layers, activations and gradients that arrive changed or rounded, losses that are "
    "not in loss_fn",
)
NOT_SUMMED = Cause(
    "the gradient is not summed over the ranks that hold the parameter: the sum of theirs is right",
    "all-reduce it over these ranks, after the last backward and before the norm",
)
COUPLED = Cause(
    "each microbatch is computed by itself, and that is not the gradient of the batch: its samples "
    "depend on each other, as in BatchNorm or in a loss that is no mean over samples",
    "if this is what you want, give the audit by_microbatch=True; else let all samples of a step "
    "meet, as SyncBatchNorm does for replicas",
)
LATE = Cause(
    "gradients are clipped while a loss scale of {scale:.5g} is in them: it is removed later",
    "remove the loss scale before clipping, as GradScaler.unscale_ does",
)


class Explanation(NamedTuple):
    """Why a gradient is wrong: the sum of parts that says so, and whether that explains all of it.

    No fit: no sum makes the gradient.
    """

    causes: list[Cause]
    fit: Fit | None = None
    is_known: bool = False


def explained(fitting: Sequence[Fit], place: Place, tolerance: float) -> Explanation:
    """Returns the cheapest explanation of a wrong gradient."""
    best = Explanation([OTHER_VALUES])
    least: tuple[int, int] | None = None
    for fit in fitting:
        said = min(_readings(fit, place, tolerance), key=_cost)
        is_known = all(one.cost < _FREE for one in said)
        key = (_cost(said), fit.num_free)
        # With as many numbers as elements anything can be made, so each number must be known.
        if (fit.is_sure or is_known) and (least is None or key < least):
            least, best = (key, Explanation([Cause(*one[:2]) for one in said], fit, is_known))
    return best


def _cost(said: Sequence[Said]) -> int:
    return sum(one.cost for one in said)


def _readings(fit: Fit, place: Place, tolerance: float) -> Iterator[list[Said]]:
    """Yields ways to put ratios in words: by which term of the loss is the right one."""
    close, exact = _CLOSE + 2 * tolerance, max(_EXACT, 2 * tolerance)
    about = [Said(*STALE)] if abs(fit.before) > close else []
    if place.is_coupled and fit.view != GRADIENT:
        about.append(Said(*COUPLED))
    for term in range(fit.ratios.shape[2]):
        factors = factors_of(fit.ratios, close, term)
        if factors is not None:
            said = [*about, *_of_factors(fit.view, factors, place, close, exact)]
            size = f"it has {factors.scale:.6g} of its size"
            off = f"the gradient is off by more than rounding explains: {size}"
            yield said or [Said(off, cost=_FREE)]
        # Each use of a tied parameter has what the stage has done that uses it.
        uses = [
            (factors_of(fit.ratios[..., use : use + 1], close, term), usual)
            for use, usual in enumerate(place.usual_of_uses)
        ]
        if uses and all(f and _is(f.scale, usual or 1.0, close) for f, usual in uses):
            each = [
                _of_factors(fit.view, f, replace(place, usual=usual, holders=1), close, exact)
                for f, usual in uses
                if f
            ]
            yield [*about, *dict.fromkeys(itertools.chain(*each))]
    weights = [round(ratio, 3) for ratio in fit.ratios.flatten().tolist()]
    words = f"parts of the batch have wrong weights in the gradient: {weights}"
    yield [*about, Said(words, cost=_FREE * fit.ratios.numel())]


def factors_of(ratios: Tensor, close: float = _CLOSE, term: int = 0) -> Factors | None:
    """Returns ratios as a product of a number and factors; None if they are no product.

    Args:
        ratios: ``(replicas, microbatches, terms, uses)``; NaN where they are not known.
        close: Relative error that is allowed.
        term: Whose factor is 1.
    """
    largest = float(ratios.nan_to_num(0.0).abs().max())
    if largest < _NONE:
        return Factors(0.0, *([1.0] * size for size in ratios.shape))
    # What is nearest to its right size is the measure: a use that is counted twice is 2 then.
    own = torch.full_like(ratios, torch.nan)
    own[:, :, term] = ratios[:, :, term]
    is_there = own.abs() >= _NONE + close * close * largest
    if not bool(is_there.any()):  # the term is missing
        own, is_there = ratios, ratios.abs() >= _NONE + close * close * largest
    distance = own.abs().log().abs().where(is_there, torch.inf)
    nearest = [int(i) for i in (distance == distance.min()).nonzero()[0]]
    scale = float(ratios[tuple(nearest)])
    factors = []
    for dim in range(ratios.ndim):
        index: list[int | slice] = [*nearest]
        index[dim] = slice(None)
        factors.append((ratios[tuple(index)] / scale).nan_to_num(1.0))
    product = scale * torch.einsum("a,b,c,d->abcd", *factors)
    if float((product - ratios).nan_to_num(0.0).abs().max()) > close * largest:
        return None
    return Factors(scale, *(factor.tolist() for factor in factors))


def _of_view(view: str, factors: Factors, place: Place, close: float) -> Iterator[Said]:
    """Yields how the loss is divided, if it is divided wrongly."""
    num_replicas = len(_present(factors.replicas, close))
    if view == REPLICAS and num_replicas > 1:
        number = len(factors.microbatches)
        sums = [sum(place.targets[i : i + number]) for i in range(0, len(place.targets), number)]
        yield Said(
            f"replicas count alike, although they have different numbers of targets: {sums}. Each "
            f"divides its loss by its own number",
            "divide by the number of targets of all replicas",
        )
    elif view == MICROBATCHES and num_replicas * len(_present(factors.microbatches, close)) > 1:
        if len(set(place.targets)) > 1:
            yield Said(
                "the gradient is a mean of means: microbatches count alike, although they have "
                f"different numbers of targets: {shown([str(n) for n in place.targets])}",
                "sum the losses of targets, and divide by the number of targets of the whole step",
            )
        else:
            yield Said(
                "the gradient is a mean of means: the loss of the batch is not the mean of the "
                "losses of its microbatches",
                "let the loss see all samples of a step; or give the audit a loss_fn that is the "
                "mean over microbatches, if this is what you want",
            )
    elif view in {BEFORE, BEHIND}:
        which = "before" if view == BEFORE else "behind"
        yield Said(
            f"outputs are compared with the targets of another microbatch: the one {which}",
            "give the last stage the targets of the microbatch that arrives",
        )


def _of_factors(
    view: str, factors: Factors, place: Place, close: float, exact: float
) -> Iterator[Said]:
    if factors.scale == 0:
        yield Said(
            "the gradient is missing: it is zero or None",
            "look for a stage without a backward, a detached activation, or a reduction that "
            "skips it",
        )
        return
    yield from _of_view(view, factors, place, close)
    yield from _of_microbatches(factors.microbatches, close)
    yield from _of_replicas(factors.replicas, place, close)
    yield from _of_terms(factors.terms, place, close)
    yield from _of_uses(factors.uses, factors.scale, place, close)
    if len(_present(factors.uses, close)) == len(factors.uses) and not _alike(factors.uses, close):
        return  # no scale is the one of all uses
    # What is not added up may have its own mean: its weight is as much larger.
    natural = [1.0]
    for of_dim in (factors.microbatches, factors.replicas):
        share = len(of_dim) / len(_present(of_dim, close))
        natural += [x * share for x in natural] if share > 1 else []
    scale = factors.scale
    if any(_is(scale, x, exact) for x in natural):
        return
    relative = dict.fromkeys([scale, scale / max(natural)])
    yield from min((_of_scale(x, scale, place, exact) for x in relative), key=_cost)


def _of_microbatches(factors: Sequence[float], close: float) -> Iterator[Said]:
    present, number = _present(factors, close), len(factors)
    if not _alike([factors[index] for index in present], close):
        words = f"microbatches count differently in the gradient: {_rounded(factors)}"
        yield Said(
            words, "let each microbatch run once, and reduce once behind the last one", _FREE
        )
    elif len(present) < number:
        is_tail = present == list(range(number - len(present), number))
        several = "microbatch is" if len(present) == 1 else f"{len(present)} microbatches are"
        which = f"the last {several}" if is_tail else f"microbatches {present} (from 0) are"
        yield Said(
            f"only {which} in the gradient, of {number}",
            "add up the gradients of all microbatches: do not set them to zero or overwrite "
            "them between the backwards of a step",
        )


def _of_replicas(factors: Sequence[float], place: Place, close: float) -> Iterator[Said]:
    present, number = _present(factors, close), len(factors)
    if not _alike([factors[index] for index in present], close):
        yield Said(f"replicas count differently in the gradient: {_rounded(factors)}", cost=_FREE)
    elif len(present) < number and present == sorted(place.replicas) and place.is_apart:
        yield Said(
            f"the gradient is not reduced over the {number} replicas: each one has that of its "
            f"own data",
            "all-reduce it over the data-parallel group, or wrap the stage in DDP or FSDP2",
        )
    elif len(present) < number:
        yield Said(
            f"only the data of replicas {present} (from 0) of {number} is in the gradient",
            "give each replica its own rows, and sum the gradients of all: broadcast none",
        )


def _of_terms(factors: Sequence[float], place: Place, close: float) -> Iterator[Said]:
    present = _present(factors, close)
    for index, (path, factor) in enumerate(zip(place.terms, factors, strict=True)):
        part = f"the part of the loss that comes from output{path}"
        if index not in present:
            yield Said(f"{part} is not in the gradient", "let its gradient flow to all stages")
        elif not _is(factor, 1.0, close):
            chosen = _chosen(factor, place.counts, close)
            words = f"is multiplied by {factor:.4g}" if chosen is None else _counted(chosen)
            cost = _FREE if chosen is None else len(chosen)
            yield Said(f"{part} {words}", "scale each part of the loss once", cost)


def _of_uses(factors: Sequence[float], scale: float, place: Place, close: float) -> Iterator[Said]:
    present, number = _present(factors, close), len(factors)
    if len(present) < number:
        which = "its own use" if present == sorted(place.uses) else f"uses {present} (from 0)"
        yield Said(
            f"the tie is not reduced: of {number} uses of the parameter, the gradient has that "
            f"of {which} alone",
            "pipegrad.attach(schedule, topology=pipegrad.Topology.create(pipeline="
            f"{place.stages}), tied=pipegrad.find_tied(model)), or all-reduce its gradient "
            "over the ranks that hold it",
        )
    elif not _alike(factors, close):
        yield Said(
            "uses of the tied parameter count differently in its gradient: "
            f"{_rounded([scale * factor for factor in factors])} times",
            "add up the gradient of each use once, in one scale on all stages",
            _FREE,
        )


def _of_scale(relative: float, scale: float, place: Place, close: float) -> list[Said]:
    """Returns the causes of a factor that all parts have; `relative` is without that of means."""
    if place.after != 1 and _is(relative * place.after, 1.0, _CLOSE):
        return [Said(LATE.words.format(scale=relative), LATE.advice)]
    if place.usual is None:
        alone = _of_reductions(relative, place, close) if place.holders > 1 else None
        return [alone] if alone else _of_counts(relative, place.counts, close)
    # A parameter of its own scale is reduced otherwise than those beside it.
    own, shared = scale / place.usual, place.usual * relative / scale
    if _is(own, 1.0, close):
        return _of_counts(relative, place.counts, close)
    if alone := _of_reductions(own, place, close):
        more = [] if _is(shared, 1.0, close) else _of_counts(shared, place.counts, close)
        return [alone, *more]
    if _is(shared, 1.0, close):
        beside = "and those of other parameters of the rank are right"
        words = f"the gradient is multiplied by {scale:.4g}, {beside}"
        return [Said(words, _LOOK, _FREE)]
    return _of_counts(relative, place.counts, close)


_LOOK = (
    "look for what scales it; if the step clips by its own code, give clip_norm, or call "
    "pipegrad.audit.before_clipping()"
)


def _of_reductions(factor: float, place: Place, close: float) -> Said | None:
    """Returns the cause of a factor that one parameter of a rank has, by its reductions."""
    size = max(factor, 1 / factor) if factor > 0 else 0.0
    ways = {place.num_replicas: f"the {place.num_replicas} replicas"}
    if place.holders > 1:
        more = f", or {ways[place.holders]}" if place.holders in ways else ""
        ways.setdefault(place.stages, f"the {place.stages} ranks of its pipeline")
        ways[place.holders] = f"the {place.holders} ranks that hold it{more}"
    number = next((n for n in ways if n > 1 and _is(size, n, close)), None)
    if number is None:
        return None
    what = "tie" if place.holders > 1 else "parameter"
    if factor > 1:
        return Said(
            f"the {what} is reduced twice: the gradient is {size:.4g} times too large, as if it "
            f"was summed once more over {ways[number]}",
            "reduce it over these ranks once",
        )
    return Said(
        f"the {what} is averaged: the gradient is {size:.4g} times too small, as if it was "
        f"averaged over {ways[number]}",
        "sum it over these ranks, and do not divide",
    )


def _of_counts(factor: float, counts: Mapping[str, int], close: float) -> list[Said]:
    """Returns the cause of a factor that all parameters of a rank have."""
    chosen = _chosen(factor, counts, close)
    if chosen is None:
        return [Said(f"the gradient is multiplied by {factor:.4g}", _LOOK, _FREE)]
    if factor > 1:
        size, advice = (
            f"{factor:.4g} times too large",
            "divide the loss or the gradient by it once",
        )
    else:
        size, advice = (f"{1 / factor:.4g} times too small", "divide by it once, not again")
    if abs(chosen[0][2]) > 1:
        advice = "scale in one place: here each stage scales what the next one has scaled"
    words = f"the gradient is {size}: it {_counted(chosen)}"
    return [Said(words, advice, sum(abs(power) for _, _, power in chosen))]


def _chosen(
    factor: float, counts: Mapping[str, int], close: float
) -> list[tuple[str, int, int]] | None:
    """Returns counts by name, number and power that make a factor; None if none do."""
    names = [(name, count) for name, count in counts.items() if count > 1]
    every: list[list[tuple[str, int, int]]] = [[(*one, sign)] for one in names for sign in (1, -1)]
    # Each stage may scale what the next one has scaled.
    powers = range(2, _MOST_POWER + 1)
    every += [[(*one, sign * p)] for p in powers for one in names[:1] for sign in (1, -1)]
    for first, second in itertools.combinations(names, 2):
        for signs in ((1, 1), (-1, -1), (1, -1), (-1, 1)):
            every.append([(*first, signs[0]), (*second, signs[1])])
    for chosen in every:
        if math.isclose(math.prod(n**power for _, n, power in chosen), factor, rel_tol=close):
            return chosen
    return None


def _counted(chosen: Sequence[tuple[str, int, int]]) -> str:
    """Returns the words for a factor that is made of counts."""
    words = " and ".join(
        f"{'multiplied' if power > 0 else 'divided'} by the number of {name}, {count},"
        f"{_TIMES[abs(power)]}"
        for name, count, power in chosen
    )
    return f"is {words} too often"


def _present(factors: Sequence[float], close: float) -> list[int]:
    return [index for index, factor in enumerate(factors) if abs(factor) > _NONE + close * close]


def _alike(factors: Sequence[float], close: float) -> bool:
    return all(_is(factor, factors[0], close) for factor in factors)


def _is(value: float, expected: float, close: float) -> bool:
    return math.isclose(value, expected, rel_tol=close, abs_tol=close if expected == 0 else 0.0)


def _rounded(values: Sequence[float]) -> list[float]:
    return [float(f"{value:.3g}") if abs(value) > _NONE else 0.0 for value in values]
