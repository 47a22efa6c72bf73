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


def test_right_weights_have_no_cause() -> None:
    assert words(ratios()) == []


def test_weights_within_twice_the_tolerance_are_right() -> None:
    assert words(ratios(1.05), tolerance=0.03) == []
    assert words(ratios(1.05), tolerance=0.01) == ["the gradient is multiplied by 1.05"]


def test_a_stale_gradient() -> None:
    [cause] = found(ratios(), before=1.0)
    assert cause.words == "the gradient is stale: that of the step before is in it"
    assert "zero_grad" in cause.advice


def test_a_mean_of_means_names_the_right_weights() -> None:
    uneven = torch.tensor([[0.1, 0.2, 0.3], [0.1, 0.1, 0.2]], dtype=torch.float64)
    [cause] = found((1 / 6 / uneven)[..., None], weights=uneven)
    assert cause.words.startswith("the gradient is a mean of means")
    assert "[0.1, 0.2, 0.3, 0.1, 0.1, 0.2]" in cause.words
    assert cause.advice.startswith("sum the losses of targets")


@pytest.mark.parametrize("smallest", [0.1, 0.0], ids=["uneven", "without targets"])
def test_right_weights_that_are_uneven_have_no_cause(smallest: float) -> None:
    uneven = torch.tensor([[smallest, 0.2, 0.3], [0.1, 0.1, 0.2]], dtype=torch.float64)
    assert words(ratios(), weights=uneven) == []


def test_a_missing_gradient() -> None:
    [cause] = found(ratios(0.0))
    assert cause.words == "the gradient is missing: it is zero or None"


@pytest.mark.parametrize("scale", [1.0, 3.0], ids=["its part of the mean", "its own mean"])
def test_the_last_microbatch_alone(scale: float) -> None:
    [said] = words(ratios(scale, microbatches=(0, 0, 1)))
    assert said.startswith("only the last microbatch is in the gradient")


def test_another_microbatch_alone_has_its_number() -> None:
    [said] = words(ratios(microbatches=(0, 1, 0)))
    assert said.startswith("only microbatches [1] (from 0) ")


def test_a_microbatch_that_is_left_out() -> None:
    [said] = words(ratios(microbatches=(1, 0, 1)))
    assert said.startswith("only microbatches [0, 2] (from 0) ")


def test_the_first_microbatch_that_is_left_out() -> None:
    [said] = words(ratios(microbatches=(0, 1, 1)))
    assert said.startswith("only the last 2 microbatches are in the gradient")


def test_microbatches_that_count_differently() -> None:
    [said] = words(ratios(microbatches=(3, 2, 1)))
    assert said == "microbatches count differently in the gradient: [3.0, 2.0, 1.0]"


@pytest.mark.parametrize("scale", [1.0, 2.0], ids=["its part of the mean", "its own mean"])
def test_replicas_apart(scale: float) -> None:
    [cause] = found(ratios(scale, replicas=(0, 1)))
    assert cause.words.startswith("the gradient is not reduced over the 2 replicas")
    assert "all-reduce" in cause.advice


def test_only_the_other_replica() -> None:
    [said] = words(ratios(replicas=(1, 0)))
    assert said.startswith("only replicas [0] (from 0) ")


def test_replicas_that_count_differently() -> None:
    [said] = words(ratios(replicas=(1, 2)))
    assert said == "replicas count differently in the gradient: [1.0, 2.0]"


def test_a_tie_that_is_not_reduced_has_its_own_use_alone() -> None:
    [cause] = found(ratios(uses=(1, 0)), holders=2)
    assert cause.words.startswith("the tie is not reduced: of 2 uses of the parameter")
    assert "its own use alone" in cause.words
    assert "find_tied" in cause.advice


def test_a_tie_that_has_the_other_use_alone() -> None:
    [said] = words(ratios(uses=(0, 1)), holders=2)
    assert "uses [1] (from 0) alone" in said


def test_a_use_that_is_counted_twice() -> None:
    [said] = words(ratios(uses=(2, 1)), holders=2)
    assert said.startswith("uses of the tied parameter count differently in its gradient")
    assert "[2.0, 1.0]" in said


def test_a_use_that_is_counted_twice_has_the_scale_in_its_weight() -> None:
    [said] = words(ratios(3.0, uses=(2, 1)), holders=2)
    assert "[6.0, 3.0]" in said


def test_a_tie_twice_where_nothing_is_known_of_other_parameters() -> None:
    [cause] = found(ratios(2.0, uses=(1, 1)), holders=2)
    assert cause.words.startswith("the tie is reduced twice: the gradient is 2 times too large")
    assert cause.advice == "reduce it over these ranks once"


def test_a_tie_twice_where_other_parameters_are_right() -> None:
    [said] = words(ratios(2.0, uses=(1, 1)), holders=2, usual=1.0)
    assert said.startswith("the tie is reduced twice")


def test_a_tie_that_is_as_large_as_other_parameters_is_reduced_once() -> None:
    [said] = words(ratios(2.0, uses=(1, 1)), holders=2, usual=2.0)
    assert "the number of replicas, 2," in said


def test_a_tie_twice_where_other_parameters_are_too_large() -> None:
    tie, other = words(ratios(6.0, uses=(1, 1)), holders=2, usual=3.0)
    assert tie.startswith("the tie is reduced twice")
    assert "the number of microbatches, 3," in other


def test_a_tie_twice_of_the_last_microbatch_alone() -> None:
    first, tie = words(ratios(6.0, microbatches=(0, 0, 1), uses=(1, 1)), holders=2)
    assert first.startswith("only the last microbatch")
    assert tie.startswith("the tie is reduced twice")


def test_a_parameter_of_one_rank_is_no_tie_that_is_reduced_twice() -> None:
    [said] = words(ratios(2.0))
    assert f"2 times too large: {TIMES} replicas, 2, once too often" in said


PRODUCTS = {
    3.0: [f"3 times too large: {TIMES} microbatches, 3, once"],
    1 / 3: [f"3 times too small: {BY} microbatches, 3, once"],
    140.0: [f"140 times too large: {TIMES} targets, 140, once"],
    1 / 140: [f"140 times too small: {BY} targets, 140, once"],
    6.0: [f"{TIMES} microbatches, 3, once", "and multiplied by the number of replicas, 2, once"],
    1 / 6: [f"{BY} microbatches, 3, once", "and divided by the number of replicas, 2, once"],
    1.5: [f"{TIMES} microbatches, 3, once", "and divided by the number of replicas, 2, once"],
    2 / 3: [f"{BY} microbatches, 3, once", "and multiplied by the number of replicas, 2, once"],
}


@pytest.mark.parametrize("scale", PRODUCTS)
def test_products_of_one_or_two_counts(scale: float) -> None:
    [cause] = found(ratios(scale))
    assert all(says in cause.words for says in PRODUCTS[scale])
    assert cause.words.endswith(" too often")
    expected = "divide the loss or the gradient" if scale > 1 else "divide by it once"
    assert cause.advice.startswith(expected)


@pytest.mark.parametrize(
    ("scale", "says"),
    [
        (9, f"{TIMES} microbatches, 3, twice too often"),
        (1 / 9, f"{BY} microbatches, 3, twice too often"),
        (81, f"{TIMES} microbatches, 3, four times too often"),
    ],
)
def test_powers_of_one_count(scale: float, says: str) -> None:
    [cause] = found(ratios(scale))
    assert says in cause.words
    assert cause.advice.startswith("scale in one place")


def test_a_small_gradient_that_a_count_explains_is_not_missing() -> None:
    [said] = words(ratios(1 / 500), counts={"targets": 500})
    assert "500 times too small" in said


def test_a_count_of_one_explains_nothing() -> None:
    assert words(ratios(2.5), counts={"replicas": 1}) == ["the gradient is multiplied by 2.5"]


@pytest.mark.parametrize("scale", [1.7, -1.0])
def test_an_unknown_factor(scale: float) -> None:
    [cause] = found(ratios(scale))
    assert cause.words == f"the gradient is multiplied by {scale:.4g}"
    assert "clip_norm" in cause.advice


def test_a_factor_of_one_parameter_alone_is_no_count() -> None:
    [cause] = found(ratios(3.0), usual=1.0)
    assert cause.words.startswith("the gradient is multiplied by 3, and those of other parameters")


def test_a_factor_that_is_only_near_a_count_is_not_taken_for_it() -> None:
    [cause] = found(ratios(3.02))
    assert cause.words == "the gradient is multiplied by 3.02"


def test_weights_that_are_no_product_are_listed() -> None:
    wrong = ratios()
    wrong[0, 0], wrong[1, 2] = 4, 5
    [said] = words(wrong)
    assert said.startswith("parts of the batch have wrong weights in the gradient")
    assert "[4.0, 1.0, 1.0, 1.0, 1.0, 5.0]" in said


def test_what_is_in_no_part_is_said() -> None:
    [cause] = found(ratios(), rest=0.05)
    assert cause.words.startswith("other values were computed than in one process")
    assert "dropout" in cause.advice


def test_if_much_is_in_no_part_weights_say_nothing() -> None:
    [cause] = found(ratios(3.0), rest=0.1)
    assert cause.words.startswith("other values were computed than in one process")


def test_what_the_tolerance_allows_is_in_no_part_and_is_not_said() -> None:
    assert found(ratios(), rest=0.05, tolerance=0.02) == []


def test_causes_that_are_there_together_are_all_said() -> None:
    every = words(ratios(3.0, replicas=(0, 1), uses=(1, 0)), before=1.0, rest=0.04, holders=2)
    starts = [
        "the gradient is stale",
        "the gradient is not reduced",
        "the tie is not",
        "",
        "other ",
    ]
    assert len(every) == len(starts)
    assert all(said.startswith(start) for said, start in zip(every, starts, strict=True))
    assert "the number of microbatches, 3," in every[3]


def test_factors_have_the_smallest_that_is_not_zero_as_measure() -> None:
    made = ratios(0.5, replicas=(0, 1), microbatches=(2, 1, 1), uses=(1, 3))
    assert factors_of(made) == Factors(0.5, [0, 1], [2, 1, 1], [1, 3])


def test_ratios_of_zeros_have_the_scale_zero() -> None:
    assert factors_of(ratios(0.0)) == Factors(0.0, [1, 1], [1, 1, 1], [1])


def test_ratios_that_are_no_product_have_no_factors() -> None:
    wrong = ratios()
    wrong[0, 0] = 2
    assert factors_of(wrong) is None
