"""Gradients that are not finite, by name; what clipping leaves of the others, and divisions."""

from __future__ import annotations

import pytest
import torch

from pipegrad.gradients.norm import (
    NonFinite,
    clip_,
    divide_,
    in_a_sentence,
    non_finite_keys,
)

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64])
def test_any_element_counts(dtype: torch.dtype) -> None:
    gradients = {
        "fine": torch.ones(5, dtype=dtype),
        "infinite": torch.tensor([1.0, -INF], dtype=dtype),
        "no number": torch.tensor([[NAN]], dtype=dtype),
        "empty": torch.zeros(0, 3, dtype=dtype),
    }
    assert non_finite_keys(gradients) == ["infinite", "no number"]
    assert non_finite_keys({}) == []


def test_the_sentence_has_the_first_and_how_many_others() -> None:
    first, other = NonFinite("a", (0, 3), (0, 3)), NonFinite("b", (1,), (1,))
    assert (
        in_a_sentence([first]) == "the gradient of 'a' (stages [0, 3], ranks [0, 3]) is not finite"
    )
    both = "the gradients of 'a' (stages [0, 3], ranks [0, 3]) and"
    assert in_a_sentence([first, other]) == f"{both} 1 other are not finite"
    assert in_a_sentence([first, other, other]) == f"{both} 2 others are not finite"
    assert in_a_sentence([]) == "each gradient is finite, and the sum of their squares overflows"


@pytest.mark.parametrize(
    ("bad", "norm", "expected"), [(INF, INF, [0.0, 0.0]), (NAN, NAN, [3.0, 4.0])]
)
def test_clipping_leaves_it_to_be_seen_which_gradient_was_not_finite(
    bad: float, norm: float, expected: list[float]
) -> None:
    """A norm that is not a number made every gradient one, so each parameter was named."""
    fine, spoiled = torch.tensor([3.0, 4.0]), torch.tensor([1.0, bad])
    clip_([fine, spoiled], torch.tensor(norm), 1.0)
    assert fine.tolist() == expected
    assert non_finite_keys({"fine": fine, "spoiled": spoiled}) == ["spoiled"]


class OnDevice(torch.Tensor):
    """A number on the CPU that the host may not read, like one of a device."""

    is_cpu = False
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def test_gradients_of_any_kind_are_divided_by_a_number_on_the_device() -> None:
    half = torch.tensor([2.0**15, 3.0], dtype=torch.float16)
    full, none = torch.full((4,), 2.0**17), torch.zeros(0)
    divide_([half, full, none], torch.tensor(2.0**17).as_subclass(OnDevice))
    assert half.tolist() == [0.25, float(torch.tensor(3 / 2**17, dtype=torch.float16))]
    assert full.tolist() == [1.0] * 4
