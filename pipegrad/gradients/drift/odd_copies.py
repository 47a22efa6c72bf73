"""Odd copies: which of the copies of a parameter are right, by their checksums. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Facts:
    """What one rank says of its copy.

    Attributes:
        sums: Its checksum.
        groups: Ranks of each reduction along which copies are equal.
        nbytes: Its size.
    """

    sums: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    nbytes: int


@dataclass(frozen=True)
class OddCopies:
    """Copies of one parameter that must be equal, and are not.

    Attributes:
        name: Key of the parameter, and whether these are its master copies.
        ranks: Which hold a copy.
        source: The lowest rank whose copy is like most others, or the lowest rank of all.
        odd: Ranks whose copy is not like that of `source`.
        has_majority: Whether most copies are like that of `source`.
        nbytes: Of each copy.
    """

    name: tuple[str, bool]
    ranks: tuple[int, ...]
    source: int
    odd: tuple[int, ...]
    has_majority: bool
    nbytes: int

    def __str__(self) -> str:
        key, is_main = self.name
        what = f"the master copy of {key!r}" if is_main else repr(key)
        if not self.has_majority:
            return f"{what} over ranks {list(self.ranks)}"
        return f"{what} on ranks {list(self.odd)}, of the copies on ranks {list(self.ranks)}"

    @property
    def remedy(self) -> str:
        """What was done about them, in words."""
        return f"{self}, now as on rank {self.source}"


def find_odd(name: tuple[str, bool], facts: Mapping[int, Facts]) -> list[OddCopies]:
    """Returns the sets of copies that differ: one for each set of ranks that must be equal.

    Args:
        name: As that of `OddCopies`.
        facts: Of each rank that has a copy.
    """
    found = []
    for ranks in _connected(facts):
        counts = Counter(facts[rank].sums for rank in ranks)
        if len(counts) < 2:
            continue
        # `most_common` keeps the order of ranks where counts are equal.
        [(sums, number)] = counts.most_common(1)
        found.append(
            OddCopies(
                name,
                ranks,
                source=next(rank for rank in ranks if facts[rank].sums == sums),
                odd=tuple(rank for rank in ranks if facts[rank].sums != sums),
                has_majority=2 * number > len(ranks),
                nbytes=facts[ranks[0]].nbytes,
            )
        )
    return found


def _connected(facts: Mapping[int, Facts]) -> Iterable[tuple[int, ...]]:
    """Yields the ranks that are linked by any groups, each set once and ascending."""
    # A tied parameter of replicas is equal over the holders of the tie, and over the replicas. No
    # single group has all of its copies.
    remaining = sorted(facts)
    while remaining:
        linked, new = set[int](), {remaining[0]}
        while new:
            linked |= new
            groups = [group for rank in new for group in facts[rank].groups]
            new = {rank for group in groups for rank in group if rank in facts} - linked
        yield tuple(sorted(linked))
        remaining = [rank for rank in remaining if rank not in linked]
