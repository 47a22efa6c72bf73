"""Checksums see every single bit of every dtype, and the full one sees exchanged elements."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipegrad.gradients.drift import bytes_of, checksum, full_checksum

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


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 20_000), st.data())
def test_any_single_bit_of_any_size(numel: int, data: st.DataObject) -> None:
    tensor = random(numel, torch.float32)
    before = checksum(tensor)
    word = tensor.view(torch.int32)
    word[data.draw(st.integers(0, numel - 1))] ^= 1 << data.draw(st.integers(0, 30))
    assert not torch.equal(checksum(tensor), before)


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 400_000), st.sampled_from(DTYPES[:4]), st.data())
def test_the_full_one_sees_exchanged_elements(
    numel: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    tensor = random(numel, dtype)
    raw = tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    one, other = (data.draw(st.integers(0, numel - 1)) for _ in range(2))
    before, differs = full_checksum(tensor), bool(raw[one] != raw[other])
    raw[[one, other]] = raw[[other, one]]
    assert torch.equal(full_checksum(tensor), before) != differs


def test_the_full_one_sees_exchanged_signs_and_the_cheap_one_exchanged_blocks() -> None:
    """The highest bit times an even difference of positions is a multiple of 2^64."""
    tensor = torch.ones(4096, dtype=torch.float64)
    tensor[7] = -1.0
    before = full_checksum(tensor)
    tensor[[7, 9]] = tensor[[9, 7]]
    assert torch.equal(checksum(tensor), before[:1])  # in one block, so the cheap one does not
    assert not torch.equal(full_checksum(tensor), before)
    blocks = random(8192, torch.float32)
    assert not torch.equal(checksum(blocks.view(2, 4096).flip(0)), checksum(blocks))
    # Of no elements and of one.
    assert checksum(torch.zeros(0)).tolist() == [0]
    assert full_checksum(torch.zeros(0, 3)).tolist() == [0, 0, 0]
    assert checksum(torch.tensor(1, dtype=torch.int32)).tolist() == [1]
    assert bytes_of(torch.tensor(True)).tolist() == [1]


@pytest.mark.parametrize("sums", [checksum, full_checksum])
def test_it_is_of_the_values_and_not_of_their_place(sums: object) -> None:
    assert callable(sums)
    tensor = random(3000, torch.float32)
    whole = torch.zeros(3001)
    whole[1:] = tensor  # no word of 8 bytes begins where it does
    assert torch.equal(sums(whole[1:]), sums(tensor))
    square = tensor.view(50, 60)
    assert torch.equal(sums(square.t().contiguous().t()), sums(tensor))
    assert torch.equal(sums(square), sums(tensor))
