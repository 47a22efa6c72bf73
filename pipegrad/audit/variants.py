"""Variants: does an option of a job change the pipeline as it changes one process?

[Note: a variant] The audit runs as it is first. Then each variant makes the same audit with one
option changed, in the same ranks, and that is compared with one process, too. Beside it, both sides
are compared with themselves: how much does the option change one process, and how much the
pipeline? So an option that a pipeline drops has its name, which no gradient has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pipegrad.audit.causes import OTHER_VALUES
from pipegrad.audit.report import Finding, Variant, without_numbers
from pipegrad.audit.states import Key

GRADIENT, UPDATE, DROPOUT = "gradient", "update", "dropout"
_SURE = 4.0  # times what is allowed: so much one side must change, if the other does not
_ALIKE = 1e-2  # of a change: sides that are right differ by less
_SMALL = 1e-3  # changes are measured by at least this share of the whole
_ADVICE = "give the option to all stages, and to what reduces and updates; or refuse it"


@dataclass(frozen=True)
class Sides:
    """What the pipeline and one process had in a step.

    Attributes:
        one: First name -> tensor of one process. None if that is not known.
        pipeline: Name and ranks -> tensor of the pipeline.
        allowed: Name and ranks -> the largest relative error that is right.
    """

    one: Mapping[str, Tensor] | None
    pipeline: Mapping[Key, Tensor]
    allowed: Mapping[Key, float]


@dataclass(frozen=True)
class Measured:
    """What an audit has measured, on rank 0.

    Attributes:
        gradients: Of the first step. In later steps parameters of a variant have other values.
        updates: Of all steps up to the first with a finding, each from the values that the pipeline
            had before it.
        dropped: Probabilities of dropout in one process, and in the pipeline.
    """

    gradients: Sequence[Sides]
    updates: Sequence[Sides]
    dropped: tuple[set[float], set[float]]


@dataclass(frozen=True)
class _Change:
    """How an option changes one thing.

    Attributes:
        what: The thing.
        one: By how much in one process, relative; None if that is not known.
        pipeline: In the pipeline.
        lost: Parameters and ranks that change in one process alone, and by how much there.
        added: Parameters and ranks that change in the pipeline alone, and by how much.
    """

    what: str
    one: float | None
    pipeline: float
    lost: tuple[Sequence[Key], float] = ((), 0.0)
    added: tuple[Sequence[Key], float] = ((), 0.0)

    @property
    def is_one_sided(self) -> bool:
        return bool(self.lost[0] or self.added[0])


def compared(
    name: str,
    usual: Measured,
    changed: Measured,
    findings: tuple[Sequence[Finding], Sequence[Finding]],
) -> tuple[Variant, list[Finding]]:
    """Returns what an option changes, and what is wrong with it.

    Args:
        name: Of the variant.
        usual: Without the option.
        changed: With it.
        findings: Without the option, and with it.
    """
    changes = list(_changes(usual, changed))
    known = {without_numbers(finding.cause) for finding in findings[0]}
    new = [finding for finding in findings[1] if without_numbers(finding.cause) not in known]
    first = next((c for c in changes if c.is_one_sided), changes[0] if changes else None)
    if first is None:
        said = [replace(finding, cause=f"{name}: {finding.cause}") for finding in new]
        words = "otherwise in the pipeline" if new else "without effect in both"
        return Variant(name, words), said
    result, explained = list[Finding](), set[str]()
    for change in changes:
        result += _one_sided(name, change)
        explained |= {key[0] for key in (*change.lost[0], *change.added[0])}
    # What is lost makes other gradients and norms wrong, too.
    is_lost = any(change.is_one_sided for change in changes)
    rest = [
        f
        for f in new
        if not is_lost or not (f.cause == OTHER_VALUES.words or explained.issuperset(f.names))
    ]
    amount = _amounts(first)
    result += [replace(f, cause=f"{name}: {f.cause}", details=(*f.details, amount)) for f in rest]
    words = "alike" if not result else "otherwise in the pipeline"
    if known and not result and abs(first.pipeline - (first.one or 0.0)) > _ALIKE * first.pipeline:
        words = "wrong as without the option"
    if first.is_one_sided:
        words = "lost in the pipeline" if first.lost[0] else "in the pipeline alone"
    elif first.one is None:
        words = "not compared: give the audit `optimizer`"
    return Variant(name, words, first.what, first.one, first.pipeline), result


def _amounts(change: _Change) -> str:
    one = "" if change.one is None else f"one process's {change.what} by {change.one:.2g}, "
    return f"the option changes {one}the pipeline's by {change.pipeline:.2g}"


def _one_sided(name: str, change: _Change) -> Iterator[Finding]:
    """Yields what changes in one process alone, or in the pipeline alone."""
    is_all = change.pipeline < _SMALL * (change.one or 0.0)
    lost = (
        f"changes one process's {change.what} by {change.lost[1]:.2g}, and the pipeline's not at "
        f"all{'' if is_all else ' on these ranks'}"
    )
    added = (
        f"changes the pipeline's {change.what} by {change.added[1]:.2g}, and one process's not at "
        f"all{' in these parameters' if change.one else ''}"
    )
    for keys, words in ((change.lost[0], lost), (change.added[0], added)):
        if keys:
            names = tuple(dict.fromkeys(key[0] for key in keys if key[0]))
            ranks = tuple(sorted({rank for key in keys for rank in key[1]}))
            yield Finding(f"{name}: {words}", _ADVICE, names, ranks)


def _changes(usual: Measured, changed: Measured) -> Iterator[_Change]:
    """Yields what an option changes on a side."""
    pairs = {
        GRADIENT: (usual.gradients, changed.gradients),
        UPDATE: (usual.updates, changed.updates),
    }
    for what, (before, after) in pairs.items():
        change = _change(what, before, after)
        if change is not None:
            yield change
    one, pipeline = (
        max(before ^ after, default=0.0)
        for before, after in zip(usual.dropped, changed.dropped, strict=True)
    )
    if one and not pipeline:
        yield _Change(DROPOUT, one, 0.0, ([("", ())], one))
    elif pipeline and not one:
        yield _Change(DROPOUT, 0.0, pipeline, added=([("", ())], pipeline))
    elif one:
        yield _Change(DROPOUT, one, pipeline)


def _change(what: str, usual: Sequence[Sides], changed: Sequence[Sides]) -> _Change | None:
    """Returns how tensors change; None if nothing does on any side."""
    lost, added = list[Key](), list[Key]()
    # Of one process, of the pipeline, of what is lost, and of what is added.
    squares = [[0.0, 0.0] for _ in range(4)]
    is_known, is_changed = True, False
    for before, after in zip(usual, changed, strict=False):
        has_one = before.one is not None and after.one is not None
        is_known &= has_one
        ones, others = before.one or {}, after.one or {}
        whole = math.hypot(*(_norm(x) for x in ones.values()))
        whole_of_pipeline = math.hypot(*(_norm(x) for x in before.pipeline.values()))
        for key in dict.fromkeys([*before.pipeline, *after.pipeline]):
            allowed = max(side.allowed.get(key, 0.0) for side in (before, after))
            there = _apart(ones.get(key[0]), others.get(key[0]), _SMALL * whole)
            own = _apart(
                before.pipeline.get(key), after.pipeline.get(key), _SMALL * whole_of_pipeline
            )
            is_changed |= own.share > allowed or (has_one and there.share > allowed)
            is_lost = has_one and there.share > _SURE * allowed and own.share <= allowed
            is_added = has_one and own.share > _SURE * allowed and there.share <= allowed
            if is_lost:
                lost.append(key)
            if is_added:
                added.append(key)
            counted = (True, there), (True, own), (is_lost, there), (is_added, own)
            for total, (is_counted, apart) in zip(squares, counted, strict=True):
                if is_counted:
                    total[0] += apart.difference**2
                    total[1] += apart.norm**2
    if not is_changed:
        return None
    sizes = [math.sqrt(a / b) if b else 0.0 for a, b in squares]
    once = list(dict.fromkeys(lost)), list(dict.fromkeys(added))
    one = sizes[0] if is_known else None
    return _Change(what, one, sizes[1], (once[0], sizes[2]), (once[1], sizes[3]))


@dataclass(frozen=True)
class _Apart:
    """How far two tensors are apart.

    Attributes:
        difference: Norm of the difference.
        norm: Of the first; of the second if there is no first.
        share: The difference by the larger norm.
    """

    difference: float
    norm: float
    share: float


def _apart(before: Tensor | None, after: Tensor | None, least: float) -> _Apart:
    if before is None or after is None or before.shape != after.shape:
        norm = max(_norm(before), _norm(after))
        return _Apart(norm, norm, 1.0 if norm else 0.0)
    difference, norm = _norm(after.double() - before.double()), _norm(before)
    tiny = torch.finfo(torch.float64).tiny
    return _Apart(difference, norm, difference / max(norm, _norm(after), least, tiny))


def _norm(tensor: Tensor | None) -> float:
    return 0.0 if tensor is None else float(tensor.double().norm())
