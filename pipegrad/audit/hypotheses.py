"""Hypotheses: which known defect makes a wrong gradient?

[Note: hypotheses] One process computes the gradient that each defect would leave: for example, the
gradient of the last microbatches alone, of one replica, of one use of a tied parameter, or of a
loss that is divided differently. Each is a vector h. It explains a gradient g if g = s h for some
scale s. The residual is the norm of g - s h, divided by the norm of g. Only outputs, one use of a
tied parameter against the others, and the step before have scales of their own. Simple hypotheses
come first. If none fits, the report has the smallest residual, and no cause.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pipegrad.audit.truth import WHOLE

AT_ONCE = "at once"  # a view without parts: the right gradient
_LEAST = 1e-9  # of a gradient; smaller differences are ignored
_MARGIN = 8.0  # of the allowed error over the error of rounding; smaller parts have no scale


@dataclass(frozen=True)
class Hypothesis:
    """A gradient that a known defect would leave.

    Attributes:
        view: Name of the way in which the loss is divided.
        last: Number of the last microbatches that are in it; 0 for all.
        replicas: Replicas whose data is in it; empty for all.
        use: Index of the only use of a tied parameter that is in it; None for all.
        apart: Index of the only wrong use. It has a scale of its own; all microbatches of the other
            uses are there.
        by_term: True if each output has a scale of its own.
        is_stale: True if the gradient of the step before is in it, with a scale of its own.
    """

    view: str = AT_ONCE
    last: int = 0
    replicas: tuple[int, ...] = ()
    use: int | None = None
    apart: int | None = None
    by_term: bool = False
    is_stale: bool = False

    @property
    def num_defects(self) -> int:
        """Number of its defects."""
        wrong = [self.last, self.replicas, self.by_term, self.is_stale]
        wrong += [self.view not in {AT_ONCE, WHOLE}, self.use is not None, self.apart is not None]
        return sum(map(bool, wrong))


@dataclass(frozen=True)
class Fit:
    """A hypothesis that makes a gradient.

    Attributes:
        hypothesis: The hypothesis.
        scales: Its scale. With `by_term`, one for each output, NaN for an output without a share;
            with `apart`, one for this use, and one for the others.
        share: Share of all microbatches that are in it.
        is_sure: False if the gradient has so few elements that any would fit.
    """

    hypothesis: Hypothesis
    scales: tuple[float, ...]
    share: float = 1.0
    is_sure: bool = True


def fits(
    gradient: Tensor,
    parts: Mapping[str, Tensor],
    allowed: float,
    own: Sequence[int] = (0,),
    before: Tensor | None = None,
) -> tuple[list[Fit], float]:
    """Returns the hypotheses that make a gradient, simple ones first, and the smallest residual.

    Args:
        gradient: The gradient of the pipeline, of any dtype.
        parts: View -> parts, ``(replicas, microbatches, terms, uses, numel)``. `AT_ONCE` has one.
        allowed: Norm of the rounding of the gradient.
        own: Replicas whose data the rank got.
        before: The gradient that this rank had in the step before, if there was one.
    """
    actual = gradient.double().reshape(-1)
    norm, least, found = float(actual.norm()), 1.0, list[Fit]()
    allowed = max(allowed, _LEAST * norm)
    for hypothesis, rows, share in _every(parts, tuple(own), before):
        inverse = torch.linalg.pinv(rows @ rows.mT, rtol=1e-12, hermitian=True)
        scales = inverse @ (rows @ actual)
        residual = float((actual - scales @ rows).norm())
        least = min(least, residual / max(norm, allowed))
        known = scales.where(rows.norm(dim=1) > allowed / _MARGIN, math.nan).tolist()
        known = known[: len(rows) - hypothesis.is_stale]
        if residual <= allowed and not all(map(math.isnan, known)):
            is_sure = len(rows) < int(rows.any(0).sum())
            found.append(Fit(hypothesis, tuple(known), share, is_sure))
    return sorted(found, key=lambda fit: fit.hypothesis.num_defects), least


def _every(
    parts: Mapping[str, Tensor], own: tuple[int, ...], before: Tensor | None
) -> Iterator[tuple[Hypothesis, Tensor, float]]:
    """Yields hypotheses, their vectors as rows, and their shares of all microbatches."""
    for view, every in parts.items():
        replicas, microbatches, terms, uses = every.shape[:4]
        by_use = every.double().sum((0, 1, 2))
        rows = [(last, tuple[int, ...]()) for last in range(microbatches)]
        if replicas > 1:
            apart = dict.fromkeys([own, *((replica,) for replica in range(replicas))])
            rows += [(0, some) for some in apart if len(some) < replicas]
        for last, some in rows:
            one = Hypothesis(view, last, some)
            of_replicas = every[list(some)] if some else every
            chosen = of_replicas[:, -last:].sum((0, 1)).double()
            share = (len(some) or replicas) * (last or microbatches) / (replicas * microbatches)
            yield one, chosen.sum((0, 1))[None], share
            for use in range(uses) if uses > 1 else ():
                own_use = chosen[:, use].sum(0)
                yield replace(one, use=use), own_use[None], share
                both = torch.stack([own_use, by_use.sum(0) - by_use[use]])
                yield replace(one, apart=use), both, share
            if terms > 1:
                yield replace(one, by_term=True), chosen.sum(1), share
    if before is not None:
        # Values that this step reduces again have another scale than new ones.
        right = parts[AT_ONCE].sum((0, 1, 2, 3))
        yield Hypothesis(is_stale=True), torch.stack([right, before.double().reshape(-1)]), 1.0
