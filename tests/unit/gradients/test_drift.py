"""Checksums see every single bit of every dtype; and which copy is the odd one, by them alone."""

from __future__ import annotations

import pytest
import torch

from pipegrad.gradients.drift import (
    Facts,
    bytes_of,
    checksum,
    is_compared,
    odd_copies,
)

DTYPES = [
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.complex128, torch.float8_e4m3fn, torch.int8, torch.uint8, torch.int32, torch.int64),
]
SIZES = [1, 2, 3, 7, 8, 1023, 1025, 8192 + 3]


def random(numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Returns any bits, also of numbers that are none."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", SIZES)
def test_any_single_bit_changes_it(dtype: torch.dtype, numel: int) -> None:
    tensor = random(numel, dtype)
    raw, before = tensor.view(torch.uint8), checksum(tensor)
    step = 1 if len(raw) < 100 else 997  # bytes; of small tensors each one
    for at in range(0, len(raw), step):
        for bit in range(8):
            raw[at] ^= 1 << bit
            assert not torch.equal(checksum(tensor), before), (at, bit)
            raw[at] ^= 1 << bit
    assert torch.equal(checksum(tensor), before)


def test_it_sees_exchanged_blocks() -> None:
    blocks = random(8192, torch.float32)
    assert not torch.equal(checksum(blocks.view(2, 4096).flip(0)), checksum(blocks))
    # Of no elements and of one.
    assert checksum(torch.zeros(0)).tolist() == [0]
    assert checksum(torch.tensor(1, dtype=torch.int32)).tolist() == [1]
    assert bytes_of(torch.tensor(True)).tolist() == [1]


def test_it_is_of_the_values_and_not_of_their_place() -> None:
    tensor = random(3000, torch.float32)
    whole = torch.zeros(3001)
    whole[1:] = tensor  # no word of 8 bytes begins where it does
    assert torch.equal(checksum(whole[1:]), checksum(tensor))
    square = tensor.view(50, 60)
    assert torch.equal(checksum(square.t().contiguous().t()), checksum(tensor))
    assert torch.equal(checksum(square), checksum(tensor))


def test_an_element_exchanged_with_one_behind_the_last_block_is_seen() -> None:
    words = torch.zeros(1024 + 1, dtype=torch.int64)
    words[0] = 2**62
    assert not torch.equal(checksum(words), checksum(words.flip(0)))


NAME = ("0.w", False)


def facts(sums: str, *groups: tuple[int, ...]) -> dict[int, Facts]:
    """Returns those of ranks 0, 1, ...: a letter is a checksum, a dot a rank without a copy."""
    return {
        rank: (ord(letter), tuple(g for g in groups if rank in g))
        for rank, letter in enumerate(sums)
        if letter != "."
    }


@pytest.mark.parametrize(
    ("sums", "text"),
    [
        ("aaba", "'0.w' on ranks [2], of the copies on ranks [0, 1, 2, 3]"),
        ("baaa", "'0.w' on ranks [0], of the copies on ranks [0, 1, 2, 3]"),
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
