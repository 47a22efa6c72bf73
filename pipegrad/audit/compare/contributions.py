"""Contributions: which parts of a batch does a gradient have, and how much of each?

[Note: a gradient by its contributions] The gradient of a mean loss is a weighted sum: one part for
each replica of the data, each microbatch, and each use of a tied parameter. One process computes
these parts, with tied parameters untied. A gradient of the pipeline is then fitted by them. The
weights are a fingerprint of what went wrong: all of them twice as large, zero for all microbatches
but the last, zero for the other replicas, zero for the other use of a tie.

Parts may be alike, so that several weights fit. Then those are taken that differ least from the
right ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Parts whose share of the gradient is smaller than this are not told apart.
_RESOLUTION = 1e-4
_SAME = 2e-3  # of a gradient, if the weights of another one are to be its own


@dataclass(frozen=True)
class Fit:
    """A gradient as a sum of parts.

    Attributes:
        ratios: Weights by the right weights, ``(replicas, microbatches, uses)``. 1 is right.
        before: Weight of the gradient of the step before. 0 is right.
        rest: Norm of what no part explains, by the norm of the right gradient.
    """

    ratios: Tensor
    before: float
    rest: float


def fit(
    gradient: Tensor,
    parts: Tensor,
    weights: Tensor,
    before: Tensor | None = None,
    noise: float = 0.0,
) -> Fit:
    """Returns a gradient as a sum of parts.

    Args:
        gradient: Of the pipeline, of any shape and dtype.
        parts: Of one process, ``(replicas, microbatches, uses, *shape)``.
        weights: The right weights, ``(replicas, microbatches)``.
        before: The gradient that this rank had in the step before, if there was one.
        noise: Error of a right gradient, relative to its norm.
    """
    number = parts.shape[:3].numel()
    columns = parts.double() * weights.double().reshape(*weights.shape, *[1] * (parts.ndim - 2))
    columns = columns.reshape(number, -1)
    if before is not None:
        columns = torch.cat([columns, before.double().reshape(1, -1)])
    right = columns[:number].sum(0)
    wrong = gradient.double().reshape(-1) - right
    scale = right.norm().clamp_min(torch.finfo(torch.float64).tiny)
    # The pseudoinverse gives the smallest correction of weights. A part without a share of the
    # gradient is not corrected at all.
    resolution = max(_RESOLUTION, noise)
    inverse = torch.linalg.pinv(columns.T, atol=float(resolution * scale), rtol=0.0)
    correction = inverse @ wrong
    rest = (wrong - correction @ columns).norm() / scale
    ratios = 1 + correction[:number].reshape(parts.shape[:3])
    last = float(correction[-1]) if before is not None else 0.0
    return Fit(ratios, last, float(rest))


def explains(
    fitted: Fit, gradient: Tensor, parts: Tensor, weights: Tensor, before: Tensor | None
) -> bool:
    """Returns whether the weights of another gradient make this one, too.

    A bias has fewer elements than there are parts, so many weights fit it. Those of a matrix of the
    same rank are known better.

    Args:
        fitted: The other one.
        gradient: Of the pipeline.
        parts: Of one process, ``(replicas, microbatches, uses, *shape)``.
        weights: The right weights, ``(replicas, microbatches)``.
        before: The gradient that this rank had in the step before, if there was one.
    """
    if fitted.ratios.shape[2] not in {1, parts.shape[2]}:
        return False
    ratios = fitted.ratios.expand(parts.shape[:3]) * weights[..., None]
    made = (ratios.reshape(-1, 1) * parts.double().flatten(0, 2).flatten(1)).sum(0)
    if before is not None:
        made = made + fitted.before * before.double().reshape(-1)
    actual = gradient.double().reshape(-1)
    return float((actual - made).norm()) <= _SAME * float(actual.norm())
