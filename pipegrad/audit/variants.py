"""Variants: does an option of a job change the pipeline as it changes one process?

[Note: a variant] First the audit runs without the option. Then each variant runs the same audit
with one option changed, in the same ranks, and compares this with one process, too. It also
compares each side with itself, by the norms of gradients and updates: the change that the option
makes in one process, and the change that it makes in the pipeline. Therefore the report can name an
option that a pipeline drops. A wrong gradient alone names no option.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from pipegrad.audit.causes import NOT_KNOWN
from pipegrad.audit.report import Finding, Report, Variant, without_numbers

_SURE = 4.0  # times the allowed error: the least change of one side, if the other does not change
_ALIKE = 1e-2  # of a change: right sides differ by less
_SMALL = 1e-3  # changes are divided by at least this share of the whole norm
_ADVICE = "give the option to all stages, and to what reduces and updates; or refuse it"


class Size(NamedTuple):
    """A norm in one process, None if not known; the norm in the pipeline; its allowed error."""

    one: float | None
    pipeline: float
    allowed: float = 0.0


# "gradient" of the first step, "update" of all steps up to the first with a finding, or "dropout",
# whose sizes are probabilities; step; first name of a parameter; ranks.
Where = tuple[str, int, str, tuple[int, ...]]
Sizes = Mapping[Where, Size]


class _Change(NamedTuple):
    """The change that an option makes in one kind of size, and the places of one side alone."""

    what: str = ""
    one: float | None = 0.0
    pipeline: float = 0.0
    lost: Sequence[Where] = ()
    added: Sequence[Where] = ()


def compared(
    name: str, usual: tuple[Report, Sizes], changed: tuple[Report, Sizes]
) -> tuple[Variant, tuple[Finding, ...]]:
    """Returns a variant and its findings, from audits without the option and with it."""
    every = [_change(what, usual[1], changed[1]) for what in ("gradient", "update", "dropout")]
    changes = [change for change in every if change.what]
    alone = [change for change in changes if change.lost or change.added]
    first = next(iter([*alone, *changes]), _Change())
    known = {without_numbers(finding.cause) for finding in usual[0].findings}
    new = [f for f in changed[0].findings if without_numbers(f.cause) not in known]
    if alone:  # a lost option makes other gradients and norms wrong, too
        lost = {place[2] for change in alone for place in (*change.lost, *change.added)}
        new = [f for f in new if f.cause != NOT_KNOWN.words and not lost.issuperset(f.names)]
    differs = abs(first.pipeline - (first.one or 0.0)) > _ALIKE * first.pipeline
    words = {
        "lost in the pipeline": first.lost,
        "in the pipeline alone": first.added,
        "not compared: give the audit `optimizer`": first.one is None,
        "otherwise in the pipeline": new,
        "without effect in both": not changes,
        "wrong as without the option": known and differs,
        "alike": True,
    }
    variant = Variant(name, next(w for w, is_so in words.items() if is_so), *first[:3])
    result = [finding for change in alone for finding in _one_sided(change)] + new
    return variant, tuple(replace(f, cause=f"{name}: {f.cause}") for f in result)


def _one_sided(change: _Change) -> Iterator[Finding]:
    """Yields changes that only one side has: one process, or the pipeline."""
    one, pipeline = (change.one or 0.0, "one process's"), (change.pipeline, "the pipeline's")
    for (size, side), (other_size, other), places in (
        (one, pipeline, change.lost),
        (pipeline, one, change.added),
    ):
        if places:
            here = " on these ranks" if other_size >= _SMALL * size else ""
            yield Finding(
                f"changes {side} {change.what} by {size:.2g}, and {other} not at all{here}",
                _ADVICE,
                tuple(dict.fromkeys(place[2] for place in places if place[2])),
                tuple(sorted({rank for place in places for rank in place[3]})),
            )


def _change(what: str, usual: Sizes, changed: Sizes) -> _Change:
    """Returns the change of both sides' sizes in the steps that both audits ran."""
    steps = {at[1] for at in usual if at[0] == what} & {at[1] for at in changed if at[0] == what}
    places = [at for at in {**usual, **changed} if at[0] == what and at[1] in steps]
    before, after = ([x.get(at, Size(0.0, 0.0)) for at in places] for x in (usual, changed))
    is_known = all(size.one is not None for size in (*before, *after))
    ones = [(x.one or 0.0, y.one or 0.0) for x, y in zip(before, after, strict=True)]
    owns = [(x.pipeline, y.pipeline) for x, y in zip(before, after, strict=True)]
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
        return _Change()
    amounts = [
        math.hypot(*(y - x for x, y in pairs))
        / (1.0 if what == "dropout" else math.hypot(*(x for x, _ in pairs)) or 1.0)
        for pairs in (ones, owns)
    ]
    return _Change(what, amounts[0] if is_known else None, amounts[1], lost, added)
