"""Collectives of parts of any sizes, and connections that are cut while somebody waits for them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from pipegrad.comm import collectives
from pipegrad.comm.ending import cut


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


@pytest.mark.ranks(3)
def test_a_wait_for_one_rank_ends_although_the_next_rank_has_ended() -> None:
    """A receive from a rank that has ended fails at once: it closed no other connection."""
    group = dist.new_group()
    dist.barrier()  # a rank that still connects would fail
    if dist.get_rank() == 1:
        cut(group)  # for the others as if it had ended
    dist.barrier()
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match="closed"):
            dist.recv(torch.empty(1), 1, group)
        waits = dist.irecv(torch.empty(1), 2, group)
        assert waits is not None
        cut(group)
        with pytest.raises(RuntimeError, match="closure"):
            waits.wait()
    dist.barrier()
    dist.destroy_process_group(group)
