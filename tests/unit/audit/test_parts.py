"""A gradient is a sum of its parts: the ratios that made it are found again, the simplest first."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pipegrad.audit.loss_parts import MICROBATCHES, WHOLE, Fit, fits

SIZES = REPLICAS, MICROS, TERMS, USES = 2, 3, 1, 2
ALLOWED = 1e-5
ONES = torch.ones(SIZES, dtype=torch.float64)


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def made(parts: Tensor, ratios: Tensor) -> Tensor:
    """Returns the gradient that has these ratios of parts."""
    return torch.einsum("rmtun,rmtu->n", parts, ratios)


def only(dim: int, index: int) -> Tensor:
    found = torch.zeros_like(ONES)
    found.select(dim, index).fill_(1)
    return found


def is_close(a: Tensor, b: Tensor, error: float = 1e-5) -> bool:
    return torch.allclose(a, b, rtol=0, atol=error)


@pytest.mark.parametrize(
    ("ratios", "num_free"),
    [
        (3 * ONES, 1),
        (only(0, 1), 2),
        (only(1, 2), 3),
        (only(3, 0), 2),
        (random(*SIZES, seed=1), 12),
    ],
)
def test_ratios_are_found_again_with_the_fewest_numbers(ratios: Tensor, num_free: int) -> None:
    parts = random(*SIZES, 35)
    [fit] = fits(made(parts, ratios), {WHOLE: parts}, ALLOWED)
    assert is_close(fit.ratios, ratios)
    assert (fit.view, fit.before, fit.num_free, fit.is_sure) == (WHOLE, 0.0, num_free, True)
    [fit] = fits(made(parts, ratios).float(), {WHOLE: parts.float()}, 1e-4)
    assert is_close(fit.ratios, ratios, 1e-3)


def test_all_views_that_make_a_gradient_are_found() -> None:
    parts, other = random(*SIZES, 35), random(*SIZES, 35, seed=1)
    views = {WHOLE: parts, MICROBATCHES: other}
    [fit] = fits(made(other, ONES), views, ALLOWED)
    assert (fit.view, fit.num_free) == (MICROBATCHES, 1)
    views["half"] = other / 2
    assert {fit.view for fit in fits(made(other, ONES), views, ALLOWED)} == {MICROBATCHES, "half"}


def test_equal_microbatches_take_the_smallest_correction() -> None:
    parts = random(REPLICAS, MICROS, 1, 1, 35)
    parts[:, 1] = parts[:, 0]
    ratios = torch.ones(parts.shape[:4], dtype=torch.float64)
    ratios[:, 0] = 0
    [fit] = fits(made(parts, ratios), {WHOLE: parts}, ALLOWED)
    ratios[:, :2] = 0.5
    assert is_close(fit.ratios, ratios)


def test_a_part_without_a_share_has_no_ratio() -> None:
    parts = random(*SIZES, 35)
    parts[:, 1] *= 1e-8
    [fit] = fits(made(parts, only(1, 2)), {WHOLE: parts}, ALLOWED)
    assert fit.ratios[:, 1].isnan().all()
    assert is_close(fit.ratios[:, (0, 2)], only(1, 2)[:, (0, 2)])


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_the_ratio_of_the_step_before_is_found_and_only_where_it_is_needed(share: float) -> None:
    parts, before = random(*SIZES, 35), random(35, seed=2)
    [fit] = fits(made(parts, ONES) + share * before, {WHOLE: parts}, ALLOWED, before)
    assert fit.before == pytest.approx(share, abs=1e-5)
    assert is_close(fit.ratios, ONES)
    # A scale alone needs no step before, however large it is.
    [fit] = fits(made(parts, 1024 * ONES), {WHOLE: parts}, 1e-2, 1024 * before)
    assert (fit.before, fit.num_free) == (0.0, 1)


def test_a_gradient_with_fewer_elements_than_numbers_is_not_sure() -> None:
    parts = random(*SIZES, 3)
    every = fits(random(3, seed=4), {WHOLE: parts}, ALLOWED)
    assert every
    assert not any(fit.is_sure for fit in every)
    assert [fit.is_sure for fit in fits(made(parts, 2 * ONES), {WHOLE: parts}, ALLOWED)] == [True]


def test_ratios_of_a_matrix_are_taken_for_a_bias_that_they_make_too() -> None:
    bias, ratios, before = random(*SIZES, 3), only(0, 1), random(3, seed=5)
    known = [Fit(WHOLE, ratios), Fit(WHOLE, ONES, before=1.0)]
    [fit] = fits(made(bias, ratios), {WHOLE: bias}, ALLOWED, known=known)
    assert fit.num_free == 0
    assert is_close(fit.ratios, ratios)
    [fit] = fits(made(bias, ONES) + before, {WHOLE: bias}, ALLOWED, before, known)
    assert (fit.before, fit.num_free) == (1.0, 0)
    # Ratios of one use are those of several, and not the other way.
    one = Fit(WHOLE, ratios[..., :1])
    assert fits(made(bias, ratios), {WHOLE: bias}, ALLOWED, known=[one])[0].num_free == 0
    own = bias[..., :1, :]
    assert fits(made(own, ratios[..., :1]), {WHOLE: own}, ALLOWED, known=known)[0].num_free > 0
