"""Reduce-scatter and all-gather of parts of any sizes, by messages and by torch's collectives."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from pipegrad.comm import collectives, messages, shard_sums
from pipegrad.testing import run_ranks

SIZES = [(4, 4, 4), (5, 1, 7), (0, 6, 3), (9, 0, 0), (0, 0, 0)]
DTYPES = [torch.float32, torch.complex64]
PIECE_BYTES = 8  # a float of complex64, two of float32: most parts are sent in several pieces


def values(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    made = torch.arange(float(size)) + 100 * rank
    return made.to(dtype) * (1 - 2j) if dtype.is_complex else made


def scatter_and_gather(by_messages: bool) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    me = dist.get_rank()
    with (
        mock.patch.object(shard_sums, "_PIECE_BYTES", PIECE_BYTES),
        mock.patch.object(messages, "is_gloo", return_value=by_messages),
    ):
        for sizes in SIZES if by_messages else SIZES[1:]:
            for dtype in DTYPES:
                flat = values(me, sum(sizes), dtype)
                shards, flags = flat.split(list(sizes)), torch.tensor([1.0, float(me)])
                collectives.reduce_scatter(shards[me], shards, None, common=flags)
                own = shards[me].clone()
                gathered = torch.zeros(sum(sizes), dtype=dtype).split(list(sizes))
                gathered[me].copy_(own)
                collectives.all_gather(gathered, None)
                found[sizes, dtype] = own, flags.tolist(), torch.cat(gathered)
    return found


@pytest.mark.parametrize("by_messages", [True, False])
def test_parts_may_have_any_size(by_messages: bool) -> None:
    replies = run_ranks(scatter_and_gather, 3, by_messages)
    for sizes, dtype in replies[0]:
        whole = sum(values(rank, sum(sizes), dtype) for rank in range(3))
        assert isinstance(whole, torch.Tensor)
        for part, reply in zip(whole.split(list(sizes)), replies, strict=True):
            own, flags, gathered = reply[sizes, dtype]
            assert torch.equal(own, part)
            assert torch.equal(gathered, whole)
            assert flags == [3.0, 3.0]
