"""Reduce-scatter and all-gather of parts of any sizes, by messages and by torch's collectives."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from pipegrad.comm import collectives


def values(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    made = torch.arange(float(size)) + 100 * rank
    return made.to(dtype) * (1 - 2j) if dtype.is_complex else made


@pytest.mark.ranks(3)
@pytest.mark.parametrize("by_messages", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_parts_may_have_any_size(
    by_messages: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A float of complex64, two of float32: most parts are sent in several pieces.
    monkeypatch.setattr(collectives, "_PIECE_BYTES", 8)
    monkeypatch.setattr(collectives, "is_gloo", lambda *_: by_messages)
    me = dist.get_rank()
    equal = [(4, 4, 4)] if by_messages else []
    for sizes in (*equal, (5, 1, 7), (0, 6, 3), (9, 0, 0), (0, 0, 0)):
        flats = [values(rank, sum(sizes), dtype) for rank in range(3)]
        whole = flats[0] + flats[1] + flats[2]
        shards, flags = flats[me].split(list(sizes)), torch.tensor([1.0, float(me)])
        collectives.reduce_scatter(shards[me], shards, None, common=flags)
        assert torch.equal(shards[me], whole.split(list(sizes))[me])
        assert flags.tolist() == [3.0, 3.0]
        gathered = torch.zeros(sum(sizes), dtype=dtype).split(list(sizes))
        gathered[me].copy_(shards[me])
        collectives.all_gather(gathered, None)
        assert torch.equal(torch.cat(gathered), whole)
