"""Connections that are cut free whoever waits for them, also if a neighbour has ended before."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from pipegrad.comm.ending import cut


@pytest.mark.ranks(3)
def test_a_wait_for_one_rank_ends_although_the_next_rank_has_ended() -> None:
    """A receive from a rank that has ended fails at once: it closed no other connection."""
    group = dist.new_group()
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
