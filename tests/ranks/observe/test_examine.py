"""The doctor between real ranks: slow links and other clocks, found alike by all."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from pipegrad import Work
from pipegrad.comm import sync_points
from pipegrad.observe import links, recording
from pipegrad.observe.doctor import examine
from tests.support.gradients.cases import rank
from tests.support.ranked import gathered

SLOW_RATE = 4e6  # bytes in a second
AHEAD_SECONDS = 1000.0
CPU = torch.device("cpu")


class SlowLink(sync_points.Backend):
    """A network whose link from rank 1 to rank 2 is slow."""

    def send(self, group: dist.ProcessGroup, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        if (rank(), peer) == (1, 2):
            time.sleep(tensor.nbytes / SLOW_RATE)
        return super().send(group, tensor, peer, tag)


class Clock:
    """The clock of another machine on rank 2."""

    def perf_counter(self) -> float:
        return time.perf_counter() + (AHEAD_SECONDS if rank() == 2 else 0.0)


@pytest.mark.ranks(3)
def test_all_ranks_find_the_same_of_links_and_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "time", Clock())
    monkeypatch.setattr(links, "SIZES", (2**19,))
    with sync_points.using(SlowLink()):
        found = examine(CPU)
    assert gathered(found) == [found] * 3
    assert [facts.rank for facts in found.ranks] == [0, 1, 2]
    assert {facts.backend for facts in found.ranks} == {"gloo"}
    # The slow link is slow in its direction alone.
    rates = {(x.source, x.target): x.bytes_per_second for x in found.links}
    assert list(rates) == [(a, b) for a in range(3) for b in range(3) if a != b]
    assert min(rates, key=lambda pair: rates[pair]) == (1, 2)
    assert rates[1, 2] <= 1.05 * SLOW_RATE
    # The clock of another machine is known to its error.
    _, near, far = found.clocks
    assert abs(near.offset) <= near.error
    assert abs(far.offset + AHEAD_SECONDS) <= far.error < AHEAD_SECONDS
