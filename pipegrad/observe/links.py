"""Links: measures the time of messages between the ranks of a pipeline.

Links are measured one after the other, while nothing else is sent. The sender sends messages of
growing size, and the receiver answers each of them with an empty one.
"""

from __future__ import annotations

import math
import os
import socket
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from pipegrad.comm import sync_points
from pipegrad.comm.agreement import AGREE_SECONDS, agree
from pipegrad.pipeline.edges import Edges
from pipegrad.schedules.program.program import Channel
from pipegrad.simulation.costs import LinkCosts, Network
from pipegrad.topology import Topology

ARRIVED = sync_points.WaitWork("links.arrived", "the next message is measured by itself")

_REPEATS = 7
_HOP_SECONDS = 600.0  # limit of all ranks' wait for one hop
SIZES = (2**16, 2**19, 2**22, 2**25)  # bytes of messages
_LONG_SECONDS = 0.03  # a message that takes longer shows the rate

Pair = tuple[int, int]  # the rank that sends, and the rank that receives


class Wires:
    """Sends and receives bare messages over the communicators of a pipeline."""

    def __init__(self, edges: Edges, rank: int, device: torch.device) -> None:
        self._edges = edges
        self.rank = rank
        self._device = device

    def pass_on(self, source: int, target: int, num_bytes: int) -> None:
        """Sends a message from one rank to another; an empty one goes from host to host."""
        is_sender = self.rank == source
        peer = target if is_sender else source
        way = self._edges.to if is_sender else self._edges.of
        group, there = way(peer) if num_bytes else self._edges.host(peer)
        device = self._device if num_bytes else None
        message = torch.zeros(num_bytes or 1, dtype=torch.uint8, device=device)
        sync_points.finish_device(self._device)
        start = sync_points.in_use.send if is_sender else sync_points.in_use.receive
        ARRIVED(start(group, message, there, 1 if num_bytes else 3))
        sync_points.finish_device(self._device)

    def trips(
        self, pair: Pair, num_bytes: int, *, back_bytes: int = 0, repeats: int = _REPEATS
    ) -> list[float]:
        """Returns the seconds of round trips; empty on all ranks except the sender."""
        times = list[float]()
        if self.rank in pair:
            for _ in range(repeats + 1):  # the first one connects
                began = time.perf_counter()
                self.pass_on(*pair, num_bytes)
                self.pass_on(*pair[::-1], back_bytes)
                times.append(time.perf_counter() - began)
        return times[1:] if self.rank == pair[0] else []


def measure_links(
    edges: Edges,
    *,
    rank: int,
    ranks: Sequence[int],
    pairs: Sequence[Pair],
    device: torch.device,
    timeout_seconds: float = AGREE_SECONDS,
) -> tuple[LinkCosts, ...]:
    """Returns the costs of messages on each of these links; the same on all ranks.

    All ranks of the pipeline call it, between steps.

    Raises:
        AgreementError: If a rank does not take part.
    """
    wires = Wires(edges, rank, device)

    def trips(pair: Pair, num_bytes: int) -> list[float]:
        replies = agree(
            f"the link {pair[0]} to {pair[1]}",
            partial(wires.trips, pair, num_bytes),
            ranks=ranks,
            timeout_seconds=timeout_seconds,
        )
        return next(filter(None, replies))

    links = list[LinkCosts]()
    for pair in pairs:
        # The fastest empty message shows the link, because slower ones wait for a busy host.
        seconds = empty = min(trips(pair, 1))
        for size in SIZES:
            seconds = statistics.median(trips(pair, size))
            # A message that takes less than a round trip shows the noise of round trips, not the
            # rate.
            if seconds - empty > max(_LONG_SECONDS, empty):
                break
        links.append(LinkCosts(*pair, *fitted(empty, size, seconds)))
    return tuple(links)


def fitted(empty_seconds: float, num_bytes: int, seconds: float) -> tuple[float, float]:
    """Returns latency and rate, from the round trips of an empty and of a large message.

    The latency is half of the empty round trip, because the way back is an empty message.
    """
    extra = seconds - empty_seconds
    return empty_seconds / 2, num_bytes / extra if extra > 0 else math.inf


def measure_hops(
    topology: Topology, *, num_bytes: int, repeats: int = 11, device: torch.device | str = "cpu"
) -> tuple[float, ...]:
    """Returns the seconds of a message from each rank of the pipeline to the next.

    Give them to the schedule ``hop-aware-1f1b`` as ``hop_seconds``. Hops are measured one after the
    other. The time of a hop is half of a round trip: the median of `repeats`, and the slowest of
    all pipelines. Every rank of the topology must call it. All get the same numbers.

    Args:
        topology: The ranks.
        num_bytes: Size of the output that a stage sends for a microbatch.
        repeats: Number of round trips of each hop.
        device: Device of the messages.
    """
    device = torch.device(device)
    hops = [(hop, hop + 1) for hop in range(topology.size(topology.pipeline) - 1)]
    ways = [Channel(0, "F", *way) for hop in hops for way in (hop, hop[::-1])]
    edges = Edges(ways, topology, device)
    wires = Wires(edges, topology.coordinate(topology.pipeline), device)
    seconds = list[float]()
    for hop in hops:
        # All ranks agree on each hop, because hops must be measured one after the other.
        replies = agree(
            f"hop {hop[0]}",
            partial(wires.trips, hop, num_bytes, back_bytes=num_bytes, repeats=repeats),
            ranks=topology.ranks,
            timeout_seconds=_HOP_SECONDS,
        )
        seconds.append(max(statistics.median(times) / 2 for times in replies if times))
    edges.close()
    return tuple(seconds)


def host_name() -> str:
    """Returns the name of the network that this rank sends by: its machine and network namespace.

    Ranks of one machine may be in separate namespaces, with separate NICs.
    """
    try:
        network = os.readlink("/proc/self/ns/net")  # noqa: PTH115 - a link that leads to no path
    except OSError:
        network = ""
    return f"{socket.gethostname()} {machine_name()} {network}"


def machine_name() -> str:
    """Returns the id of this boot of the machine; "" if there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def network_of(links: Sequence[LinkCosts], hosts: Sequence[str]) -> Network:
    """Returns the network of measured links; each link has its own rate."""
    names = list(dict.fromkeys(hosts))
    return Network(hosts=tuple(map(names.index, hosts)), links=tuple(links))
