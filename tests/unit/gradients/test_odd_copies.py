"""Which copy is the odd one, by checksums alone; and in which steps copies are compared."""

from __future__ import annotations

import pytest

from pipegrad.gradients.drift.drift import is_compared
from pipegrad.gradients.drift.odd_copies import Facts, OddCopies, find_odd

NAME = ("0.w", False)


def facts(sums: str, *groups: tuple[int, ...]) -> dict[int, Facts]:
    """Returns those of ranks 0, 1, ...: a letter is a checksum, a dot a rank without a copy."""
    return {
        rank: Facts((ord(letter),), tuple(g for g in groups if rank in g), 12)
        for rank, letter in enumerate(sums)
        if letter != "."
    }


@pytest.mark.parametrize(
    ("sums", "source", "odd", "text"),
    [
        ("aaba", 0, (2,), "'0.w' on ranks [2], of the copies on ranks [0, 1, 2, 3]"),
        ("baaa", 1, (0,), "'0.w' on ranks [0], of the copies on ranks [0, 1, 2, 3]"),
        ("abac", 0, (1, 3), "'0.w' over ranks [0, 1, 2, 3]"),
        ("aabb", 0, (2, 3), "'0.w' over ranks [0, 1, 2, 3]"),
        ("bbaa", 0, (2, 3), "'0.w' over ranks [0, 1, 2, 3]"),
        ("abcd", 0, (1, 2, 3), "'0.w' over ranks [0, 1, 2, 3]"),
        (".ab.", 1, (2,), "'0.w' over ranks [1, 2]"),
    ],
)
def test_most_copies_count_or_the_lowest_rank(
    sums: str, source: int, odd: tuple[int, ...], text: str
) -> None:
    ranks = tuple(rank for rank, letter in enumerate(sums) if letter != ".")
    found = find_odd(NAME, facts(sums, (0, 1, 2, 3)))
    assert found == [OddCopies(NAME, ranks, source, odd, text.startswith("'0.w' on"), 12)]
    assert str(found[0]) == text


def test_copies_are_linked_by_several_reductions() -> None:
    """A tie over ranks (0, 2) and (1, 3), whose holders have replicas on (0, 1) and (2, 3)."""
    groups = (0, 2), (1, 3), (0, 1), (2, 3)
    [found] = find_odd(NAME, facts("aaab", *groups))
    assert (found.ranks, found.source, found.odd) == ((0, 1, 2, 3), 0, (3,))


def test_sets_of_copies_are_judged_apart() -> None:
    found = find_odd(NAME, facts("abcccd", (0, 1), (2, 3, 4, 5)))
    assert [(each.source, each.odd) for each in found] == [(0, (1,)), (2, (5,))]
    assert str(found[1]) == "'0.w' on ranks [5], of the copies on ranks [2, 3, 4, 5]"
    [master] = find_odd(("0.w", True), facts("ab", (0, 1)))
    assert master.remedy == "the master copy of '0.w' over ranks [0, 1], now as on rank 0"
    # Equal ones are not odd.
    assert find_odd(NAME, facts("aaaa", (0, 1, 2, 3))) == []
    assert find_odd(NAME, facts("aabb", (0, 1), (2, 3))) == []  # parts of a parameter


@pytest.mark.parametrize(
    ("every", "steps"),
    [
        (0, []),
        (1, [*range(1, 41)]),
        (3, [2, *range(3, 41, 3)]),
        (10, [2, 4, 8, 10, 20, 30, 40]),
        (100, [2, 4, 8, 16, 32]),
    ],
)
def test_comparisons_are_frequent_first_and_regular_then(every: int, steps: list[int]) -> None:
    assert [number for number in range(1, 41) if is_compared(number, every)] == steps
