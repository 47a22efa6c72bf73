"""Lookup: finds the span of a rank at a time, and the cause of a wait, in a timeline."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator
from operator import attrgetter
from typing import NamedTuple

from pipegrad.simulation.timeline import BESIDE, COMPUTE, ON_RANK, Span, Timeline

# "At the same time" means this much in a measured timeline, because clocks of ranks are aligned to
# about this. A predicted one has rounding errors alone.
_MEASURED_TOLERANCE, _PREDICTED_TOLERANCE = 1e-4, 1e-9
# A host that does not have to wait may be so long about it: a wait that took longer was a wait.
_LEAST_WAIT_SECONDS = 2.5e-4
_MOST_BESIDE = 1000  # reductions of a rank that are searched for the one of a wait
_Key = tuple[int, int, int, int, int]
_END = attrgetter("end")


class Piece(NamedTuple):
    """A part of a rank's time; pieces do not overlap, and leave nothing out.

    Attributes:
        begin: Seconds from the start of the timeline.
        end: Likewise; above `begin`.
        span: The span of the rank; None if no span covers this time.
    """

    begin: float
    end: float
    span: Span | None

    @property
    def seconds(self) -> float:
        """Its duration."""
        return self.end - self.begin


class Lookup:
    """An index of a timeline. Spans that no rank can have had are left out.

    Attributes:
        timeline: The timeline.
        spans: The possible spans, in the order of their ends.
        is_predicted: True if it was simulated. A simulated transfer begins when the one before it
            has left. A measured one begins when it is handed to the backend, and may then wait.
        tolerance: Two times that differ by less, in seconds, are one time.
        pieces: The pieces of each rank, in order of time.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.is_predicted = timeline.source == "predicted"
        self.tolerance = _PREDICTED_TOLERANCE if self.is_predicted else _MEASURED_TOLERANCE
        least_wait_seconds = 0.0 if self.is_predicted else _LEAST_WAIT_SECONDS
        self._transfers: dict[_Key, Span] = {}
        self._awaited = set[_Key]()
        self._makers = defaultdict[tuple[int, int, int], list[Span]](list)
        self._edges = defaultdict[tuple[int, int], list[Span]](list)
        self._beside = defaultdict[tuple[str, int], list[Span]](list)
        self._beside_rank = defaultdict[tuple[str, int], list[Span]](list)
        possible = (s for s in timeline.spans if 0 <= s.rank < timeline.num_ranks)
        possible = (s for s in possible if -math.inf < s.begin <= s.end < math.inf)
        self.spans = sorted(possible, key=attrgetter("end", "begin"))
        own: list[list[Span]] = [[] for _ in range(timeline.num_ranks)]
        for span in self.spans:
            if span.kind in ON_RANK:
                own[span.rank].append(span)
            if span.kind in COMPUTE:
                self._makers[span.rank, span.microbatch, span.step].append(span)
            elif span.kind == "wait for receive" and span.seconds > least_wait_seconds:
                self._awaited.add(_key(span.peer, span.rank, span))
            elif span.kind == "transfer":
                self._transfers[_key(span.rank, span.peer, span)] = span
                self._edges[span.rank, span.peer].append(span)
            elif span.kind in BESIDE:
                self._beside[span.kind, span.step].append(span)
                self._beside_rank[span.kind, span.rank].append(span)
        self.pieces = [list(self._pieces(spans)) for spans in own]

    def _pieces(self, spans: list[Span]) -> Iterator[Piece]:
        now, last = 0.0, max(self.timeline.step_ends, default=0.0)
        for span in sorted(spans, key=attrgetter("begin", "end")):
            if span.begin > now:
                yield Piece(now, span.begin, None)
            if span.end > now:
                yield Piece(max(now, span.begin), span.end, span)
            now = max(now, span.end)
        if last > now:
            yield Piece(now, last, None)

    # Times.

    def between(self, rank: int, begin: float, end: float) -> Iterator[Piece]:
        """Yields the pieces of a rank between two times, cut at both."""
        if not 0 <= rank < self.timeline.num_ranks:
            return
        pieces = self.pieces[rank]
        for number in range(bisect_right(pieces, begin, key=_END), len(pieces)):
            piece = pieces[number]
            if piece.begin >= end:
                return
            yield Piece(max(piece.begin, begin), min(piece.end, end), piece.span)

    def before(self, rank: int, time: float) -> Piece | None:
        """Returns the piece of a rank right before a time; None if there is none."""
        if not 0 <= rank < self.timeline.num_ranks:
            return None
        # A piece that ended within the tolerance before `time` ended at it.
        pieces = self.pieces[rank]
        number = bisect_left(pieces, time - self.tolerance, key=_END)
        piece = pieces[min(number, len(pieces) - 1)] if pieces else None
        return piece if piece is not None and piece.begin < time else None

    def collectives(self, kind: str, step: int) -> list[list[Span]]:
        """Returns the reductions or parameter syncs of a step, each as its spans on its ranks.

        They are in the order in which they began.
        """
        groups = defaultdict[str, list[Span]](list)
        for span in self._beside[kind, step]:
            groups[name_of(span)].append(span)
        return sorted(groups.values(), key=lambda spans: min(span.begin for span in spans))

    def transfer_seconds(self, transfer: Span) -> float:
        """Returns the time of a transfer, without its wait for the one before it."""
        earlier = None if self.is_predicted else self.transfer_before(transfer)
        return transfer.end - (max(transfer.begin, earlier.end) if earlier else transfer.begin)

    # Spans that belong together.

    def transfer_of(self, wait: Span) -> Span | None:
        """Returns the transfer that a wait for a receive or a send is for."""
        ends = (wait.peer, wait.rank) if wait.kind == "wait for receive" else (wait.rank, wait.peer)
        return self._transfers.get(_key(*ends, wait))

    def maker(self, transfer: Span) -> Span | None:
        """Returns the compute that made the value of a transfer."""
        latest = transfer.begin + self.tolerance
        kinds = ("B", "I") if transfer.label.startswith("gradient") else ("F",)
        computes = self._makers.get((transfer.rank, transfer.microbatch, transfer.step), ())
        before = (s for s in computes if s.kind in kinds and s.end <= latest)
        if kinds == ("F",) and transfer.stage >= 0:
            before = (s for s in before if s.stage == transfer.stage)
        return max(before, key=attrgetter("end"), default=None)

    def transfer_before(self, transfer: Span) -> Span | None:
        """Returns the transfer of the same edge that arrived last before this one."""
        edge = transfer.rank, transfer.peer
        number = bisect_left(self._edges[edge], transfer.end, key=_END)
        earlier = self._edges[edge][max(0, number - 1) : number]
        return next(filter(self.has_end, earlier), None)

    def has_end(self, transfer: Span) -> bool:
        """Returns True if it is known when a transfer arrived.

        In a measured timeline, the arrival is recorded only if the receiver waited. Otherwise the
        transfer ends when the value was first needed.
        """
        return self.is_predicted or _key(transfer.rank, transfer.peer, transfer) in self._awaited

    def beside(self, wait: Span, *, by: float) -> list[Span]:
        """Returns the reduction or parameter sync that a wait is for: its span on each rank.

        Args:
            wait: A wait for a reduction or for parameters.
            by: When the wait ended.
        """
        kind = "reduction" if wait.kind == "wait for reduction" else "parameter sync"
        own = self._beside_rank.get((kind, wait.rank), [])
        # Do not compare steps, because a rank waits for the parameter sync of one step in the next.
        # The span of this rank that ended last before the wait did is the right one. A wait without
        # a name was for all spans under way, and therefore for the last of them.
        number = bisect_right(own, by + self.tolerance, key=attrgetter("end"))
        ended = own[max(0, number - _MOST_BESIDE) : number]
        named = [s for s in ended if name_of(s) == name_of(wait)]
        found = next(iter(named[-1:] or ended[-1:]), wait)
        all_ranks = self._beside[kind, found.step]
        return [span for span in all_ranks if name_of(span) == name_of(found)]


def _key(source: int, target: int, span: Span) -> _Key:
    """Returns the key that a transfer shares with the waits of its two ends."""
    return source, target, span.which, span.microbatch, span.step


def name_of(collective: Span) -> str:
    """Returns the name of a reduction or parameter sync, or of the one that a wait is for."""
    return collective.label or f"number {collective.which}"
