"""Clipping: by which norm did a rank clip its gradients?

[Note: a norm by its parameters] A norm is compared with that of the gradients that the ranks
really had. So it differs from that of right gradients. If gradients were seen only after
they were clipped, the norm says what they were before; if they were seen before and after, their
factor says the norm.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pipegrad.audit.causes import Cause
from pipegrad.audit.report import Finding
from pipegrad.audit.seen import Seen
from pipegrad.audit.states import Entry, First, entries_of
from pipegrad.errors import PlanError

_CLOSE = 1e-4  # of a norm
_ADDED = 1e-6  # by torch to a norm, before it divides
_CLOSE_LOW = 4e-3  # of a norm of gradients in half precision
_CHANGED = Cause(
    "the gradient changes between clipping and the optimizer's step, beside the factor of its rank",
    "reduce gradients first, then clip all of a rank by one factor, and change them no more",
)
_APART = Cause(
    "parameters are clipped in parts, each by its own norm",
    "clip all gradients by one norm: that of all parameters",
)
_OF_THIS_RANK = "the gradient norm is that of this rank's parameters alone"
_OF_RANK = "the gradient norm is that of rank {rank}'s parameters alone"
_NOT_CLIPPED = Cause("gradients are not clipped", "clip them before the optimizer's step")
_ADVICE = "reduce the squares over all ranks, with each parameter counted once"


def right_norm(rank: int, entries: Sequence[Entry]) -> float:
    """Returns the norm in which each parameter counts once, with the gradients of one replica."""
    return _norm(_once(_of_replica(rank, entries)))


def judged(norm: float, rank: int, entries: Sequence[Entry]) -> Cause | None:
    """Returns what is wrong with a norm; None if it is right."""
    right, close = right_norm(rank, entries), _close(entries)
    # torch clips by the norm and 1e-6. With norm_type inf, the norm is that of the largest element.
    gradients = [e.gradient for e in _of_replica(rank, entries) if e.gradient is not None]
    largest = max((float(g.abs().max()) for g in gradients if g.numel()), default=0.0)
    if any(math.isclose(norm, x, rel_tol=close, abs_tol=2e-6) for x in (right, largest)):
        return None
    if norm == 0:
        return _NOT_CLIPPED
    for words, value in _candidates(rank, entries).items():
        is_other = not math.isclose(value, right, rel_tol=close)
        if is_other and math.isclose(norm, value, rel_tol=close):
            return Cause(words, _ADVICE)
    return Cause("the gradient norm is not that of all parameters", _ADVICE)


def _close(entries: Iterable[Entry]) -> float:
    """Returns the relative error that a norm may have: of a gradient after it was clipped, too."""
    dtypes = {entry.gradient.dtype for entry in entries if entry.gradient is not None}
    return _CLOSE if dtypes <= {torch.float32, torch.float64} else _CLOSE_LOW


def _candidates(rank: int, entries: Sequence[Entry]) -> Mapping[str, float]:
    """Returns wrong norms that are known, in words."""
    own = _once([entry for entry in entries if rank in entry.ranks])
    of_replica = _of_replica(rank, entries)
    number = len({entry.replicas for entry in entries})
    every = _norm(_once(of_replica))
    result = {
        _OF_THIS_RANK: _norm(own),
        "the gradient norm counts each copy of a parameter that several ranks hold": _norm(
            of_replica
        ),
        "the gradient norm counts each replica": every * math.sqrt(number),
        "the gradient norm counts each copy and each replica": _norm(entries),
    }
    for entry in _once(of_replica):
        without = math.sqrt(max(0.0, every**2 - _norm([entry]) ** 2))
        result.setdefault(f"the gradient norm leaves out {entry.name}", without)
    for other in sorted({rank for entry in of_replica for rank in entry.ranks}):
        held = [entry for entry in of_replica if other in entry.ranks]
        result.setdefault(_OF_RANK.format(rank=other), _norm(_once(held)))
    return result


def _of_replica(rank: int, entries: Sequence[Entry]) -> list[Entry]:
    replicas = {r for entry in entries if rank in entry.ranks for r in entry.replicas}
    own = [entry for entry in entries if replicas & set(entry.replicas)]
    # Replicas share what one of them holds alone, such as an expert.
    names = {entry.name for entry in own}
    return own + [entry for entry in entries if entry.name not in names]


def _once(entries: Sequence[Entry]) -> list[Entry]:
    first = dict[str, Entry]()
    for entry in entries:
        first.setdefault(entry.name, entry)
    return list(first.values())


def _norm(entries: Iterable[Entry]) -> float:
    gradients = [entry.gradient for entry in entries if entry.gradient is not None]
    return math.hypot(*(float(gradient.double().norm()) for gradient in gradients))


def unclipped(
    seen: Sequence[Seen], first: First, clip_norm: float | None
) -> tuple[list[Entry], list[Finding], dict[int, float]]:
    """Returns gradients as they were before they were clipped, wrong norms, and changes behind it.

    The last is by rank: the factor by which gradients are multiplied after they were clipped.

    Raises:
        PlanError: If a rank has clipped, and neither its norm nor its gradients before were seen.
    """
    after = entries_of(seen, [of_rank.gradients for of_rank in seen], first)
    clip_norm = next((s.clip_norm for s in seen if s.clip_norm is not None), clip_norm)
    norms = {of_rank.rank: of_rank.norm for of_rank in seen}
    if not any(of_rank.unclipped for of_rank in seen):
        before = after if clip_norm is None else _before(after, norms, clip_norm)
        return before, _wrong(norms, before), {}
    before = entries_of(seen, [s.unclipped or s.gradients for s in seen], first)
    if any(of_rank.is_other for of_rank in seen):
        return before, [], {}  # by value, or by another norm: compared before it alone
    for rank, norm in norms.items():
        if norm is None and clip_norm is not None:
            norms[rank] = _used(rank, before, after, clip_norm)
    apart = [s.rank for s in seen if _is_apart(s, before, first)]
    whole = {rank: norm for rank, norm in norms.items() if rank not in apart}
    findings = [Finding(*_APART, ranks=(rank,)) for rank in apart]
    findings += _wrong(whole, before)
    maxima = {s.rank: s.clip_norm for s in seen if s.clip_norm is not None}
    if len(set(maxima.values())) > 1:
        details = tuple(f"rank {rank} clips to {maximum:g}" for rank, maximum in maxima.items())
        words = "ranks clip to different norms"
        findings.append(Finding(words, _ADVICE, (), tuple(maxima), details=details))
    factors = {
        s.rank: {first[n]: factor(c.norm + _ADDED, c.max_norm) for c in s.clips for n in c.names}
        for s in seen
    }
    changed, later = _changed(before, after, factors)
    # Norms of what changes later say nothing.
    return before, changed or findings, {} if changed else later


def _before(
    after: Sequence[Entry], norms: Mapping[int, float | None], clip_norm: float
) -> list[Entry]:
    """Returns gradients as they were before ranks have clipped them by their norms."""
    before = []
    for entry in after:
        norm = norms[entry.ranks[0]]
        if entry.gradient is not None:
            if norm is None:
                raise PlanError(
                    f"the step clips to {clip_norm:g}, and the norm of rank {entry.ranks[0]} was "
                    f"not seen: call pipegrad.audit.before_clipping() in the step when gradients "
                    f'are reduced, or return {{"loss": ..., "grad_norm": ...}} on all ranks'
                )
            gradient = entry.gradient.double() / factor(norm, clip_norm)
            before.append(replace(entry, gradient=gradient))
        else:
            before.append(entry)
    return before


def _is_apart(seen: Seen, entries: Sequence[Entry], first: First) -> bool:
    """Returns whether a rank has clipped parts of its parameters, each by its own norm."""
    if len({clip.norm for clip in seen.clips}) < 2:
        return False
    own = {e.name: e for e in entries if seen.rank in e.ranks}
    return all(
        math.isclose(
            clip.norm,
            _norm([own[n] for n in {first[n] for n in clip.names}]),
            rel_tol=_close(entries),
            abs_tol=_ADDED,
        )
        for clip in seen.clips
    )


def _changed(
    before: Sequence[Entry], after: Sequence[Entry], clipped: Mapping[int, Mapping[str, float]]
) -> tuple[list[Finding], dict[int, float]]:
    """Returns gradients that are changed behind clipping, and factors that all of a rank have.

    Args:
        before: Gradients before they were clipped.
        after: And after it.
        clipped: Rank -> first name -> the factor of clipping, where it is known.
    """
    others = {(entry.name, entry.ranks): entry.gradient for entry in before}
    result, factors = [], dict[int, float]()
    for rank in sorted({rank for entry in after for rank in entry.ranks}):
        own = [entry for entry in after if entry.ranks[0] == rank]
        known = clipped.get(rank, {})
        right = {
            entry.name: None if other is None else known.get(entry.name, 1.0) * other.double()
            for entry in own
            for other in [others.get((entry.name, entry.ranks))]
        }
        scale = _scale(rank, own, right)
        if known and not math.isclose(scale, 1.0, rel_tol=_close(own)):
            factors[rank] = scale
        for entry in own:
            expected = right[entry.name]
            if entry.gradient is None or expected is None:
                is_same = entry.gradient is expected
            else:
                error = float((entry.gradient.double() - scale * expected).norm())
                is_same = error <= _close([entry]) * scale * float(expected.norm())
            if not is_same:
                result.append(Finding(*_CHANGED, (entry.name,), entry.ranks))
    return result, factors


def _wrong(norms: Mapping[int, float | None], entries: Sequence[Entry]) -> list[Finding]:
    """Returns causes by rank; one for all ranks that use the norm of one rank alone."""
    known = {rank: norm for rank, norm in norms.items() if norm is not None}
    causes = {rank: judged(norm, rank, entries) for rank, norm in known.items()}
    words = {cause.words for cause in causes.values() if cause is not None}
    findings = []
    for rank, cause in causes.items():
        if cause is None:
            continue
        of_rank = _OF_RANK.format(rank=rank)
        is_shared = cause.words == _OF_THIS_RANK and of_rank in words
        norm, right = known[rank], right_norm(rank, entries)
        details = (f"rank {rank} has {norm:.5g}, right is {right:.5g}",) if norm else ()
        findings.append(
            Finding(
                of_rank if is_shared else cause.words, cause.advice, (), (rank,), details=details
            )
        )
    return findings


def _used(
    rank: int, before: Sequence[Entry], after: Sequence[Entry], clip_norm: float
) -> float | None:
    """Returns the norm that a rank has clipped by; None if it has not clipped, rightly."""
    scale = _scale(rank, after, {entry.name: entry.gradient for entry in before})
    if scale < 1 - _close(before):
        return clip_norm / scale
    return None if right_norm(rank, before) <= clip_norm else 0.0


def _scale(rank: int, entries: Sequence[Entry], others: Mapping[str, Tensor | None]) -> float:
    """Returns the factor that most gradients of a rank have to other ones; 1 if there are none."""
    scales = []
    for entry in entries:
        other = others.get(entry.name)
        if rank in entry.ranks and entry.gradient is not None and other is not None:
            squares = float(other.double().square().sum())
            if squares > 0:
                scales.append(float((entry.gradient.double() * other).sum()) / squares)
    return statistics.median(scales) if scales else 1.0


def factor(norm: float, clip_norm: float) -> float:
    """Returns what gradients of a norm are multiplied by, if they are clipped."""
    return min(1.0, clip_norm / norm) if norm else 1.0
