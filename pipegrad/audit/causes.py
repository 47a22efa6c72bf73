"""Causes: the words for a hypothesis that makes a gradient, and for its scale.

Several hypotheses may make one gradient. A scale that is a known count is preferred to a number
without an explanation. Among these, the explanation with the fewest causes is preferred.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pipegrad.audit.hypotheses import AT_ONCE, Fit, Hypothesis
from pipegrad.audit.report import shown
from pipegrad.audit.truth import BEFORE, BEHIND, MICROBATCHES, REPLICAS

_CLOSE = 0.02  # of a ratio, because two causes differ by far more
_EXACT = 1e-3  # of a factor that should be a count
_NONE = 1e-3  # a smaller share counts as zero
_TIMES = ("", " once", " twice", " three times")


class Cause(NamedTuple):
    """The words for a defect, and advice; "" if there is none."""

    words: str
    advice: str = ""


class Odd(Cause):
    """A cause with a number that no known defect makes."""


@dataclass(frozen=True)
class Place:
    """Facts about a rank and its other gradients, for the words of a cause.

    Attributes:
        replicas: Replicas whose data the rank got; several if a sharded gradient lies there.
        uses: Indices of the uses of a tied parameter on this rank.
        holders: Number of ranks of a replica that hold the parameter.
        counts: Name -> a number that a gradient may be multiplied or divided by, such as
            ``{"microbatches": 4, "targets": 1024}``.
        num_replicas: Number of replicas.
        stages: Number of ranks of a replica.
        targets: Number of targets of each replica and microbatch.
        terms: Paths of the outputs that the loss depends on.
        num_uses: Number of all uses of the parameter.
        usual: The factor by which parameters of this rank that are not tied are too large.
        others: Hypotheses that explain other parameters of the rank.
        is_apart: True if on all ranks the parameter's gradient has data of the rank's replica only.
        is_coupled: True if no parts of microbatches make the gradient of the batch.
    """

    replicas: Sequence[int]
    uses: Sequence[int]
    holders: int
    counts: Mapping[str, int]
    num_replicas: int = 1
    stages: int = 1
    targets: Sequence[int] = ()
    terms: Sequence[str] = ("",)
    num_uses: int = 1
    usual: float = 1.0
    others: frozenset[Hypothesis] = frozenset()
    is_apart: bool = True
    is_coupled: bool = False


STALE = Cause(
    "the gradient is stale: that of the step before is in it",
    "call optimizer.zero_grad() before each step",
)
NOT_KNOWN = Odd(
    "no known cause: the gradient is not that of one process, and no known defect makes it",
    "look for what differs from the uncut model: dropout, buffers, weights, random numbers, the "
    "order of layers, activations and gradients that arrive changed or rounded, losses that are "
    "not in loss_fn; or for several defects at once",
)
NOT_SUMMED = Cause(
    "the gradient is not summed over the ranks that hold the parameter: the sum of theirs is right",
    "all-reduce it over these ranks, after the last backward and before the norm",
)
_COUPLED = Cause(
    "each microbatch is computed by itself, and that is not the gradient of the batch: its samples "
    "depend on each other, as in BatchNorm or in a loss that is no mean over samples",
    "if this is what you want, give the audit by_microbatch=True; else let all samples of a step "
    "meet, as SyncBatchNorm does for replicas",
)
_MISSING = Cause(
    "the gradient is missing: it is zero or None",
    "look for a stage without a backward, a detached activation, or a reduction that skips it",
)
_ONCE, _SUM = "reduce it over these ranks once", "sum it over these ranks, and do not divide"
_LOOK = (
    "look for what scales it; if the step clips by its own code, give clip_norm, or call "
    "pipegrad.audit.before_clipping()"
)


class Explanation(NamedTuple):
    """The causes of a wrong gradient, and the hypothesis that fits."""

    causes: Sequence[Cause]
    fit: Fit | None = None

    @property
    def is_known(self) -> bool:
        """False if it has a number that no known defect makes."""
        return not any(isinstance(cause, Odd) for cause in self.causes)

    def complexity(self) -> tuple[bool, int]:
        """Returns the order of explanations: known ones first, then those with fewer causes."""
        return not self.is_known, len(self.causes)


def explained(fitting: Sequence[Fit], place: Place, tolerance: float) -> Explanation:
    """Returns the simplest explanation of a wrong gradient."""
    close, exact = _CLOSE + 2 * tolerance, max(_EXACT, 2 * tolerance)
    every = list[Explanation]()
    for fit in fitting:
        for causes in _readings(fit, place, close, exact):
            one = Explanation(causes, fit)
            # Any hypothesis fits a gradient of few elements. Its scale may be a count by chance.
            is_usual = not fit.hypothesis.num_defects or fit.hypothesis in place.others
            if causes and (fit.is_sure or (one.is_known and is_usual)):
                every.append(one)
    return min(every, key=Explanation.complexity, default=Explanation([NOT_KNOWN]))


def _readings(fit: Fit, place: Place, close: float, exact: float) -> Iterator[list[Cause]]:
    """Yields the possible lists of causes for a hypothesis and its scales."""
    about = list(_of_hypothesis(fit.hypothesis, place))
    if fit.hypothesis.apart is not None:
        if all(scale > _NONE for scale in fit.scales):  # a missing use is a tie without a reduction
            for scale, share in zip(fit.scales, (fit.share, 1.0), strict=True):
                about += _of_scale(scale, share, replace(place, holders=1, usual=scale), exact)
            yield list(dict.fromkeys(about))
        return
    if not fit.hypothesis.by_term:
        [scale] = fit.scales
        words = (
            f"the gradient is off by more than rounding explains: it has {scale:.6g} of its size"
        )
        yield [*about, *_of_scale(scale, fit.share, place, exact)] or [Odd(words)]
        return
    for scale in fit.scales:
        if abs(scale) > _NONE:  # any term may be the right one
            others = _of_terms([other / scale for other in fit.scales], place, close)
            yield [*about, *others, *_of_scale(scale, fit.share, place, exact)]


def _of_hypothesis(one: Hypothesis, place: Place) -> Iterator[Cause]:
    """Yields the causes that the hypothesis itself contains."""
    if one.is_stale:
        yield STALE
    if place.is_coupled and one.view != AT_ONCE:
        yield _COUPLED
    yield from _of_view(one, place)
    if one.last:
        several = "microbatch is" if one.last == 1 else f"{one.last} microbatches are"
        yield Cause(
            f"only the last {several} in the gradient, of "
            f"{len(place.targets) // place.num_replicas}",
            "add up the gradients of all microbatches: do not set them to zero or overwrite "
            "them between the backwards of a step",
        )
    if one.replicas and set(one.replicas) == set(place.replicas) and place.is_apart:
        yield Cause(
            f"the gradient is not reduced over the {place.num_replicas} replicas: each one has "
            f"that of its own data",
            "all-reduce it over the data-parallel group, or wrap the stage in DDP or FSDP2",
        )
    elif one.replicas:
        yield Cause(
            f"only the data of replicas {list(one.replicas)} (from 0) of {place.num_replicas} is "
            f"in the gradient",
            "give each replica its own rows, and sum the gradients of all: broadcast none",
        )
    if one.use is not None:
        which = "its own use" if [one.use] == list(place.uses) else f"use {one.use} (from 0)"
        yield Cause(
            f"the tie is not reduced: of {place.num_uses} uses of the parameter, the gradient has "
            f"that of {which} alone",
            "pipegrad.attach(schedule, topology=pipegrad.Topology.create(pipeline="
            f"{place.stages}), tied=pipegrad.find_tied(model)); in a loop by hand "
            "pipegrad.GradientSync with the same topology and tied, or all-reduce its gradient "
            "over the ranks that hold it",
        )


def _of_view(one: Hypothesis, place: Place) -> Iterator[Cause]:
    """Yields the cause if the loss is divided wrongly, or computed with wrong targets."""
    number = len(place.targets) // place.num_replicas
    if one.view == REPLICAS and not one.replicas:
        sums = [sum(place.targets[i : i + number]) for i in range(0, len(place.targets), number)]
        yield Cause(
            f"replicas count alike, although they have different numbers of targets: {sums}. Each "
            f"divides its loss by its own number",
            "divide by the number of targets of all replicas",
        )
    elif one.view == MICROBATCHES and not (one.last == 1 and place.num_replicas == 1):
        if len(set(place.targets)) > 1:
            yield Cause(
                "the gradient is a mean of means: microbatches count alike, although they have "
                f"different numbers of targets: {shown([str(n) for n in place.targets])}",
                "sum the losses of targets, and divide by the number of targets of the whole step",
            )
        else:
            yield Cause(
                "the gradient is a mean of means: the loss of the batch is not the mean of the "
                "losses of its microbatches",
                "let the loss see all samples of a step; or give the audit a loss_fn that is the "
                "mean over microbatches, if this is what you want",
            )
    elif one.view in {BEFORE, BEHIND}:
        which = "before" if one.view == BEFORE else "behind"
        yield Cause(
            f"outputs are compared with the targets of another microbatch: the one {which}",
            "give the last stage the targets of the microbatch that arrives",
        )


def _of_terms(factors: Sequence[float], place: Place, close: float) -> Iterator[Cause]:
    for path, factor in zip(place.terms, factors, strict=True):
        part = f"the part of the loss that comes from output{path}"
        if abs(factor) < _NONE + close * close:
            yield Cause(f"{part} is not in the gradient", "let its gradient flow to all stages")
        elif not (math.isnan(factor) or _is(factor, 1.0, close)):
            counted = _counted(factor, place.counts, close)
            words = f"{part} is {counted or f'multiplied by {factor:.4g}'}"
            yield (Cause if counted else Odd)(words, "scale each part of the loss once")


def _of_scale(scale: float, share: float, place: Place, close: float) -> list[Cause]:
    """Returns the causes of a factor that all parts have."""
    if abs(scale) < _NONE:
        return [_MISSING]
    # Without accumulation, the loss may be a mean of its own: weights are larger by 1 / share.
    factors = dict.fromkeys([scale, scale * share])
    if any(_is(factor, 1.0, close) for factor in factors):
        return []
    ways = list[Explanation]()
    for factor in factors:
        # A parameter with another scale than the rest of its rank is reduced differently.
        alone = _of_reductions(scale / place.usual, place, close)
        of_rank = factor * place.usual / scale if alone else factor
        ways.append(Explanation([*alone, *_of_counts(of_rank, place.counts, close)]))
    return list(min(ways, key=Explanation.complexity).causes)


def _of_reductions(factor: float, place: Place, close: float) -> list[Cause]:
    """Returns the cause of a factor of one parameter of a rank, by its reductions."""
    size = max(factor, 1 / factor) if factor > 0 else 1.0
    ways = [(place.num_replicas, "replicas")]
    if place.holders > 1:
        ways = [(place.holders, "ranks that hold it"), *ways]
        ways += [(place.stages, "ranks of its pipeline")] * (place.stages != place.holders)
    over = ", or ".join(f"the {n} {what}" for n, what in ways if n > 1 and _is(size, n, close))
    if not over or _is(size, 1.0, close):
        return []
    what = "tie" if place.holders > 1 else "parameter"
    if factor > 1:
        words, more, advice = "reduced twice", "large, as if it was summed once more", _ONCE
    else:
        words, more, advice = "averaged", "small, as if it was averaged", _SUM
    return [
        Cause(
            f"the {what} is {words}: the gradient is {size:.4g} times too {more} over {over}",
            advice,
        )
    ]


def _of_counts(factor: float, counts: Mapping[str, int], close: float) -> list[Cause]:
    """Returns the cause of a factor that all parameters of a rank share."""
    if _is(factor, 1.0, close):
        return []
    counted = _counted(factor, counts, close)
    if counted is None:
        return [Odd(f"the gradient is multiplied by {factor:.4g}", _LOOK)]
    size, advice = f"{1 / factor:.4g} times too small", "divide by it once, not again"
    if factor > 1:
        size, advice = f"{factor:.4g} times too large", "divide the loss or the gradient by it once"
    if "twice" in counted or "three times" in counted:
        advice = "scale in one place: here each stage scales what the next one has scaled"
    return [Cause(f"the gradient is {size}: it is {counted}", advice)]


def _counted(factor: float, counts: Mapping[str, int], close: float) -> str | None:
    """Returns the words for a factor that is a product of counts; None if it is not one."""
    names = [(name, count) for name, count in counts.items() if count > 1]
    once = [(*one, power) for one in names for power in (1, -1)]
    # Each stage may scale the gradient that the next stage has scaled.
    more = [(*one, power) for one in names for power in (2, -2, 3, -3)]
    pairs = [(a, b) for a, b in itertools.combinations(once, 2) if a[0] != b[0]]
    for made in [*((one,) for one in once), *((one,) for one in more[:4]), *pairs]:
        if _is(math.prod(count**power for _, count, power in made), factor, close):
            words = " and ".join(
                f"{'multiplied' if power > 0 else 'divided'} by the number of {name}, {count},"
                f"{_TIMES[abs(power)]}"
                for name, count, power in made
            )
            return f"{words} too often"
    return None


def _is(value: float, expected: float, close: float) -> bool:
    return math.isclose(value, expected, rel_tol=close)
