"""Breakdown: where each rank's step went. The parts of a rank sum to its step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from statistics import median_low
from typing import Any, Literal, NamedTuple

from pipegrad.simulation.explain.lookup import Lookup, Piece, name_of
from pipegrad.simulation.timeline import (
    COMPUTE,
    ON_RANK,
    WAITS,
    Span,
    SpanKind,
    Timeline,
    in_percent,
    in_time,
)

# What no span covers is "other".
Part = SpanKind | Literal["other"]
PARTS: tuple[Part, ...] = (*ON_RANK, "other")


class ReceiveWait(NamedTuple):
    """How long a rank waited for what one action of another rank made.

    Attributes:
        peer: The rank that sends.
        action: The action that made the value, such as ``0F3``; the value in words if no span of
            that action is in the timeline.
        seconds: How long the rank waited.
        transfer_seconds: The part in which the value was on its way. In the rest the peer had
            not yet sent it.
    """

    peer: int
    action: str
    seconds: float
    transfer_seconds: float


class ReductionTime(NamedTuple):
    """How much of a reduction was hidden.

    Attributes:
        name: Its name.
        seconds: How long it ran, from when its last rank had begun it.
        hidden: The share of this in which its ranks computed; a mean over its ranks.
        exposed_seconds: How long the rank that waited longest waited for it.
    """

    name: str
    seconds: float
    hidden: float
    exposed_seconds: float


@dataclass(frozen=True)
class RankBreakdown:
    """What one rank did in one step.

    Attributes:
        rank: The pipeline rank.
        step_seconds: How long the step took, on all ranks.
        parts: Seconds of each part; they sum to `step_seconds`.
        receives: "wait for receive" by the action that made the value, the longest first.
        other: "other" by where it is: "before the first action", "between", "after the last".
        overlap_seconds: Time of the whole timeline that two spans of this rank claim. It counts
            once, for the span that began first.
    """

    rank: int
    step_seconds: float
    parts: Mapping[Part, float]
    receives: tuple[ReceiveWait, ...]
    other: Mapping[str, float]
    overlap_seconds: float

    @property
    def bubble(self) -> float:
        """The share of the step in which the rank computes nothing."""
        computes = sum(self.parts[kind] for kind in COMPUTE)
        return max(0.0, 1 - computes / self.step_seconds) if self.step_seconds > 0 else 0.0

    @property
    def exposed_seconds(self) -> float:
        """How long the rank waited for communication, and not for a rank that was still computing.

        It is the part of "wait for receive" in which the value was on its way, and the waits for
        sends, reductions and parameters.
        """
        waits: tuple[Part, ...] = ("wait for send", "wait for reduction", "wait for parameters")
        return sum(self.parts[w] for w in waits) + sum(r.transfer_seconds for r in self.receives)

    @property
    def peers(self) -> dict[int, float]:
        """How long the rank waited for values of each peer, the longest first."""
        seconds = defaultdict[int, float](float)
        for wait in self.receives:
            seconds[wait.peer] += wait.seconds
        return dict(sorted(seconds.items(), key=lambda item: (-item[1], item[0])))


@dataclass(frozen=True)
class Breakdown:
    """Where one step went.

    Attributes:
        step: Its number.
        seconds: How long it took, from the end of the step before it to its end on all ranks.
        ranks: For each pipeline rank.
        reductions: What reductions took, in the order in which they began.
    """

    step: int
    seconds: float
    ranks: tuple[RankBreakdown, ...]
    reductions: tuple[ReductionTime, ...]

    @property
    def bubble(self) -> float:
        """The mean of the ranks' bubbles."""
        return sum(rank.bubble for rank in self.ranks) / len(self.ranks) if self.ranks else 0.0

    def columns(self) -> list[str]:
        """Returns the head of `rows`: parts that some rank has."""
        heads = (part.removeprefix("wait for ") for part in self._parts())
        return ["rank", *heads, "bubble", "exposed"]

    def rows(self, ranks: Iterable[int] | None = None) -> Iterator[list[str]]:
        """Yields for each rank its parts in percent of the step, as text.

        Args:
            ranks: Which ranks; by default all.
        """
        parts = self._parts()
        for rank in range(len(self.ranks)) if ranks is None else ranks:
            own = self.ranks[rank]
            shares = [*(own.parts[part] for part in parts), own.exposed_seconds]
            cells = [in_percent(share / (self.seconds or 1.0)) for share in shares]
            yield [str(rank), *cells[:-1], in_percent(own.bubble), cells[-1]]

    def to_json(self) -> dict[str, Any]:
        """Returns it as plain data, with the ten longest waits for values of each rank."""
        ranks = [
            {
                **asdict(own),
                "receives": [wait._asdict() for wait in own.receives[:10]],
                "peers": own.peers,
                "bubble": own.bubble,
                "exposed_seconds": own.exposed_seconds,
            }
            for own in self.ranks
        ]
        reductions = [reduction._asdict() for reduction in self.reductions]
        own = {"step": self.step, "seconds": self.seconds, "bubble": self.bubble}
        return {**own, "ranks": ranks, "reductions": reductions}

    def _parts(self) -> list[Part]:
        return [p for p in PARTS if self.seconds > 0 and any(r.parts[p] > 0 for r in self.ranks)]


def typical_step(timeline: Timeline) -> int:
    """Returns the number of the step whose time is the median of all steps.

    The first step of a run is longer than others, and one of several may be disturbed.
    """
    ends = timeline.step_ends
    seconds = [end - begin for begin, end in zip([0.0, *ends], ends, strict=False)]
    return seconds.index(median_low(seconds)) if seconds else 0


def break_down(lookup: Lookup, step: int) -> Breakdown:
    """Returns where a step went, for a simulated or a measured timeline.

    A step begins where the step before it ended on all ranks. If two spans of a rank overlap, as
    clocks and recording are not exact, the one that began first has the time. Time that no span
    covers is "other". So the parts of each rank sum to the step.

    Args:
        lookup: The timeline.
        step: Number of the step, from 0.
    """
    begin, end = lookup.step(step)
    return Breakdown(
        step,
        end - begin,
        tuple(_rank(lookup, rank, begin, end) for rank in range(lookup.timeline.num_ranks)),
        tuple(_reductions(lookup, step, begin, end)),
    )


def _rank(lookup: Lookup, rank: int, begin: float, end: float) -> RankBreakdown:
    pieces = list(lookup.between(rank, begin, end))
    parts: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
    for piece in pieces:
        parts[piece.span.kind if piece.span else "other"] += piece.seconds
    waits = _receives(lookup, pieces)
    overlap = lookup.overlap_seconds[rank]
    return RankBreakdown(rank, end - begin, parts, tuple(waits), _other(pieces), overlap)


def _other(pieces: Sequence[Piece]) -> dict[str, float]:
    covered = [number for number, piece in enumerate(pieces) if piece.span is not None]
    first, last = (covered[0], covered[-1]) if covered else (len(pieces), len(pieces))
    other = {"before the first action": 0.0, "between": 0.0, "after the last": 0.0}
    for number, piece in enumerate(pieces):
        if piece.span is None:
            name = "between" if number > first else "before the first action"
            other["after the last" if number > last else name] += piece.seconds
    return other


def _receives(lookup: Lookup, pieces: Iterable[Piece]) -> list[ReceiveWait]:
    result: dict[tuple[int, str], ReceiveWait] = {}
    for piece in pieces:
        wait = piece.span
        if wait is not None and wait.kind == "wait for receive":
            action, transferred = _source(lookup, wait, piece)
            known = result.get((wait.peer, action), ReceiveWait(wait.peer, action, 0.0, 0.0))
            result[wait.peer, action] = known._replace(
                seconds=known.seconds + piece.seconds,
                transfer_seconds=known.transfer_seconds + transferred,
            )
    return sorted(result.values(), key=lambda wait: (-wait.seconds, wait.peer, wait.action))


def _source(lookup: Lookup, wait: Span, piece: Piece) -> tuple[str, float]:
    """Returns the action that made a value, and how much of the wait it was on its way."""
    transfer = lookup.transfer_of(wait)
    maker = lookup.maker(transfer) if transfer else None
    name = maker.action if maker else wait.label or "unknown"
    if transfer is None:
        return name, 0.0
    return name, max(0.0, min(piece.end, transfer.end) - max(piece.begin, transfer.begin))


def longest_waits(lookup: Lookup, step: int, number: int) -> list[str]:
    """Returns the longest waits of a step in words, the longest first."""
    begin, end = lookup.step(step)
    waits = [
        piece.span
        for rank in range(lookup.timeline.num_ranks)
        for piece in lookup.between(rank, begin, end)
        if piece.span is not None and piece.span.kind in WAITS
    ]
    waits.sort(key=lambda wait: (-wait.seconds, wait.rank, wait.begin))
    return [reason(lookup, wait) for wait in waits[:number]]


def reason(lookup: Lookup, wait: Span) -> str:
    """Returns what a rank waited for, and for how long that was on its way.

    For example: ``rank 1 waits 12.3 ms for x of 0F3 from rank 0, which is on its way for 2.10 ms``.
    What the other rank did before that is in the page, and in the table of what ranks wait for.
    """
    what = wait.label or "a value"
    if wait.kind == "wait for receive":
        _, seconds = _source(lookup, wait, Piece(wait.begin, wait.end, wait))
        what = f"{what} from rank {wait.peer}, which is on its way for {in_time(seconds)}"
    elif wait.kind == "wait for send":
        what = f"{what} to arrive on rank {wait.peer}"
    elif wait.kind == "wait for ranks":
        what = "the other ranks"
    elif spans := lookup.beside(wait, by=wait.end):
        last = max(spans, key=attrgetter("begin"))
        prefix = "the parameter sync of " if wait.kind == "wait for parameters" else ""
        begun = f" from when rank {last.rank} begins" if len(spans) > 1 else ""
        what = f"{prefix}{name_of(last)}, which takes {in_time(last.seconds)}{begun}"
    return f"rank {wait.rank} waits {in_time(wait.seconds)} for {what}"


def _reductions(lookup: Lookup, step: int, begin: float, end: float) -> Iterator[ReductionTime]:
    exposed = _exposed(lookup, begin, end)
    for spans in lookup.collectives("reduction", step):
        times = [_running(spans, span) for span in spans]
        seconds = sum(end - begin for begin, end in times)
        hidden = sum(lookup.computed_seconds(s.rank, *t) for s, t in zip(spans, times, strict=True))
        longest = max(end - begin for begin, end in times)
        name = name_of(spans[0])
        yield ReductionTime(
            name, longest, hidden / seconds if seconds else 1.0, max(exposed[name], default=0.0)
        )


def _exposed(lookup: Lookup, begin: float, end: float) -> dict[str, list[float]]:
    """Returns for each reduction how long each rank waited for it."""
    num_ranks = lookup.timeline.num_ranks
    seconds = defaultdict[str, list[float]](lambda: [0.0] * num_ranks)
    for rank in range(num_ranks):
        for piece in lookup.between(rank, begin, end):
            if piece.span is not None and piece.span.kind == "wait for reduction":
                reduction = lookup.beside(piece.span, by=piece.span.end)
                seconds[name_of(*reduction[:1] or [piece.span])][rank] += piece.seconds
    return seconds


def _running(spans: Iterable[Span], span: Span) -> tuple[float, float]:
    """Returns when a rank's part of a reduction ran: all ranks had begun it."""
    begin = max(other.begin for other in spans)
    return (begin if begin < span.end else span.begin), span.end
