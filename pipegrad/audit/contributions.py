"""Contributions: which parts of a batch does a gradient have, and how much of each?

[Note: a gradient by its contributions] The right gradient is a sum of parts: one for each replica,
each microbatch, each term of the loss and each use of a tied parameter. One process computes these
parts, with tied parameters untied. A wrong gradient is fitted by them. The ratios are a fingerprint
of what went wrong: all of them twice as large, zero for all microbatches but the last, zero for the
other replicas, zero for the other use of a tie.

Many ratios fit a small gradient, and parts may be alike. So ratios are free along few dimensions
first: one for all parts, one for each replica, one for each microbatch, and so on, of each view.
All that fit are returned, and the cheapest explanation is taken; see `causes.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_KNOWN = 4.0  # factor of what is allowed, for the ratios of another gradient
_MARGIN = 8.0  # of what is allowed over what rounding makes: smaller parts are not told apart
_LEAST = 1e-9  # of a gradient, below which nothing is told apart


@dataclass(frozen=True)
class Fit:
    """A gradient as a sum of parts.

    Attributes:
        view: Whose parts.
        ratios: Of parts, ``(replicas, microbatches, terms, uses)``. 1 is right; NaN where the
            gradient has no share of a part.
        before: Ratio of the gradient of the step before. 0 is right.
        num_free: How many numbers were solved.
        is_sure: Whether fewer numbers were solved than the gradient has elements. Else any gradient
            would fit.
    """

    view: str
    ratios: Tensor
    before: float = 0.0
    num_free: int = 1
    is_sure: bool = True


def fits(
    gradient: Tensor,
    parts: Mapping[str, Tensor],
    allowed: float,
    before: Tensor | None = None,
    known: Sequence[Fit] = (),
) -> list[Fit]:
    """Returns sums of parts that make a gradient.

    Args:
        gradient: Of the pipeline, of any dtype.
        parts: View -> parts, ``(replicas, microbatches, terms, uses, numel)``.
        allowed: Norm of the rounding of the gradient.
        before: The gradient that this rank had in the step before, if there was one.
        known: Of other gradients of the rank. If one of them makes this one, too, it is taken.
    """
    actual = gradient.double().reshape(-1)
    solved = {view: _Solved(actual, own, before) for view, own in parts.items()}
    allowed = max(allowed, _LEAST * float(actual.norm()))
    shared = [
        fit
        for fit in known
        if fit.view in parts
        and fit.ratios.shape[3] in {1, parts[fit.view].shape[3]}
        and (before is not None or not fit.before)
        and solved[fit.view].rest_of(fit) <= _KNOWN * allowed
    ]
    if shared:
        return [
            Fit(f.view, f.ratios.expand(parts[f.view].shape[:4]), f.before, 0, f.is_sure)
            for f in shared
        ]
    return [fit for view, own in solved.items() for fit in own.fits(view, allowed)]


class _Solved:
    """A gradient beside the parts of a view, in as few numbers as they have directions.

    Args:
        actual: The gradient, ``(numel,)``.
        parts: ``(replicas, microbatches, terms, uses, numel)``.
        before: The gradient of the step before.
    """

    def __init__(self, actual: Tensor, parts: Tensor, before: Tensor | None) -> None:
        self._shape = parts.shape[:4]
        columns = parts.double().flatten(0, 3)
        self._numel = int(columns.any(0).sum())
        more = [] if before is None else [before.double().reshape(-1)]
        every = torch.stack([*columns, *more, actual], -1)
        self._reduced = reduced = torch.linalg.qr(every, mode="r").R
        self._columns = reduced[:, : len(columns)]
        self._before = None if before is None else reduced[:, -2]
        self._actual = reduced[:, -1]

    def rest_of(self, fit: Fit) -> float:
        """Returns the norm of what the ratios of another gradient leave."""
        ratios = fit.ratios.nan_to_num(1.0).expand(self._shape).reshape(-1)
        rest = self._actual - self._columns @ ratios
        if fit.before and self._before is not None:
            rest = rest - fit.before * self._before
        return float(rest.norm())

    def fits(self, view: str, allowed: float) -> Iterator[Fit]:
        """Yields ratios that leave no more than what is allowed."""
        wide = [dim for dim, size in enumerate(self._shape) if size > 1]
        stale = (False, True) if self._before is not None else (False,)
        # What all numbers together do not make, no fewer ones do.
        every = self._reduced[:, :-1]
        made = every @ (torch.linalg.pinv(every, rtol=_LEAST) @ self._actual)
        if float((self._actual - made).norm()) > allowed:
            return
        free = [s for number in range(len(wide) + 1) for s in itertools.combinations(wide, number)]
        found = list[tuple[set[int], bool]]()
        for dims, is_stale in itertools.product(free, stale):
            # More numbers than suffice say the same.
            if any(known <= set(dims) and was_stale <= is_stale for known, was_stale in found):
                continue
            fit = self._solved(view, dims, allowed, is_stale=is_stale)
            if fit is not None:
                found.append((set(dims), is_stale))
                yield fit

    def _solved(
        self, view: str, dims: Sequence[int], allowed: float, *, is_stale: bool
    ) -> Fit | None:
        """Returns ratios that differ along these dimensions alone, if they make the gradient."""
        others = [dim for dim in range(4) if dim not in dims]
        columns = self._columns.unflatten(1, self._shape)
        if others:
            columns = columns.sum([dim + 1 for dim in others], keepdim=True)
        shape, columns = columns.shape[1:], columns.flatten(1)
        number = shape.numel()
        alike = columns.sum(1, keepdim=True)
        if is_stale and self._before is not None:
            columns = torch.cat([columns, self._before[:, None]], 1)
            alike = torch.cat([alike, self._before[:, None]], 1)
        # One scale for all comes first. The pseudoinverse gives the smallest correction of it, and
        # none of a part without a share.
        first = torch.linalg.pinv(alike, rtol=_LEAST) @ self._actual
        ratios = torch.cat([first[:1].expand(number), first[1:]])
        least = allowed / _MARGIN
        inverse = torch.linalg.pinv(columns, atol=least, rtol=0.0)
        ratios = ratios + inverse @ (self._actual - columns @ ratios)
        if float((self._actual - columns @ ratios).norm()) > allowed:
            return None
        has_share = columns[:, :number].norm(dim=0) > least
        return Fit(
            view,
            ratios[:number].where(has_share, torch.nan).reshape(shape).expand(self._shape),
            float(ratios[-1]) if is_stale else 0.0,
            columns.shape[1],
            columns.shape[1] < self._numel,
        )
