"""Variants: does an option of a job change the pipeline as it changes one process?

[Note: a variant] The audit runs as it is first. Then each variant makes the same audit with one
option changed, in the same ranks, and that is compared with one process, too. Beside it, both sides
are compared with themselves, by the norms of gradients and updates: how much does the option change
one process, and how much the pipeline? So an option that a pipeline drops has its name, which no
gradient has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pipegrad.audit.causes import NOT_KNOWN
from pipegrad.audit.report import Finding, Variant, without_numbers

_SURE = 4.0  # times what is allowed: so much one side must change, if the other does not
_ALIKE = 1e-2  # of a change: sides that are right differ by less
_SMALL = 1e-3  # changes are measured by at least this share of the whole
_ADVICE = "give the option to all stages, and to what reduces and updates; or refuse it"


class Size(NamedTuple):
    """A norm in one process, None if that is not known; in the pipeline; and its largest error."""

    one: float | None
    pipeline: float
    allowed: float = 0.0


Where = tuple[int, str, tuple[int, ...]]  # step, first name and ranks
Sizes = Mapping[Where, Size]
_NOWHERE: Where = (1, "", ())


@dataclass(frozen=True)
class Measured:
    """What an audit has measured, on rank 0.

    Attributes:
        gradients: Gradients of the first step. In later steps parameters of a variant have other
            values.
        updates: Updates of all steps up to the first with a finding, each from the values that the
            pipeline had before it.
        dropped: Probabilities of dropout in one process, and in the pipeline.
    """

    gradients: Sizes
    updates: Sizes
    dropped: tuple[set[float], set[float]]


@dataclass(frozen=True)
class _Change:
    """How an option changes norms.

    Attributes:
        what: Name of what has these norms.
        one: By how much it changes one process; None if that is not known.
        pipeline: By how much it changes the pipeline.
        lost: Places that change in one process alone.
        added: Places that change in the pipeline alone.
    """

    what: str
    one: float | None
    pipeline: float
    lost: Sequence[Where]
    added: Sequence[Where]


def compared(
    name: str,
    usual: Measured,
    changed: Measured,
    findings: tuple[Sequence[Finding], Sequence[Finding]],
) -> tuple[Variant, list[Finding]]:
    """Returns what an option changes, and what is wrong with it.

    Args:
        name: Name of the variant.
        usual: What both sides had without the option.
        changed: What they had with it.
        findings: Findings without the option, and with it.
    """
    pairs = zip(usual.dropped, changed.dropped, strict=True)
    drops = Size(*(max(before ^ after, default=0.0) for before, after in pairs))
    every = (
        _change("gradient", usual.gradients, changed.gradients),
        _change("update", usual.updates, changed.updates),
        _change("dropout", {_NOWHERE: Size(0.0, 0.0)}, {_NOWHERE: drops}),
    )
    changes = [change for change in every if change is not None]
    alone = [change for change in changes if change.lost or change.added]
    known = {without_numbers(finding.cause) for finding in findings[0]}
    new = [finding for finding in findings[1] if without_numbers(finding.cause) not in known]
    if not changes:
        said = [replace(finding, cause=f"{name}: {finding.cause}") for finding in new]
        words = "otherwise in the pipeline" if new else "without effect in both"
        return Variant(name, words), said
    first = next(iter(alone), changes[0])
    result = [finding for change in alone for finding in _one_sided(name, change)]
    if alone:  # what is lost makes other gradients and norms wrong, too
        lost = {place[1] for change in alone for place in (*change.lost, *change.added)}
        new = [f for f in new if f.cause != NOT_KNOWN.words and not lost.issuperset(f.names)]
    own = "" if first.one is None else f"one process's {first.what} by {first.one:.2g}, "
    amount = f"the option changes {own}the pipeline's by {first.pipeline:.2g}"
    result += [replace(f, cause=f"{name}: {f.cause}", details=(*f.details, amount)) for f in new]
    if alone:
        words = "lost in the pipeline" if first.lost else "in the pipeline alone"
    elif first.one is None:
        words = "not compared: give the audit `optimizer`"
    elif result:
        words = "otherwise in the pipeline"
    elif known and abs(first.pipeline - first.one) > _ALIKE * first.pipeline:
        words = "wrong as without the option"
    else:
        words = "alike"
    return Variant(name, words, first.what, first.one, first.pipeline), result


def _one_sided(name: str, change: _Change) -> Iterator[Finding]:
    """Yields what changes in one process alone, or in the pipeline alone."""
    what, one = change.what, change.one or 0.0
    some = " on these ranks" if change.pipeline >= _SMALL * one else ""
    others = " in these parameters" if one else ""
    of_one = f"one process's {what} by {one:.2g}, and the pipeline's not at all{some}"
    of_pipeline = (
        f"the pipeline's {what} by {change.pipeline:.2g}, and one process's not at all{others}"
    )
    for places, words in ((change.lost, of_one), (change.added, of_pipeline)):
        if places:
            names = tuple(dict.fromkeys(place[1] for place in places if place[1]))
            ranks = tuple(sorted({rank for place in places for rank in place[2]}))
            yield Finding(f"{name}: changes {words}", _ADVICE, names, ranks)


def _change(what: str, usual: Sizes, changed: Sizes) -> _Change | None:
    """Returns how norms of both sides change in the steps that both have; None if they do not."""
    steps = {place[0] for place in usual} & {place[0] for place in changed}
    places = [place for place in {**usual, **changed} if place[0] in steps]
    before, after = ([x.get(p, Size(0.0, 0.0)) for p in places] for x in (usual, changed))
    is_known = all(size.one is not None for size in (*before, *after))
    ones = list(zip([x.one or 0.0 for x in before], [x.one or 0.0 for x in after], strict=True))
    owns = list(zip([x.pipeline for x in before], [x.pipeline for x in after], strict=True))
    least = _SMALL * math.hypot(*(x for x, _ in ones if is_known), *(x for x, _ in owns))
    lost, added, is_there = list[Where](), list[Where](), False
    for index, place in enumerate(places):
        allowed = max(before[index].allowed, after[index].allowed)
        one, own = (abs(y - x) / (max(x, y, least) or 1.0) for x, y in (ones[index], owns[index]))
        is_there |= own > allowed or (is_known and one > allowed)
        if is_known and one > _SURE * allowed and own <= allowed:
            lost.append(place)
        elif is_known and own > _SURE * allowed and one <= allowed:
            added.append(place)
    if not is_there:
        return None
    return _Change(what, _amount(ones) if is_known else None, _amount(owns), lost, added)


def _amount(pairs: Sequence[tuple[float, float]]) -> float:
    """Returns how far norms move, relative to the first ones."""
    return math.hypot(*(y - x for x, y in pairs)) / (math.hypot(*(x for x, _ in pairs)) or 1.0)
