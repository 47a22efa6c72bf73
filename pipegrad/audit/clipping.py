"""Clipping: by which norm did a rank clip its gradients?"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from torch import Tensor

from pipegrad.audit.truth import Truth

_CLOSE = 0.002  # of a factor


def norm_of(truth: Truth, names: Sequence[str]) -> float:
    """Returns the norm of the right gradients of some names; one parameter counts once for each."""
    squares = 0.0
    for name in names:
        first = next(first for first, uses in truth.uses.items() if name in uses)
        squares += float(truth.gradients[first].norm()) ** 2
    return math.sqrt(squares)


def factor(norm: float, clip_norm: float | None) -> float:
    """Returns what a clipped gradient is multiplied by."""
    return 1.0 if clip_norm is None else min(1.0, clip_norm / norm)


def scale_of(gradients: Mapping[str, Tensor | None], truth: Truth) -> float:
    """Returns the factor that most of a rank's gradients have in common; 1 if there are none."""
    scales = []
    for first, uses in truth.uses.items():
        right = truth.gradients[first]
        for name in uses:
            if (gradient := gradients.get(name)) is not None and float(right.norm()) > 0:
                projection = (gradient.double() * right).sum() / right.square().sum()
                scales.append(float(projection))
    return statistics.median(scales) if scales else 1.0


def wrong_norm(
    scale: float,
    clip_norm: float,
    truth: Truth,
    own: Sequence[str],
    every: Sequence[Sequence[str]],
    num_replicas: int,
) -> str:
    """Returns in words by which wrong norm a rank clipped; "" if by none that is known.

    Args:
        scale: Of the rank's gradients.
        clip_norm: What the right norm is clipped to.
        truth: The step in one process.
        own: Names that the rank holds.
        every: Names that each rank holds.
        num_replicas: Number of replicas.
    """
    whole = norm_of(truth, list(truth.uses))
    copies = norm_of(truth, [name for held in every for name in held]) / math.sqrt(num_replicas)
    candidates = {
        "the norm of this rank's parameters alone": norm_of(truth, own),
        "a norm that counts each copy of a tied parameter": copies,
        "a norm that counts each replica": whole * math.sqrt(num_replicas),
        "no norm: it is not clipped": 0.0,
    }
    for words, norm in candidates.items():
        is_other = not math.isclose(norm, whole, rel_tol=_CLOSE)
        found = factor(norm, clip_norm) if norm else 1.0
        if is_other and math.isclose(scale, found, rel_tol=_CLOSE):
            return f"clipped by {words}; the norm is {whole:.4g}: reduce it over all ranks once"
    return ""
