"""Happens-before: whether two accesses to one memory are ordered, decided by vector clocks.

A strand is whatever runs one thing after another: a stream, a thread, a communicator. Its clock
says how far it has got, and how far it knows every other strand to have got. Source: Mattern,
Virtual Time and Global States of Distributed Systems (1989), section 5; which accesses are kept is
after Flanagan and Freund, FastTrack (2009), with byte ranges instead of variables.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

Clock = Mapping[str, int]
Span = tuple[int, int]


class Kind(Enum):
    """What an access does to the bytes."""

    READ = "read"
    WRITE = "write"
    FREE = "free"


@dataclass(frozen=True)
class Access:
    """One strand touches bytes of one memory.

    Attributes:
        strand: Who.
        tick: Its how manieth operation this is.
        kind: What it does.
        what: The operator or collective.
        where: The call site.
        memory: Which memory.
        spans: Byte ranges ``(start, end)`` in it.
        held: Whether nobody but us keeps the memory from being freed meanwhile.
    """

    strand: str
    tick: int
    kind: Kind
    what: str
    where: str
    memory: str
    spans: tuple[Span, ...]
    held: bool = True

    def __str__(self) -> str:
        return f"{self.what} ({self.kind.value}) on {self.strand!r}, {self.where}"


@dataclass(frozen=True)
class Violation:
    """Two accesses that nothing orders, at least one of which changes what the other sees.

    Attributes:
        first: The access that was issued first.
        second: The other one.
        span: The first byte range that both touch.
        known: Up to which of the first strand's ticks the second strand had waited.
    """

    first: Access
    second: Access
    span: Span
    known: int

    @property
    def hazard(self) -> str:
        """What may go wrong, in the usual words."""
        if self.second.kind is Kind.FREE:
            return "freed and used again while in flight"
        return f"{self.second.kind.value} not ordered after {self.first.kind.value}"

    def __str__(self) -> str:
        first, second, (start, end) = self.first, self.second, self.span
        return (
            f"{self.hazard}: bytes {start} to {end} of {first.memory}\n"
            f"  first:   {first}\n"
            f"  second:  {second}\n"
            f"  missing: {second.strand!r} must wait for an event that {first.strand!r} records "
            f"after the first access (its operation {first.tick}); it has waited for "
            + (f"operation {self.known} at most" if self.known else "nothing there")
        )


class HappensBefore:
    """The clocks of all strands, and the accesses that may still race with a later one."""

    def __init__(self) -> None:
        self._clocks: defaultdict[str, dict[str, int]] = defaultdict(dict)
        self._accesses: defaultdict[str, list[Access]] = defaultdict(list)

    def clock(self, strand: str) -> Clock:
        """Returns what `strand` knows now: what an event recorded on it carries."""
        return dict(self._clocks[strand])

    def latest(self) -> Clock:
        """Returns how far every strand has got."""
        return {strand: mine.get(strand, 0) for strand, mine in self._clocks.items()}

    def join(self, strand: str, clock: Clock) -> None:
        """Orders all that `strand` does from now on behind what `clock` knows."""
        mine = self._clocks[strand]
        for other, tick in clock.items():
            mine[other] = max(tick, mine.get(other, 0))

    def tick(self, strand: str) -> int:
        """Begins the next operation of `strand` and returns its number, from 1."""
        mine = self._clocks[strand]
        mine[strand] = mine.get(strand, 0) + 1
        return mine[strand]

    def access(self, new: Access) -> list[Violation]:
        """Takes an access of the operation that its strand is in; returns what it races with."""
        known = self._clocks[new.strand]
        earlier = self._accesses[new.memory]
        found: list[Violation] = []
        kept: list[Access] = []
        for old in earlier:
            shared = _overlap(old.spans, new.spans)
            seen = known.get(old.strand, 0)
            if shared is not None and _conflict(old, new) and seen < old.tick:
                found.append(Violation(old, new, shared, seen))
            if not (seen >= old.tick and _replaces(new, old)):
                kept.append(old)
        self._accesses[new.memory] = [*kept, new]
        if new.kind is Kind.FREE:
            del self._accesses[new.memory]
        return found


def _conflict(old: Access, new: Access) -> bool:
    if new.kind is Kind.FREE:
        return old.held
    return Kind.WRITE in (old.kind, new.kind)


def _replaces(new: Access, old: Access) -> bool:
    """Whether all that would race with `old` races with `new`, which is ordered behind it."""
    if old.held and not new.held:
        return False
    stronger = new.kind is not Kind.READ or (old.kind is Kind.READ and old.strand == new.strand)
    return stronger and _covers(new.spans, old.spans)


def _overlap(a: Sequence[Span], b: Sequence[Span]) -> Span | None:
    """Returns the first common byte range of two ascending lists."""
    i = j = 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            return start, end
        if a[i][1] <= b[j][1]:
            i += 1
        else:
            j += 1
    return None


def _covers(outer: Sequence[Span], inner: Sequence[Span]) -> bool:
    """Whether one range of `outer` holds all of `inner`; False if that is not plain to see."""
    low, high = inner[0][0], inner[-1][1]
    return any(start <= low and high <= end for start, end in outer)
