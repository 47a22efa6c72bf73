"""measure_hops: each hop's own time, the same on all ranks."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from pipegrad import Topology, Work
from pipegrad.comm import sync_points
from pipegrad.pipeline.measure import measure_hops
from tests.support.ranked import gathered

SLOW_SECONDS = 0.2


class SlowHop(sync_points.Backend):
    """A network whose second hop takes long, both ways; messages carry their hop's number."""

    def send(self, group: dist.ProcessGroup, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        if tag == 1:
            time.sleep(SLOW_SECONDS)
        return super().send(group, tensor, peer, tag)


@pytest.mark.ranks(3)
def test_each_hop_is_measured_by_itself_and_told_to_all() -> None:
    with sync_points.using(SlowHop()):
        found = measure_hops(Topology.create(pipeline=3), num_bytes=2**16, repeats=3)
    assert gathered(found) == [found] * 3
    fast, slow = found
    assert 0 < fast < SLOW_SECONDS <= slow


@pytest.mark.ranks(2)
def test_a_pipeline_of_one_rank_has_no_hops() -> None:
    assert measure_hops(Topology.create(pipeline=1), num_bytes=4) == ()
