"""Happens-before: whether two accesses to one memory are ordered, decided by vector clocks.

A strand runs operations one after the other: a stream, a thread, or a communicator. Its clock has
the number of its newest operation. For every other strand it has the newest operation that is known
to have ended before. Source: Mattern, Virtual Time and Global States of Distributed Systems (1989),
section 5. The choice of accesses to keep follows Flanagan and Freund, FastTrack (2009), with byte
ranges instead of variables.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

Clock = Mapping[str, int]
Span = tuple[int, int]


class Kind(Enum):
    """The effect of an access on the bytes."""

    READ = "read"
    WRITE = "write"
    FREE = "free"


@dataclass(frozen=True)
class Access:
    """An access of one strand to bytes of one memory.

    Attributes:
        strand: The strand.
        tick: Number of the operation on its strand, from 1.
        kind: Read, write or free.
        what: The operator or collective.
        where: The call site.
        memory: Name of the memory.
        spans: Byte ranges ``(start, end)`` in the memory.
        held: True if only pipegrad keeps the memory alive until the access has ended.
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
    """Two accesses to the same bytes that nothing orders. At least one writes or frees.

    Attributes:
        first: The access that was issued first.
        second: The access that was issued later.
        span: The first byte range that both touch.
        known: The newest tick of the first strand for which the second strand had waited.
    """

    first: Access
    second: Access
    span: Span
    known: int

    @property
    def hazard(self) -> str:
        """The usual name of what may go wrong."""
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
    """The clocks of all strands, and the accesses that may still race with later accesses."""

    def __init__(self) -> None:
        self._clocks: defaultdict[str, dict[str, int]] = defaultdict(dict)
        self._accesses: defaultdict[str, list[Access]] = defaultdict(list)

    def clock(self, strand: str) -> Clock:
        """Returns the clock of `strand`. An event that is recorded on it now has this clock."""
        return dict(self._clocks[strand])

    def latest(self) -> Clock:
        """Returns the newest tick of every strand."""
        return {strand: clock.get(strand, 0) for strand, clock in self._clocks.items()}

    def join(self, strand: str, clock: Clock) -> None:
        """Orders all later operations of `strand` after the operations in `clock`."""
        present = self._clocks[strand]
        for other, tick in clock.items():
            # A comparison, and no call, because a step joins as many strands as it has messages.
            if tick > present.get(other, 0):
                present[other] = tick

    def tick(self, strand: str) -> int:
        """Begins the next operation of `strand` and returns its number, from 1."""
        clock = self._clocks[strand]
        clock[strand] = clock.get(strand, 0) + 1
        return clock[strand]

    def access(self, new: Access) -> list[Violation]:
        """Adds an access of the current operation of its strand; returns its violations."""
        # Only accesses that may race with a later access stay, because memory and time must grow
        # with the number of strands and byte ranges, not with the number of operations.
        known = self._clocks[new.strand]
        earlier = self._accesses[new.memory]
        violations: list[Violation] = []
        remaining: list[Access] = []
        for old in earlier:
            seen = known.get(old.strand, 0)
            # A free cannot be too early if torch itself keeps the memory alive until the access has
            # ended.
            is_free = new.kind is Kind.FREE
            conflicts = old.held if is_free else Kind.WRITE in (old.kind, new.kind)
            shared = _overlap(old.spans, new.spans)
            if shared is not None and conflicts and seen < old.tick:
                violations.append(Violation(old, new, shared, seen))
            if not (seen >= old.tick and _replaces(new, old)):
                remaining.append(old)
        self._accesses[new.memory] = [*remaining, new]
        if new.kind is Kind.FREE:
            del self._accesses[new.memory]
        return violations


def _replaces(new: Access, old: Access) -> bool:
    """True if every access that would race with `old` also races with `new`, ordered after it."""
    # An access that is not held cannot replace a held one, because a free races only with held
    # accesses.
    if old.held and not new.held:
        return False
    stronger = new.kind is not Kind.READ or (old.kind is Kind.READ and old.strand == new.strand)
    # Several ranges that cover together do not count. A wrong False keeps an access longer than
    # needed. A wrong True would lose a violation.
    low, high = old.spans[0][0], old.spans[-1][1]
    return stronger and any(start <= low and high <= end for start, end in new.spans)


def _overlap(a: Sequence[Span], b: Sequence[Span]) -> Span | None:
    """Returns the first common byte range of two ascending lists."""
    # One pass is enough, because both lists are sorted. Tensors with strides may have many ranges.
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
