"""measure_hops: how long a message takes from each rank of a pipeline to the next."""

from __future__ import annotations

import statistics
import time
from functools import partial

import torch

from pipegrad.comm import sync_points
from pipegrad.comm.agreement import agree
from pipegrad.pipeline.edges import Edges
from pipegrad.pipeline.transfers import RECEIVED, SENT
from pipegrad.schedules.program.program import Channel
from pipegrad.topology import Topology

_WAIT_SECONDS = 600.0  # for one hop


def measure_hops(
    topology: Topology, *, num_bytes: int, repeats: int = 11, device: torch.device | str = "cpu"
) -> tuple[float, ...]:
    """Returns how long a message takes from each rank of the pipeline to the next, in seconds.

    The schedule ``hop-aware-1f1b`` takes it as ``hop_seconds``. Hops are measured one after the
    other. A hop takes half of the time of a message there and back: the median of `repeats`, and
    the slowest of all pipelines. Every rank of the topology must call it. All get the same numbers.

    Args:
        topology: Ranks.
        num_bytes: Size of the value that a stage hands on for a microbatch.
        repeats: How often each hop is measured.
        device: Where the messages are.
    """
    device = torch.device(device)
    hops = range(topology.size(topology.pipeline) - 1)
    ways = [Channel(0, "F", a, b) for hop in hops for a, b in ((hop, hop + 1), (hop + 1, hop))]
    edges = Edges(ways, topology, device)
    me = topology.coordinate(topology.pipeline)
    seconds = list[float]()
    for hop in hops:
        measured = 0.0
        if me in (hop, hop + 1):
            measured = _ping(edges, me, hop, num_bytes=num_bytes, repeats=repeats, device=device)
        # All ranks agree behind each hop, so hops are measured one after the other.
        replies = agree(
            f"hop {hop}",
            partial(float, measured),
            ranks=topology.ranks,
            timeout_seconds=_WAIT_SECONDS,
        )
        seconds.append(max(replies))
    edges.close()
    return tuple(seconds)


def _ping(
    edges: Edges, me: int, hop: int, *, num_bytes: int, repeats: int, device: torch.device
) -> float:
    """Sends messages there and back; returns the median of half the time, on the rank before."""
    peer = 2 * hop + 1 - me
    (group_there, peer_there), (group_back, peer_back) = edges.to(peer), edges.of(peer)
    sent, received = (torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    times = []
    for _ in range(repeats + 1):  # the first one connects
        began = time.perf_counter()
        receiving = sync_points.in_use.receive(group_back, received, peer_back, hop)
        if me > hop:
            RECEIVED(receiving)
        sending = sync_points.in_use.send(group_there, sent, peer_there, hop)
        if me == hop:
            RECEIVED(receiving)
        SENT(sending)
        received[:1].tolist()  # the host waits for the device
        times.append((time.perf_counter() - began) / 2)
    return statistics.median(times[1:]) if me == hop else 0.0
