"""Words for hypotheses and scales that no defect of test_explained makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipegrad.audit.causes import NOT_KNOWN, Cause, Place, explained
from pipegrad.audit.hypotheses import AT_ONCE, Fit, Hypothesis, fits
from pipegrad.audit.truth import BEFORE, BEHIND, MICROBATCHES, WHOLE

COUNTS = {"microbatches": 3, "replicas": 2, "targets": 140}
TIMES, BY = "it is multiplied by the number of", "it is divided by the number of"


def found(
    *scales: float, share: float = 1.0, tolerance: float = 1e-4, is_sure: bool = True, **own: Any
) -> list[Cause]:
    """Returns the causes of a fit on a rank that has the second replica's data."""
    of_place = {
        "replicas": [1], "uses": [0], "holders": 1, "counts": COUNTS, "num_replicas": 2,
        "stages": 4, "targets": [1, 2, 3, 1, 1, 2], "terms": ["[0]", "[1]"], "num_uses": 2,
        # Of a tie the others are right; else all parameters of the rank have this scale.
        "usual": 1.0 if "holders" in own else (scales or (1.0,))[0],
    }  # fmt: skip
    names = Hypothesis.__dataclass_fields__.keys() & own.keys()
    made = Hypothesis(**{name: own.pop(name) for name in names})
    one = Fit(made, scales or (1.0,), share, is_sure)
    return list(explained([one], Place(**{**of_place, **own}), tolerance).causes)


def case(start: str, *scales: float, more: str = "", advice: str = "", **own: Any) -> Any:
    return pytest.param(scales, own, start, more, advice, id=start + more)


HALF: dict[str, Any] = {"replicas": (1,), "share": 0.5}
THIRD: dict[str, Any] = {"last": 1, "share": 1 / 3}
ONE_CAUSE = [
    case("the gradient is stale: that of the step before", advice="zero_grad", is_stale=True),
    case(
        "the gradient is a mean of means",
        more="is not the mean",
        view=MICROBATCHES,
        targets=[2] * 6,
    ),
    case("outputs are compared with the targets", more="the one before", view=BEFORE),
    case("outputs are compared with the targets", more="the one behind", view=BEHIND),
    case(
        "each microbatch is computed by itself",
        advice="by_microbatch=True",
        view=WHOLE,
        is_coupled=True,
    ),
    case("", 3.0, more=f"{TIMES} microbatches, 3", is_coupled=True),
    case("the part of the loss that comes from output[0] is not in", 0.0, 1.0, by_term=True),
    case("the gradient is missing: it is zero or None", 0.0),
    # Its part of the mean, and its own mean.
    case("only the last microbatch is in the gradient", **THIRD),
    case("only the last microbatch is in the gradient, of 3", 3.0, **THIRD),
    case("only the last 2 microbatches are in the gradient", last=2, share=2 / 3),
    case("the gradient is not reduced over the 2 replicas", 2.0, **HALF),
    case("only the data of replicas [1] (from 0)", is_apart=False, **HALF),
    case("the tie is not reduced", more="has that of use 1 (from 0) alone", use=1, holders=2),
    case("the tie is not reduced", more="has that of its own use alone", use=0, holders=2),
    case(
        "the tie is reduced twice: the gradient is 2 times too large",
        2.0,
        more="over the 2 ranks that hold it, or the 2 replicas",
        advice="reduce it over these ranks once",
        holders=2,
    ),
    case("the tie is averaged: ", 0.25, more="4 ranks", holders=2),
    case("the parameter is reduced twice", 2.0, more="over the 2 replicas", usual=1.0),
    # As large as other parameters; of one rank alone.
    case("", 2.0, more="the number of replicas, 2,", holders=2, usual=2.0),
    case("", 2.0, more=f"2 times too large: {TIMES} replicas, 2, once too often"),
    case("the gradient is multiplied by 1.05", 1.05, tolerance=0.01),
    case("", 1 / 500, more="500 times too small", counts={"targets": 500}),
    # A count of one explains nothing.
    case("the gradient is multiplied by 2.5", 2.5, counts={"replicas": 1}),
    case("the gradient is multiplied by 1.7", 1.7, advice="clip_norm"),
    case("the gradient is multiplied by -1", -1.0, advice="clip_norm"),
    case("the gradient is multiplied by 5", 5.0, usual=1.0),
    case("the gradient is multiplied by 3.02", 3.02),  # only near a count
    case("the gradient is off by more than rounding explains", 1.0001),
]


@pytest.mark.parametrize(("scales", "own", "start", "more", "advice"), ONE_CAUSE)
def test_a_hypothesis_and_its_scale_have_one_cause(
    scales: tuple[float, ...], own: dict[str, Any], start: str, more: str, advice: str
) -> None:
    [cause] = found(*scales, **own)
    assert cause.words.startswith(start)
    assert more in cause.words
    assert advice in cause.advice


PRODUCTS = {
    3.0: [f"3 times too large: {TIMES} microbatches, 3, once"],
    1 / 3: [f"3 times too small: {BY} microbatches, 3, once"],
    1 / 140: [f"140 times too small: {BY} targets, 140, once"],
    6.0: [f"{TIMES} microbatches, 3, once", "and multiplied by the number of replicas, 2, once"],
    1 / 6: [f"{BY} microbatches, 3, once", "and divided by the number of replicas, 2, once"],
    1.5: [f"{TIMES} microbatches, 3, once", "and divided by the number of replicas, 2, once"],
    9.0: [f"{TIMES} microbatches, 3, twice too often"],
    1 / 27: [f"{BY} microbatches, 3, three times too often"],
}


@pytest.mark.parametrize("scale", PRODUCTS)
def test_products_and_powers_of_counts(scale: float) -> None:
    [cause] = found(scale)
    assert all(says in cause.words for says in PRODUCTS[scale])
    assert cause.words.endswith(" too often")
    once = "divide the loss or the gradient" if scale > 1 else "divide by it once"
    is_power = scale in (9.0, 1 / 27)
    assert cause.advice.startswith("scale in one place" if is_power else once)


def test_causes_that_are_there_together_are_all_said() -> None:
    tie, other = (cause.words for cause in found(6.0, holders=2, usual=3.0))
    assert tie.startswith("the tie is reduced twice")
    assert "the number of microbatches, 3," in other
    every = found(3.0, use=0, is_stale=True, holders=2, **HALF)
    starts = ("the gradient is stale", "the gradient is not r", "the tie is not", "")
    assert len(every) == len(starts)
    assert all(said.words.startswith(start) for said, start in zip(every, starts, strict=True))


def test_a_known_cause_is_said_before_a_number_and_without_any_none_is_known() -> None:
    place = Place([1], [0], 1, COUNTS, targets=[1, 2, 3, 1, 1, 2], num_replicas=2)
    free, known = Fit(Hypothesis(), (1.7,)), Fit(Hypothesis(MICROBATCHES), (1.0,))
    assert explained([free, known], place, 1e-4).fit is known
    assert explained([], place, 1e-4).causes == [NOT_KNOWN]
    # Any hypothesis makes one element, so its scale must be known.
    assert found(1.7, is_sure=False) == [NOT_KNOWN]
    assert TIMES in found(3.0, is_sure=False)[0].words
    assert found(3.0, is_sure=False, **THIRD) == [NOT_KNOWN]
    # A larger gradient has shown it.
    others = frozenset({Hypothesis(last=1)})
    [cause] = found(3.0, is_sure=False, others=others, **THIRD)
    assert cause.words.startswith("only the last microbatch")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def test_hypotheses_are_vectors_and_the_smallest_residual_is_told() -> None:
    parts = random(2, 3, 2, 2, 40)
    views = {AT_ONCE: parts.sum((0, 1, 2, 3)).reshape(1, 1, 1, 1, -1), WHOLE: parts}
    last = 5 * parts[:, -2:].sum((0, 1, 2, 3))
    (fit, *_), least = fits(last, views, 1e-9)
    assert fit.hypothesis == Hypothesis(WHOLE, last=2)
    assert fit.scales == pytest.approx((5.0,))
    assert fit.share == pytest.approx(2 / 3)
    assert least < 1e-9
    (fit, *_), _ = fits(parts[1, ..., 0, :].sum((0, 1)), views, 1e-9)
    assert fit.hypothesis == Hypothesis(WHOLE, replicas=(1,), use=0)
    before = random(40, seed=1)
    (fit, *_), _ = fits(2 * views[AT_ONCE].flatten() + 3 * before, views, 1e-9, [0], before)
    assert fit.hypothesis == Hypothesis(is_stale=True)
    assert fit.scales == pytest.approx((2.0,))
    terms = parts.sum((0, 1, 3))
    fitting, _ = fits(terms[0] + 3 * terms[1], views, 1e-9)
    assert [one.hypothesis.by_term for one in fitting] == [True]
    assert fitting[0].scales == pytest.approx((1.0, 3.0))
    parts[:, :, 1] *= 1e-12  # without a share
    fitting, _ = fits(2 * parts.sum((0, 1, 2, 3)), views, 1e-6)
    assert [one.scales[1:] for one in fitting if one.hypothesis.by_term] == [
        pytest.approx((torch.nan,), nan_ok=True)
    ]
    fitting, least = fits(random(40, seed=9), views, 1e-9)
    assert fitting == []
    assert 0.5 < least <= 1
