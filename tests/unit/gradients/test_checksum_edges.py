"""Exchanges that cancel in a plain sum are seen: of several signs, and behind the last block."""

from __future__ import annotations

import torch

from pipegrad.gradients.drift import checksum, full_checksum


def test_signs_that_are_exchanged_in_two_pairs_are_seen_by_the_full_one() -> None:
    values = torch.rand(64, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.5
    values[::2] *= -1.0
    before, unseen = full_checksum(values), []
    for first in range(0, 32, 2):
        for second in range(first + 3, 62, 2):  # the other way round
            exchanged = values.clone()
            exchanged[[first, first + 1, second, second + 1]] *= -1.0
            assert torch.equal(checksum(exchanged), before[:1])  # four highest bits are a 2^65
            if torch.equal(full_checksum(exchanged), before):
                unseen.append((first, second))
    assert unseen == []


def test_an_element_exchanged_with_one_behind_the_last_block_is_seen() -> None:
    words = torch.zeros(1024 + 1, dtype=torch.int64)
    words[0] = 2**62
    assert not torch.equal(checksum(words), checksum(words.flip(0)))
