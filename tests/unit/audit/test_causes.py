"""Fingerprints of weights that no defect of test_explained makes have a cause, and no other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from pipegrad.audit.causes import (
    GRADIENT,
    OTHER_VALUES,
    Cause,
    Factors,
    Place,
    explained,
    factors_of,
)
from pipegrad.audit.loss_parts import BEFORE, BEHIND, MICROBATCHES, WHOLE, Fit

COUNTS = {"microbatches": 3, "replicas": 2, "targets": 140}
TIMES, BY = "it is multiplied by the number of", "it is divided by the number of"


def ratios(
    scale: float = 1.0,
    replicas: Sequence[float] = (1, 1),
    microbatches: Sequence[float] = (1, 1, 1),
    terms: Sequence[float] = (1,),
    uses: Sequence[float] = (1,),
) -> Tensor:
    dims = [torch.tensor(d, dtype=torch.float64) for d in (replicas, microbatches, terms, uses)]
    return scale * torch.einsum("r,m,t,u->rmtu", *dims)


def found(
    made: Tensor, *, before: float = 0.0, view: str = WHOLE, tolerance: float = 1e-4, **own: Any
) -> list[Cause]:
    """Returns the causes of ratios on a rank that has the second replica's data."""
    options = {
        "replicas": [1], "uses": [0], "holders": 1, "counts": COUNTS, "num_replicas": 2,
        "stages": 4, "targets": [1, 2, 3, 1, 1, 2], "terms": ["[0]", "[1]"][: made.shape[2]],
    }  # fmt: skip
    fit = Fit(view, made, before)
    return explained([fit], Place(**{**options, **own}), tolerance).causes


def words(made: Tensor, **own: Any) -> list[str]:
    return [cause.words for cause in found(made, **own)]


def starting(made: Tensor, start: str, more: str = "", advice: str = "", **own: Any) -> Any:
    return pytest.param(made, own, start, more, advice, id=start)


ONE_CAUSE = [
    starting(ratios(), "the gradient is stale: that of the step before", "", "zero_grad", before=1),
    starting(
        ratios(),
        "the gradient is a mean of means",
        "is not the mean",
        view=MICROBATCHES,
        targets=[2] * 6,
    ),
    starting(ratios(), "outputs are compared with the targets", "the one before", view=BEFORE),
    starting(ratios(), "outputs are compared with the targets", "the one behind", view=BEHIND),
    starting(
        ratios(), "each microbatch is computed by itself", "", "by_microbatch=True", is_coupled=True
    ),
    starting(ratios(3.0), "", f"{TIMES} microbatches, 3", view=GRADIENT, is_coupled=True),
    starting(ratios(terms=(0, 1)), "the part of the loss that comes from output[0] is not in"),
    starting(ratios(1024.0), "gradients are clipped while a loss scale of 1024", after=1 / 1024),
    starting(ratios(0.0), "the gradient is missing: it is zero or None"),
    # Its part of the mean, and its own mean.
    starting(ratios(microbatches=(0, 0, 1)), "only the last microbatch is in the gradient"),
    starting(ratios(3.0, microbatches=(0, 0, 1)), "only the last microbatch is in the gradient"),
    starting(ratios(microbatches=(0, 1, 0)), "only microbatches [1] (from 0) "),
    starting(ratios(microbatches=(1, 0, 1)), "only microbatches [0, 2] (from 0) "),
    starting(ratios(microbatches=(0, 1, 1)), "only the last 2 microbatches are in the gradient"),
    starting(ratios(2.0, replicas=(0, 1)), "the gradient is not reduced over the 2 replicas"),
    starting(ratios(replicas=(0, 1)), "only the data of replicas [1] (from 0)", is_apart=False),
    starting(ratios(replicas=(1, 2)), "replicas count differently in the gradient: [1.0, 2.0]"),
    starting(ratios(uses=(0, 1)), "the tie is not reduced", "uses [1] (from 0) alone", holders=2),
    starting(
        ratios(uses=(2, 1)),
        "uses of the tied parameter count differently in its gradient",
        "[2.0, 1.0]",
        holders=2,
    ),
    # The scale is in the weights.
    starting(ratios(3.0, uses=(2, 1)), "uses of the tied parameter", "[6.0, 3.0]", holders=2),
    # Where nothing is known of other parameters, and where they are right.
    starting(
        ratios(2.0, uses=(1, 1)),
        "the tie is reduced twice: the gradient is 2 times too large",
        "over the 2 ranks that hold it, or the 2 replicas",
        "reduce it over these ranks once",
        holders=2,
    ),
    starting(ratios(2.0, uses=(1, 1)), "the tie is reduced twice", holders=2, usual=1.0),
    starting(ratios(0.25, uses=(1, 1)), "the tie is averaged: ", "4 ranks", holders=2, usual=1.0),
    starting(ratios(2.0), "the parameter is reduced twice", "over the 2 replicas", usual=1.0),
    # Each use has the scale of its stage.
    starting(
        ratios(uses=(1 / 3, 1)),
        "the gradient is 3 times too small",
        f"{BY} microbatches",
        usual=1.0,
        usual_of_uses=(1 / 3, 1.0),
        holders=2,
    ),
    # As large as other parameters; of one rank alone.
    starting(ratios(2.0, uses=(1, 1)), "", "the number of replicas, 2,", holders=2, usual=2.0),
    starting(ratios(2.0), "", f"2 times too large: {TIMES} replicas, 2, once too often"),
    starting(ratios(1.05), "the gradient is multiplied by 1.05", tolerance=0.01),
    starting(ratios(1 / 500), "", "500 times too small", counts={"targets": 500}),
    # A count of one explains nothing.
    starting(ratios(2.5), "the gradient is multiplied by 2.5", counts={"replicas": 1}),
    starting(ratios(1.7), "the gradient is multiplied by 1.7", "", "clip_norm"),
    starting(ratios(-1.0), "the gradient is multiplied by -1", "", "clip_norm"),
    starting(
        ratios(5.0), "the gradient is multiplied by 5, and those of other parameters", usual=1.0
    ),
    starting(ratios(3.02), "the gradient is multiplied by 3.02"),  # only near a count
]


@pytest.mark.parametrize(("made", "own", "start", "more", "advice"), ONE_CAUSE)
def test_wrong_weights_have_one_cause(
    made: Tensor, own: dict[str, Any], start: str, more: str, advice: str
) -> None:
    [cause] = found(made, **own)
    assert cause.words.startswith(start)
    assert more in cause.words
    assert advice in cause.advice


def test_a_tie_twice_has_two_causes_where_more_is_wrong() -> None:
    tie, other = words(ratios(6.0, uses=(1, 1)), holders=2, usual=3.0)
    assert tie.startswith("the tie is reduced twice")
    assert "the number of microbatches, 3," in other
    own = {"holders": 2, "usual": 3.0}
    first, tie = words(ratios(6.0, microbatches=(0, 0, 1), uses=(1, 1)), **own)
    assert first.startswith("only the last microbatch")
    assert tie.startswith("the tie is reduced twice")


PRODUCTS = {
    3.0: [f"3 times too large: {TIMES} microbatches, 3, once"],
    1 / 3: [f"3 times too small: {BY} microbatches, 3, once"],
    1 / 140: [f"140 times too small: {BY} targets, 140, once"],
    6.0: [f"{TIMES} microbatches, 3, once", "and multiplied by the number of replicas, 2, once"],
    1 / 6: [f"{BY} microbatches, 3, once", "and divided by the number of replicas, 2, once"],
    1.5: [f"{TIMES} microbatches, 3, once", "and divided by the number of replicas, 2, once"],
    2 / 3: [f"{BY} microbatches, 3, once", "and multiplied by the number of replicas, 2, once"],
    9.0: [f"{TIMES} microbatches, 3, twice too often"],
    81.0: [f"{TIMES} microbatches, 3, four times too often"],
}


@pytest.mark.parametrize("scale", PRODUCTS)
def test_products_and_powers_of_counts(scale: float) -> None:
    [cause] = found(ratios(scale))
    assert all(says in cause.words for says in PRODUCTS[scale])
    assert cause.words.endswith(" too often")
    once = "divide the loss or the gradient" if scale > 1 else "divide by it once"
    is_power = scale in (9.0, 1 / 9, 81.0)
    assert cause.advice.startswith("scale in one place" if is_power else once)


def test_weights_that_are_no_product_are_listed() -> None:
    wrong = ratios()
    wrong[0, 0], wrong[1, 2] = 4, 5
    [said] = words(wrong)
    assert said.startswith("parts of the batch have wrong weights in the gradient")
    assert "[4.0, 1.0, 1.0, 1.0, 1.0, 5.0]" in said


def test_causes_that_are_there_together_are_all_said() -> None:
    every = words(ratios(3.0, replicas=(0, 1), uses=(1, 0)), before=1.0, holders=2)
    starts = ("the gradient is stale", "the gradient is not r", "the tie is not", "")
    assert len(every) == len(starts)
    assert all(said.startswith(start) for said, start in zip(every, starts, strict=True))
    assert "the number of microbatches, 3," in every[3]


def test_the_cheapest_explanation_is_said_and_without_any_other_values() -> None:
    place = Place([1], [0], 1, COUNTS, targets=[1, 2, 3, 1, 1, 2])
    free, known = Fit(WHOLE, ratios(microbatches=(2, 1, 0.7))), Fit(MICROBATCHES, ratios())
    assert explained([free, known], place, 1e-4).fit is known
    assert explained([], place, 1e-4).causes == [OTHER_VALUES]
    # As many numbers as elements make any gradient, so each must be known.
    unsure = Fit(WHOLE, ratios(1.7), is_sure=False)
    assert explained([unsure], place, 1e-4).causes == [OTHER_VALUES]
    assert explained([Fit(WHOLE, ratios(3.0), is_sure=False)], place, 1e-4).is_known


def test_factors_are_those_of_a_product() -> None:
    """What is nearest to its right size is the measure; ratios of zeros have the scale zero."""
    made = ratios(0.5, replicas=(0, 1), microbatches=(2, 1, 1), uses=(1, 3))
    assert factors_of(made) == Factors(1.0, [0, 1], [1, 0.5, 0.5], [1], [1, 3])
    assert factors_of(ratios(0.0)) == Factors(0.0, [1, 1], [1, 1, 1], [1], [1])
    made[0] = torch.nan  # of no share
    assert factors_of(made) == Factors(1.0, [1, 1], [1, 0.5, 0.5], [1], [1, 3])
    wrong = ratios()
    wrong[0, 0] = 2
    assert factors_of(wrong) is None
