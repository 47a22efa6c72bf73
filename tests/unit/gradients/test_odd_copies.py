"""Which copy is the odd one, by checksums alone; and in which steps copies are compared."""

from __future__ import annotations

import pytest

from pipegrad.gradients.drift import Facts, is_compared, odd_copies

NAME = ("0.w", False)


def facts(sums: str, *groups: tuple[int, ...]) -> dict[int, Facts]:
    """Returns those of ranks 0, 1, ...: a letter is a checksum, a dot a rank without a copy."""
    return {
        rank: ((ord(letter),), tuple(g for g in groups if rank in g))
        for rank, letter in enumerate(sums)
        if letter != "."
    }


@pytest.mark.parametrize(
    ("sums", "text"),
    [
        ("aaba", "'0.w' on ranks [2], of the copies on ranks [0, 1, 2, 3]"),
        ("baaa", "'0.w' on ranks [0], of the copies on ranks [0, 1, 2, 3]"),
        ("abac", "'0.w' over ranks [0, 1, 2, 3]"),
        ("aabb", "'0.w' over ranks [0, 1, 2, 3]"),
        ("abcd", "'0.w' over ranks [0, 1, 2, 3]"),
        (".ab.", "'0.w' over ranks [1, 2]"),
    ],
)
def test_odd_ones_are_named_if_most_copies_are_equal(sums: str, text: str) -> None:
    assert list(odd_copies(NAME, facts(sums, (0, 1, 2, 3)))) == [text]


def test_copies_are_linked_by_several_reductions() -> None:
    """A tie over ranks (0, 2) and (1, 3), whose holders have replicas on (0, 1) and (2, 3)."""
    found = odd_copies(NAME, facts("aaab", (0, 2), (1, 3), (0, 1), (2, 3)))
    assert list(found) == ["'0.w' on ranks [3], of the copies on ranks [0, 1, 2, 3]"]


def test_sets_of_copies_are_judged_apart() -> None:
    found = odd_copies(("0.w", True), facts("abcccd", (0, 1), (2, 3, 4, 5)))
    assert list(found) == [
        "the master copy of '0.w' over ranks [0, 1]",
        "the master copy of '0.w' on ranks [5], of the copies on ranks [2, 3, 4, 5]",
    ]
    # Equal ones are not odd.
    assert list(odd_copies(NAME, facts("aaaa", (0, 1, 2, 3)))) == []
    assert list(odd_copies(NAME, facts("aabb", (0, 1), (2, 3)))) == []  # parts of a parameter


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
