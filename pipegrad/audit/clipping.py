"""Clipping: by which norm did a rank clip its gradients?

[Note: a norm by its parameters] A norm is compared with that of the gradients that the ranks
really had, so it differs from that of right gradients, and with wrong norms that are known. If
gradients were seen only after they were clipped, the norm says what they were before; if they were
seen before and after, their factor says the norm.
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
_NOT_CLIPPED = Cause("gradients are not clipped", "clip them before the optimizer's step")
_ADVICE = "reduce the squares over all ranks, with each parameter counted once"


def right_norm(rank: int, entries: Sequence[Entry]) -> float:
    """Returns the norm in which each parameter counts once, with the gradients of one replica."""
    return _norm(_once(_of_replica(rank, entries)))


def wrong_norms(norms: Mapping[int, float | None], entries: Sequence[Entry]) -> list[Finding]:
    """Returns what is wrong with the norms of ranks; 0 if a rank has not clipped."""
    findings, close = list[Finding](), _close(entries)
    wrong = {
        rank: norm
        for rank, norm in norms.items()
        if norm is not None and not _is_right(norm, rank, entries, close)
    }
    sources = {rank: _source(norm, rank, entries, close) for rank, norm in wrong.items()}
    for rank, norm in wrong.items():
        source, words = sources[rank], "is not that of all parameters"
        if source is not None:
            is_own = source == rank and [*sources.values()].count(rank) == 1
            words = f"is that of {'this rank' if is_own else f'rank {source}'}'s parameters alone"
        elif math.isclose(norm, _norm(_of_replica(rank, entries)), rel_tol=close):
            words = "counts each copy of a parameter that several ranks hold"
        cause = Cause(f"the gradient norm {words}", _ADVICE) if norm else _NOT_CLIPPED
        details = (f"rank {rank} has {norm:.5g}, right is {right_norm(rank, entries):.5g}",)
        findings.append(Finding(*cause, ranks=(rank,), details=details if norm else ()))
    return findings


def _is_right(norm: float, rank: int, entries: Sequence[Entry], close: float) -> bool:
    # torch clips by the norm and 1e-6. It may be the largest element, or the sum of all.
    own = _once(_of_replica(rank, entries))
    sizes = [
        e.gradient.double().abs() for e in own if e.gradient is not None and e.gradient.numel()
    ]
    largest, total = (
        max((float(x.max()) for x in sizes), default=0.0),
        sum(float(x.sum()) for x in sizes),
    )
    ways = _norm(own), largest, total
    return any(math.isclose(norm, way, rel_tol=close, abs_tol=2 * _ADDED) for way in ways)


def _source(norm: float, rank: int, entries: Sequence[Entry], close: float) -> int | None:
    """Returns the rank whose parameters alone have this norm."""
    ranks = {other for entry in _of_replica(rank, entries) for other in entry.ranks} - {rank}
    for other in (rank, *sorted(ranks)):
        held = _once([entry for entry in entries if other in entry.ranks])
        if math.isclose(norm, _norm(held), rel_tol=close):
            return other
    return None


def _close(entries: Iterable[Entry]) -> float:
    """Returns the relative error that a norm may have: of a gradient after it was clipped, too."""
    dtypes = {entry.gradient.dtype for entry in entries if entry.gradient is not None}
    return _CLOSE if dtypes <= {torch.float32, torch.float64} else _CLOSE_LOW


def _of_replica(rank: int, entries: Sequence[Entry]) -> list[Entry]:
    replicas = {r for entry in entries if rank in entry.ranks for r in entry.replicas}
    own = [entry for entry in entries if replicas & set(entry.replicas)]
    # Replicas share what one of them holds alone, such as an expert.
    names = {entry.name for entry in own}
    return own + [entry for entry in entries if entry.name not in names]


def _once(entries: Sequence[Entry]) -> list[Entry]:
    return list({entry.name: entry for entry in reversed(entries)}.values())


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
    maxima = {s.rank: s.clip_norm for s in seen if s.clip_norm is not None}
    clip_norm = next(iter(maxima.values()), clip_norm)
    norms = {of_rank.rank: of_rank.norm for of_rank in seen}
    if any(of_rank.unclipped for of_rank in seen):
        before = entries_of(seen, [s.unclipped or s.gradients for s in seen], first)
    else:
        before = [_before(entry, norms, clip_norm) for entry in after]
    if any(of_rank.is_other for of_rank in seen):
        return before, [], {}  # by value: compared before it alone
    findings, changed, later = list[Finding](), list[Finding](), dict[int, float]()
    for of_rank in seen:
        # The factors of clipping by first name, where torch's functions have clipped.
        factors = {
            first[name]: factor(clip.norm + _ADDED, clip.max_norm)
            for clip in of_rank.clips
            for name in clip.names
        }
        scale, others = _behind(of_rank.rank, before, after, factors)
        changed += [Finding(*_CHANGED, (entry.name,), entry.ranks) for entry in others]
        if factors and not math.isclose(scale, 1.0, rel_tol=_close(before)):
            later[of_rank.rank] = scale
        if norms[of_rank.rank] is None and clip_norm is not None:
            if scale < 1 - _close(before):
                norms[of_rank.rank] = clip_norm / scale
            elif right_norm(of_rank.rank, before) > clip_norm:
                norms[of_rank.rank] = 0.0
    findings += wrong_norms(norms, before)
    if len(set(maxima.values())) > 1:
        details = tuple(f"rank {rank} clips to {maximum:g}" for rank, maximum in maxima.items())
        words = "ranks clip to different norms"
        findings.append(Finding(words, _ADVICE, (), tuple(maxima), details=details))
    # Norms of what changes later say nothing.
    return before, changed or findings, {} if changed else later


def _before(entry: Entry, norms: Mapping[int, float | None], clip_norm: float | None) -> Entry:
    """Returns a gradient as it was before its rank has clipped it by its norm."""
    norm = norms[entry.ranks[0]]
    if entry.gradient is None or clip_norm is None:
        return entry
    if norm is None:
        raise PlanError(
            f"the step clips to {clip_norm:g}, and the norm of rank {entry.ranks[0]} was not seen: "
            f"call pipegrad.audit.before_clipping() in the step when gradients are reduced, or "
            f'return {{"loss": ..., "grad_norm": ...}} on all ranks'
        )
    return replace(entry, gradient=entry.gradient.double() / factor(norm, clip_norm))


def _behind(
    rank: int, before: Sequence[Entry], after: Sequence[Entry], factors: Mapping[str, float]
) -> tuple[float, list[Entry]]:
    """Returns the factor of a rank's gradients after clipping, and entries with another one."""
    there = {entry.key: entry.gradient for entry in before}
    pairs, others = list[tuple[Entry, Tensor, Tensor]](), list[Entry]()
    for entry in (entry for entry in after if rank in entry.ranks):
        was = there.get(entry.key)
        if entry.gradient is not None and was is not None:
            expected = factors.get(entry.name, 1.0) * was.double()
            pairs.append((entry, entry.gradient.double(), expected))
        elif entry.gradient is not was:
            others.append(entry)
    scales = [
        float((now * was).sum() / was.square().sum()) for _, now, was in pairs if bool(was.any())
    ]
    scale = statistics.median(scales) if scales else 1.0
    others += [
        entry
        for entry, now, was in pairs
        if float((now - scale * was).norm()) > _close([entry]) * scale * float(was.norm())
    ]
    return scale, [entry for entry in others if entry.ranks[0] == rank]


def factor(norm: float, clip_norm: float) -> float:
    """Returns what gradients of a norm are multiplied by, if they are clipped."""
    return min(1.0, clip_norm / norm) if norm else 1.0
