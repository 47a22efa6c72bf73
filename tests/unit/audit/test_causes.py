"""Each fingerprint of weights has its cause in words, and no other one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from pipegrad.audit.compare.causes import Cause, Factors, Place, causes, factors_of
from pipegrad.audit.compare.contributions import Fit

COUNTS = {"microbatches": 3, "replicas": 2, "targets": 140}
TIMES, BY = "it is multiplied by the number of", "it is divided by the number of"
EVEN = torch.full((2, 3), 1 / 6, dtype=torch.float64)


def ratios(
    scale: float = 1.0,
    replicas: Sequence[float] = (1, 1),
    microbatches: Sequence[float] = (1, 1, 1),
    uses: Sequence[float] = (1,),
) -> Tensor:
    dims = [torch.tensor(dim, dtype=torch.float64) for dim in (replicas, microbatches, uses)]
    return scale * torch.einsum("r,m,u->rmu", *dims)


def found(
    made: Tensor, *, before: float = 0.0, rest: float = 0.0, tolerance: float = 1e-4, **own: Any
) -> list[Cause]:
    """Returns the causes of ratios on a rank that has the second replica's data."""
    options = {"replicas": [1], "uses": [0], "holders": 1, "counts": COUNTS, "weights": EVEN}
    return causes(Fit(made, before, rest), Place(**{**options, **own}), tolerance)


def words(made: Tensor, **own: Any) -> list[str]:
    return [cause.words for cause in found(made, **own)]


UNEVEN = torch.tensor([[0.1, 0.2, 0.3], [0.1, 0.1, 0.2]], dtype=torch.float64)
WITHOUT_TARGETS = torch.tensor([[0.0, 0.2, 0.3], [0.1, 0.1, 0.2]], dtype=torch.float64)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"made": ratios(1.05), "tolerance": 0.03},  # twice the tolerance is right
        {"weights": UNEVEN},
        {"weights": WITHOUT_TARGETS},
        {"rest": 0.05, "tolerance": 0.02},  # what the tolerance allows is in no part
    ],
)
def test_right_weights_have_no_cause(options: dict[str, Any]) -> None:
    assert found(**{"made": ratios(), **options}) == []


def starting(made: Tensor, start: str, more: str = "", advice: str = "", **own: Any) -> Any:
    return pytest.param(made, own, start, more, advice, id=start)


MEASURED = [[1 / 6 / w for w in row] for row in UNEVEN.tolist()]
ONE_CAUSE = [
    starting(ratios(), "the gradient is stale: that of the step before", "", "zero_grad", before=1),
    starting(
        torch.tensor(MEASURED, dtype=torch.float64)[..., None],
        "the gradient is a mean of means",
        "[0.1, 0.2, 0.3, 0.1, 0.1, 0.2]",
        "sum the losses of targets",
        weights=UNEVEN,
    ),
    starting(ratios(0.0), "the gradient is missing: it is zero or None"),
    # Its part of the mean, and its own mean.
    starting(ratios(microbatches=(0, 0, 1)), "only the last microbatch is in the gradient"),
    starting(ratios(3.0, microbatches=(0, 0, 1)), "only the last microbatch is in the gradient"),
    starting(ratios(microbatches=(0, 1, 0)), "only microbatches [1] (from 0) "),
    starting(ratios(microbatches=(1, 0, 1)), "only microbatches [0, 2] (from 0) "),
    starting(ratios(microbatches=(0, 1, 1)), "only the last 2 microbatches are in the gradient"),
    starting(
        ratios(microbatches=(3, 2, 1)),
        "microbatches count differently in the gradient: [3.0, 2.0, 1.0]",
    ),
    *(
        starting(
            ratios(scale, replicas=(0, 1)),
            "the gradient is not reduced over the 2 replicas",
            "",
            "all-reduce",
        )
        for scale in (1.0, 2.0)
    ),
    starting(ratios(replicas=(1, 0)), "only replicas [0] (from 0) "),
    starting(ratios(replicas=(1, 2)), "replicas count differently in the gradient: [1.0, 2.0]"),
    starting(
        ratios(uses=(1, 0)),
        "the tie is not reduced: of 2 uses of the parameter",
        "its own use alone",
        "find_tied",
        holders=2,
    ),
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
        "",
        "reduce it over these ranks once",
        holders=2,
    ),
    starting(ratios(2.0, uses=(1, 1)), "the tie is reduced twice", holders=2, usual=1.0),
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
        ratios(3.0), "the gradient is multiplied by 3, and those of other parameters", usual=1.0
    ),
    starting(ratios(3.02), "the gradient is multiplied by 3.02"),  # only near a count
    starting(ratios(), "other values were computed than in one process", "", "dropout", rest=0.05),
    # Weights say nothing then.
    starting(ratios(3.0), "other values were computed than in one process", rest=0.1),
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
    first, tie = words(ratios(6.0, microbatches=(0, 0, 1), uses=(1, 1)), holders=2)
    assert first.startswith("only the last microbatch")
    assert tie.startswith("the tie is reduced twice")


PRODUCTS = {
    3.0: [f"3 times too large: {TIMES} microbatches, 3, once"],
    1 / 3: [f"3 times too small: {BY} microbatches, 3, once"],
    140.0: [f"140 times too large: {TIMES} targets, 140, once"],
    1 / 140: [f"140 times too small: {BY} targets, 140, once"],
    6.0: [f"{TIMES} microbatches, 3, once", "and multiplied by the number of replicas, 2, once"],
    1 / 6: [f"{BY} microbatches, 3, once", "and divided by the number of replicas, 2, once"],
    1.5: [f"{TIMES} microbatches, 3, once", "and divided by the number of replicas, 2, once"],
    2 / 3: [f"{BY} microbatches, 3, once", "and multiplied by the number of replicas, 2, once"],
    9.0: [f"{TIMES} microbatches, 3, twice too often"],
    1 / 9: [f"{BY} microbatches, 3, twice too often"],
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
    every = words(ratios(3.0, replicas=(0, 1), uses=(1, 0)), before=1.0, rest=0.04, holders=2)
    starts = ("the gradient is stale", "the gradient is not r", "the tie is not", "", "other ")
    assert len(every) == len(starts)
    assert all(said.startswith(start) for said, start in zip(every, starts, strict=True))
    assert "the number of microbatches, 3," in every[3]


def test_factors_are_those_of_a_product() -> None:
    """The smallest that is not zero is the measure; ratios of zeros have the scale zero."""
    made = ratios(0.5, replicas=(0, 1), microbatches=(2, 1, 1), uses=(1, 3))
    assert factors_of(made) == Factors(0.5, [0, 1], [2, 1, 1], [1, 3])
    assert factors_of(ratios(0.0)) == Factors(0.0, [1, 1], [1, 1, 1], [1])
    wrong = ratios()
    wrong[0, 0] = 2
    assert factors_of(wrong) is None
