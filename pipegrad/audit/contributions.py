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


def fit(gradient: Tensor, parts: Tensor, weights: Tensor, before: Tensor | None = None) -> Fit:
    """Returns a gradient as a sum of parts.

    Args:
        gradient: Of the pipeline, of any shape and dtype.
        parts: Of one process, ``(replicas, microbatches, uses, *shape)``.
        weights: The right weights, ``(replicas, microbatches, uses)``.
        before: The right gradient of the step before, if there was one.
    """
    columns = parts.double().reshape(weights.numel(), -1) * weights.double().reshape(-1, 1)
    if before is not None:
        columns = torch.cat([columns, before.double().reshape(1, -1)])
    right = columns[: weights.numel()].sum(0)
    wrong = gradient.double().reshape(-1) - right
    scale = right.norm().clamp_min(torch.finfo(torch.float64).tiny)
    # The pseudoinverse gives the smallest correction of weights. A part without a share of the
    # gradient is not corrected at all.
    inverse = torch.linalg.pinv(columns.T, atol=float(_RESOLUTION * scale), rtol=0.0)
    correction = inverse @ wrong
    rest = (wrong - correction @ columns).norm() / scale
    ratios = 1 + correction[: weights.numel()].reshape(weights.shape)
    last = float(correction[-1]) if before is not None else 0.0
    return Fit(ratios, last, float(rest))
