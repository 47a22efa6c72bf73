"""A gradient is fitted by its parts: the weights that made it are found again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pipegrad.audit.compare.contributions import Fit, explains, fit

REPLICAS, MICROBATCHES, USES = 2, 3, 2
SIZES = REPLICAS, MICROBATCHES, USES
WEIGHTS = torch.full((REPLICAS, MICROBATCHES), 1 / 6, dtype=torch.float64)
UNEVEN = torch.tensor([[0.05, 0.2, 0.25], [0.1, 0.3, 0.1]], dtype=torch.float64)
ONES = torch.ones(SIZES, dtype=torch.float64)


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def made(parts: Tensor, ratios: Tensor, weights: Tensor = WEIGHTS) -> Tensor:
    """Returns the gradient that has these ratios of the right weights."""
    return torch.einsum("rmu...,rmu->...", parts, weights[..., None] * ratios)


def only(dim: int, index: int) -> Tensor:
    found = torch.zeros_like(ONES)
    found.select(dim, index).fill_(1)
    return found


def is_close(a: Tensor, b: Tensor, error: float = 1e-9) -> bool:
    return torch.allclose(a, b, rtol=0, atol=error)


@pytest.mark.parametrize("weights", [WEIGHTS, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("ratios", [random(*SIZES, seed=1), ONES], ids=["any", "right"])
def test_weights_are_found_again(weights: Tensor, ratios: Tensor) -> None:
    parts = random(*SIZES, 5, 7)
    fitted = fit(made(parts, ratios, weights), parts, weights)
    assert is_close(fitted.ratios, ratios)
    assert fitted.before == 0.0
    assert fitted.rest < 1e-12
    fitted = fit(made(parts, ratios, weights).float(), parts.float(), weights)
    assert is_close(fitted.ratios, ratios, 1e-5)  # in float64, of values in float32


def test_equal_microbatches_take_the_smallest_correction() -> None:
    parts = random(REPLICAS, MICROBATCHES, 1, 5, 7)
    parts[:, 1] = parts[:, 0]
    ratios = torch.ones(REPLICAS, MICROBATCHES, 1, dtype=torch.float64)
    ratios[0, 0] = 0
    expected = ratios.clone()
    expected[0, :2] = 0.5
    assert is_close(fit(made(parts, ratios), parts, WEIGHTS).ratios, expected)
    ratios[:, 0], ratios[:, 1] = 0, 2  # exchanged weights are right
    assert is_close(fit(made(parts, ratios), parts, WEIGHTS).ratios, torch.ones_like(ratios))


def test_noise_hides_parts_that_are_smaller() -> None:
    """A part without a share of the gradient is not corrected at all."""
    parts, ratios = random(*SIZES, 5, 7), ONES.clone()
    ratios[0, 1, 0] = 0
    parts[0, 1, 0] *= 1e-2
    gradient = made(parts, ratios)
    assert is_close(fit(gradient, parts, WEIGHTS).ratios, ratios)
    assert is_close(fit(gradient, parts, WEIGHTS, noise=0.1).ratios, ONES, 0.05)
    parts[0, 1, 0] *= 1e-5
    assert is_close(fit(made(parts, ratios), parts, WEIGHTS).ratios, ONES, 1e-6)


@pytest.mark.parametrize("share", [1.0, 0.5, 0.0])
def test_the_weight_of_the_step_before_is_found(share: float) -> None:
    parts, before = random(*SIZES, 5, 7), random(5, 7, seed=2)
    fitted = fit(made(parts, ONES) + share * before, parts, WEIGHTS, before)
    assert fitted.before == pytest.approx(share, abs=1e-12)
    assert is_close(fitted.ratios, ONES)
    assert fitted.rest < 1e-12


def test_what_no_part_explains_is_relative_to_the_right_gradient() -> None:
    parts = random(*SIZES, 5, 7)
    right = made(parts, ONES)
    basis = torch.linalg.qr(parts.reshape(-1, 35).T).Q
    beside = random(35, seed=3)
    beside -= basis @ (basis.T @ beside)
    beside *= 0.3 * right.norm() / beside.norm()
    fitted = fit(right + beside.reshape(5, 7), parts, WEIGHTS)
    assert fitted.rest == pytest.approx(0.3)
    assert is_close(fitted.ratios, ONES)


def test_a_gradient_of_zeros_has_finite_weights() -> None:
    fitted = fit(torch.zeros(5, 7), torch.zeros(*SIZES, 5, 7), WEIGHTS)
    assert is_close(fitted.ratios, ONES)
    assert fitted.rest == 0.0


def test_weights_of_a_matrix_explain_a_bias_with_fewer_elements_than_parts() -> None:
    matrix, bias = random(*SIZES, 5, 7), random(*SIZES, 3, seed=4)
    ratios = only(1, 2)
    known = fit(made(matrix, ratios), matrix, WEIGHTS)
    gradient = made(bias, ratios)
    assert not is_close(fit(gradient, bias, WEIGHTS).ratios, ratios, 0.1)  # alone it is not known
    assert explains(known, gradient, bias, WEIGHTS, None)
    assert not explains(known, made(bias, ONES), bias, WEIGHTS, None)


def test_an_explanation_has_the_right_weights_and_the_step_before_in_it() -> None:
    bias, ratios, before = random(*SIZES, 3), only(0, 1), random(3, seed=5)
    gradient, known = made(bias, ratios, UNEVEN), Fit(ratios, 0.0, 0.0)
    assert explains(known, gradient, bias, UNEVEN, None)
    assert not explains(known, gradient, bias, WEIGHTS, None)
    gradient = made(bias, ONES) + before
    assert explains(Fit(ONES, 1.0, 0.0), gradient, bias, WEIGHTS, before)
    assert not explains(Fit(ONES, 0.0, 0.0), gradient, bias, WEIGHTS, before)
    # Weights of one use explain several, and not the other way.
    ratios = only(1, 0)
    assert explains(Fit(ratios[..., :1], 0.0, 0.0), made(bias, ratios), bias, WEIGHTS, None)
    gradient = made(bias[:, :, :1], ONES[..., :1])
    assert not explains(Fit(ONES, 0.0, 0.0), gradient, bias[:, :, :1], WEIGHTS, None)
