"""The time of a step: the parts of each rank, and the critical path, which decides its end.

The critical path is a chain of computes, transfers and reductions. To make the step shorter,
something on it must become shorter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
    TimeUnit,
    in_percent,
    in_time,
)

# Time that no span covers is "other".
Part = SpanKind | Literal["other"]
PARTS: tuple[Part, ...] = (*ON_RANK, "other")
_HEADS: Mapping[Part, str] = {
    "F": "forward",
    "B": "backward",
    "I": "of inputs",
    "W": "of weights",
    "wait for receive": "waits to receive",
    "wait for send": "to send",
    "wait for reduction": "for reductions",
    "wait for parameters": "for parameters",
    "wait for ranks": "for all ranks",
}


@dataclass(frozen=True)
class RankBreakdown:
    """The time of one rank in one step.

    Attributes:
        rank: The pipeline rank.
        step_seconds: Duration of the step, on all ranks.
        parts: Seconds of each part; they sum to `step_seconds`.
    """

    rank: int
    step_seconds: float
    parts: Mapping[Part, float]

    @property
    def computing(self) -> float:
        """The share of the step in which the rank computes."""
        computes = sum(self.parts[kind] for kind in COMPUTE)
        return min(1.0, computes / self.step_seconds) if self.step_seconds > 0 else 1.0


@dataclass(frozen=True)
class Breakdown:
    """The time of one step, by rank and part.

    Attributes:
        step: Its number.
        seconds: Its duration, from the end of the step before it to its end on all ranks.
        ranks: The parts of each pipeline rank.
    """

    step: int
    seconds: float
    ranks: tuple[RankBreakdown, ...]

    def columns(self) -> list[str]:
        """Returns the head of `rows`: parts that some rank has."""
        return ["rank", *(_HEADS.get(part, str(part)) for part in self._parts())]

    def rows(self) -> Iterator[list[str]]:
        """Yields for each rank its parts in percent of the step, as text."""
        total, parts = self.seconds or 1.0, self._parts()
        for own in self.ranks:
            yield [str(own.rank), *(in_percent(own.parts[part] / total) for part in parts)]

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
    """Returns the time of a step by rank and part, for a simulated or a measured timeline.

    A step begins where the step before it ended on all ranks. If two spans of a rank overlap,
    because clocks and recording are not exact, the one that began first has the time. The parts of
    each rank sum to the step, because time that no span covers is "other".

    Args:
        lookup: The timeline.
        step: Number of the step, from 0.
    """
    begin, end = lookup.timeline.step(step)
    ranks = list[RankBreakdown]()
    for rank in range(lookup.timeline.num_ranks):
        parts: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
        for piece in lookup.between(rank, begin, end):
            parts[piece.span.kind if piece.span else "other"] += piece.seconds
        ranks.append(RankBreakdown(rank, end - begin, parts))
    return Breakdown(step, end - begin, tuple(ranks))


PathKind = Literal[
    "compute",
    "transfer",
    "reduction",
    "parameter sync",
    "optimizer",
    "host",
    "meeting",
    "wait",
    "other",
]
_WORDS: dict[PathKind, tuple[str, str]] = {
    "compute": ("compute", "rank {s.rank}"),
    # Recorded ranks see a message when it is sent, and when they have waited for it. The link may
    # have taken the time between, or a receiver that came late.
    "transfer": ("messages sent and not yet received", "link {s.rank}->{s.peer}"),
    "reduction": ("reductions", "{s.name}"),
    "parameter sync": ("parameter sync", "{s.name}"),
    "optimizer": ("optimizer", "rank {s.rank}"),
    "host": ("host", "rank {s.rank}"),
    "meeting": ("messages of all ranks to each other", "rank {s.rank}"),
    "wait": ("waits that nothing in the timeline explains", "rank {s.rank}"),
    "other": ("time that no span covers", "rank {s.rank}"),
}
_MOST_WORDS = 3


class Segment(NamedTuple):
    """A part of the critical path.

    Attributes:
        kind: Its kind. In "meeting" all ranks wait for messages of each other. "wait" is a wait
            whose cause is not in the timeline, "other" is time that no span covers.
        begin: Seconds from the start of the timeline.
        end: Likewise. The next segment begins here.
        rank: The rank; for a transfer, the one that sends.
        peer: The rank that receives a transfer, or -1.
        name: The action, the value or the reduction.
    """

    kind: PathKind
    begin: float
    end: float
    rank: int
    peer: int = -1
    name: str = ""

    @property
    def seconds(self) -> float:
        """Its duration."""
        return self.end - self.begin

    @property
    def source(self) -> str:
        """Its place, such as ``rank 2``, ``link 1->2`` or the name of a reduction."""
        return _WORDS[self.kind][1].format(s=self)


@dataclass(frozen=True)
class CriticalPath:
    """The critical path of a step.

    Attributes:
        step: Its number.
        segments: Segments in order of time, which sum to the step. Each begins where the one before
            it ends.
        time_unit: Unit of the timeline.
    """

    step: int
    segments: tuple[Segment, ...]
    time_unit: TimeUnit = "seconds"

    @property
    def seconds(self) -> float:
        """Duration of the step."""
        return sum(segment.seconds for segment in self.segments)

    @property
    def shares(self) -> dict[PathKind, dict[str, float]]:
        """Seconds of each kind, by where they were; the longest first."""
        seconds = defaultdict[PathKind, dict[str, float]](dict)
        for segment in self.segments:
            own = seconds[segment.kind]
            own[segment.source] = own.get(segment.source, 0.0) + segment.seconds
        by_time = sorted(seconds.items(), key=lambda item: (-sum(item[1].values()), item[0]))
        return {
            kind: dict(sorted(own.items(), key=lambda i: (-i[1], i[0]))) for kind, own in by_time
        }

    def seconds_of(self, kind: PathKind, name: str) -> float:
        """Returns the seconds of segments of this kind and name."""
        return sum(s.seconds for s in self.segments if (s.kind, s.name) == (kind, name))

    def __str__(self) -> str:
        """In words, such as ``of 64 ms, 42 ms are compute (rank 2 42 ms), 22 ms are host ...``."""
        parts = [
            f"{in_time(sum(own.values()), self.time_unit)} are {_WORDS[kind][0]} "
            f"({_longest(own, self.time_unit)})"
            for kind, own in self.shares.items()
        ]
        return f"of {in_time(self.seconds, self.time_unit)}, " + ", ".join(
            parts or ["nothing is known"]
        )

    def to_json(self) -> dict[str, Any]:
        """Returns it as plain data."""
        return {
            "step": self.step,
            "seconds": self.seconds,
            "shares": self.shares,
            "segments": [segment._asdict() for segment in self.segments],
        }


def critical_path(lookup: Lookup, step: int) -> CriticalPath:
    """Returns the critical path of a step, for a simulated or a measured timeline.

    It is followed from the end of the step back to its begin: a rank computed because its earlier
    compute had ended, or it waited for a transfer or a reduction, which began because another rank
    had computed. Where spans are missing, the path stays on its rank.

    Args:
        lookup: The timeline.
        step: Number of the step, from 0.
    """
    segments = tuple(reversed(_Walk(lookup, step).segments))
    return CriticalPath(step, segments, lookup.timeline.time_unit)


class _Walk:
    """Follows a critical path back in time. `rank` and `now` are its position."""

    def __init__(self, lookup: Lookup, step: int) -> None:
        self._lookup = lookup
        self._begin, self.now = lookup.timeline.step(step)
        self.segments = list[Segment]()
        self.rank = self._last_rank()
        self._run()

    def _run(self) -> None:
        # Every turn takes time from the path or goes to another rank. A rank that was visited since
        # the path last took time is not entered twice, because the path must end.
        visited = set[int]()
        while self.now > self._begin:
            since = self.now
            piece = self._lookup.before(self.rank, self.now)
            if piece is None:
                self._take("other", self._begin)
            elif piece.span is None or piece.span.kind not in WAITS:
                kind, name = _kind_and_name(piece.span)
                self._take(kind, piece.begin, name)
            elif self.rank in visited or not self._follow(piece, piece.span):
                kind = "meeting" if piece.span.kind == "wait for ranks" else "wait"
                self._take(kind, piece.begin, piece.span.label)
            visited = visited | {self.rank} if self.now == since else set()

    def _take(
        self, kind: PathKind, begin: float, name: str = "", transfer: Span | None = None
    ) -> None:
        """Adds the segment from `begin` until now to the path, and goes back to its begin."""
        begin = max(begin, self._begin)
        if begin < self.now:
            rank, peer = (transfer.rank, transfer.peer) if transfer else (self.rank, -1)
            self.segments.append(Segment(kind, begin, self.now, rank, peer, name))
            self.now = begin

    def _follow(self, piece: Piece, wait: Span) -> bool:
        """Goes to the cause that ended a wait; True if it is known."""
        if wait.kind in ("wait for receive", "wait for send"):
            return self._follow_transfer(piece, wait)
        if wait.kind == "wait for ranks":
            last = self._last_rank()
            if last == self.rank:  # no other rank is late
                return False
            self.rank = last
            return True
        return self._follow_collective(wait)

    # Transfers.

    def _follow_transfer(self, piece: Piece, wait: Span) -> bool:
        transfer = self._lookup.transfer_of(wait)
        # If it had arrived before, something else ended the wait.
        if transfer is None or transfer.end <= piece.begin:
            return False
        self._take("wait", transfer.end, wait.label)
        while True:
            maker = self._lookup.maker(transfer)
            earlier = self._waited_for(transfer, maker)
            if earlier is None:
                break
            self._take("transfer", earlier.end, transfer.label, transfer)
            transfer = earlier
        self._go_to_begin(transfer, maker)
        return True

    def _waited_for(self, transfer: Span, maker: Span | None) -> Span | None:
        """Returns the transfer on the same edge whose end let this one begin."""
        earlier = self._lookup.transfer_before(transfer)
        if earlier is None or not transfer.begin - self._lookup.tolerance <= earlier.end < self.now:
            return None
        ready = maker is not None and maker.end >= transfer.begin - self._lookup.tolerance
        return None if ready and self._lookup.is_predicted else earlier

    def _go_to_begin(self, transfer: Span, maker: Span | None) -> None:
        """Goes to the cause of a transfer: its value was made, or its receive was posted."""
        tolerance = self._lookup.tolerance
        late = maker is None or maker.end < transfer.begin - tolerance
        receiver = self._lookup.before(transfer.peer, transfer.begin)
        if late and receiver and abs(receiver.end - transfer.begin) <= tolerance:
            begin, rank = transfer.begin, transfer.peer
        else:
            begin, rank = maker.end if maker else transfer.begin, transfer.rank
        self._take("transfer", begin, transfer.label, transfer)
        self.rank = rank

    # Reductions and parameter syncs.

    def _follow_collective(self, wait: Span) -> bool:
        spans = self._lookup.beside(wait, by=self.now)
        begun = [s for s in spans if s.begin < self.now]
        if not begun:
            return False
        last = max(begun, key=attrgetter("begin"))
        kind: PathKind = "reduction" if wait.kind == "wait for reduction" else "parameter sync"
        self._take(kind, last.begin, name_of(last))
        self.rank = last.rank
        return True

    # Ranks.

    def _last_rank(self) -> int:
        """Returns the rank that was busy last."""
        ranks = range(self._lookup.timeline.num_ranks)
        return max(ranks, key=lambda rank: (self._busy_until(rank), -rank), default=0)

    def _busy_until(self, rank: int) -> float:
        piece = self._lookup.before(rank, self.now)
        while piece is not None and (piece.span is None or piece.span.kind == "wait for ranks"):
            if piece.begin <= self._begin:
                return self._begin
            piece = self._lookup.before(rank, piece.begin)
        return min(piece.end, self.now) if piece is not None else self._begin


def _kind_and_name(span: Span | None) -> tuple[PathKind, str]:
    if span is None:
        return "other", ""
    if span.kind in COMPUTE:
        return "compute", span.action
    return ("optimizer", "") if span.kind == "optimizer" else ("host", span.label)


def _longest(seconds: Mapping[str, float], time_unit: TimeUnit) -> str:
    longest = list(seconds.items())[:_MOST_WORDS]
    shown = [f"{source} {in_time(own, time_unit)}" for source, own in longest]
    more = len(seconds) - len(shown)
    return ", ".join([*shown, f"{more} more"] if more else shown)
