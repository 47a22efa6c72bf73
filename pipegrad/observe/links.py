"""Links: what messages between the ranks of a pipeline take, measured by messages.

Every link is measured while nothing else is sent, one after the other. The sender sends messages
of growing size, and the receiver answers each of them with an empty one. Then both directions of a
link carry a message at once, and all links that leave a host, which shows whether they share a NIC.
"""

from __future__ import annotations

import math
import os
import socket
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from pipegrad.comm import sync_points
from pipegrad.comm.agreement import AGREE_SECONDS, agree
from pipegrad.errors import StepError
from pipegrad.pipeline.edges import Edges
from pipegrad.schedules.program.program import Channel
from pipegrad.simulation.costs import LinkCosts, Network
from pipegrad.topology import Topology

ARRIVED = sync_points.WaitWork("links.arrived", "the next message is measured by itself")

_REPEATS = 7
_HOP_SECONDS = 600.0  # how long all ranks wait for one hop
_FIRST_BYTES, _GROWTH, _MOST_BYTES = 2**16, 8, 2**25
_LONG_SECONDS = 0.03  # a message that takes so long shows the rate
_SHARED = 0.7  # links that together reach less than this part of their rates share a NIC

Pair = tuple[int, int]  # the rank that sends, and the rank that receives


class Measured(NamedTuple):
    """What a link did.

    Attributes:
        costs: Alone.
        busy: Its rate while all links that leave its host were in use, by its rate alone. All send
            as much, and a rank waits for its slowest link.
        both_ways: Its rate while the other direction was in use, by its rate alone.
    """

    costs: LinkCosts
    busy: float = 1.0
    both_ways: float = 1.0


class Wires:
    """Sends and receives bare messages over the communicators of a pipeline.

    Args:
        edges: The communicators.
        rank: The pipeline rank.
        device: Where messages are.
    """

    def __init__(self, edges: Edges, rank: int, device: torch.device) -> None:
        self._edges = edges
        self.rank = rank
        self._device = device

    def exchange(self, sends: Mapping[int, int], receives: Mapping[int, int]) -> float:
        """Sends and receives messages at once, by peer and bytes; returns seconds."""
        out = {peer: self._message(size) for peer, size in sends.items()}
        into = {peer: self._message(size) for peer, size in receives.items()}
        sync_points.finish_device(self._device)
        began = time.perf_counter()
        works = [
            sync_points.in_use.receive(self._edges.of(p)[0], m, self._edges.of(p)[1], 1)
            for p, m in into.items()
        ]
        works += [
            sync_points.in_use.send(self._edges.to(p)[0], m, self._edges.to(p)[1], 1)
            for p, m in out.items()
        ]
        for work in works:
            ARRIVED(work)
        sync_points.finish_device(self._device)
        return time.perf_counter() - began

    def tell(self, peer: int, number: int) -> None:
        """Sends a number from host to host."""
        group, there = self._edges.host(peer)
        ARRIVED(sync_points.in_use.send(group, torch.tensor([number]), there, 3))

    def hear(self, peer: int) -> int:
        """Returns the number that a rank sends from host to host."""
        group, there = self._edges.host(peer)
        message = torch.zeros(1, dtype=torch.int64)
        ARRIVED(sync_points.in_use.receive(group, message, there, 3))
        if not 0 <= int(message) <= _GROWTH * _MOST_BYTES:  # memory is made for so many bytes
            raise StepError(f"rank {peer} has sent {int(message)}, expected a number of bytes")
        return int(message)

    def _message(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)


def measure_links(
    edges: Edges,
    *,
    rank: int,
    ranks: Sequence[int],
    pairs: Sequence[Pair],
    hosts: Sequence[str],
    device: torch.device,
    timeout_seconds: float = AGREE_SECONDS,
) -> tuple[Measured, ...]:
    """Returns what messages take on each of these links; the same on all ranks.

    All ranks of the pipeline call it, between steps.

    Args:
        edges: The communicators of the pipeline.
        rank: The pipeline rank.
        ranks: The global ranks of the pipeline.
        pairs: The links, each with a communicator.
        hosts: For each pipeline rank what `host_name` returns there.
        device: Where messages are.
        timeout_seconds: How long to wait for the slowest rank, for each link.

    Raises:
        AgreementError: If a rank does not take part.
    """
    wires = Wires(edges, rank, device)
    met = partial(agree, ranks=ranks, timeout_seconds=timeout_seconds)
    alone = dict[Pair, LinkCosts]()
    for pair in pairs:
        replies = met(f"the link {pair[0]} to {pair[1]}", partial(_alone, wires, pair))
        alone[pair] = LinkCosts(*pair, *next(reply for reply in replies if reply is not None))
    both_ways = dict[Pair, float]()
    for pair in pairs:
        if pair[0] < pair[1] and pair[::-1] in alone:
            both_ways |= _at_once(wires, met, (pair, pair[::-1]), alone, "both directions")
    busy = dict(both_ways)  # of a host that one link leaves
    for host, leaving in _leaving(pairs, hosts).items():
        if len(leaving) > 1:
            busy |= _at_once(wires, met, leaving, alone, f"links of host {host}")
    return tuple(
        Measured(alone[pair], busy.get(pair, 1.0), both_ways.get(pair, 1.0)) for pair in pairs
    )


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
    wires = Wires(edges, topology.coordinate(topology.pipeline), device)
    seconds = list[float]()
    for hop in hops:
        # All ranks agree on each hop, so hops are measured one after the other.
        replies = agree(
            f"hop {hop}",
            partial(_there_and_back, wires, hop, num_bytes, repeats),
            ranks=topology.ranks,
            timeout_seconds=_HOP_SECONDS,
        )
        seconds.append(max(replies))
    edges.close()
    return tuple(seconds)


def _there_and_back(wires: Wires, hop: int, num_bytes: int, repeats: int) -> float:
    """Sends messages there and back; returns the median of half the time, on the rank before."""
    if wires.rank not in (hop, hop + 1):
        return 0.0
    message = {2 * hop + 1 - wires.rank: num_bytes}
    times = []
    for _ in range(repeats + 1):  # the first one connects
        began = time.perf_counter()
        for sender in (hop, hop + 1):
            if wires.rank == sender:
                wires.exchange(message, {})
            else:
                wires.exchange({}, message)
        times.append((time.perf_counter() - began) / 2)
    return statistics.median(times[1:]) if wires.rank == hop else 0.0


def _leaving(pairs: Iterable[Pair], hosts: Sequence[str]) -> dict[int, list[Pair]]:
    """Returns for each host, by number, the links that leave it to other hosts."""
    numbers = numbers_of(hosts)
    leaving = defaultdict[int, list[Pair]](list)
    for source, target in pairs:
        if hosts[source] != hosts[target]:
            leaving[numbers[hosts[source]]].append((source, target))
    return leaving


def numbers_of(hosts: Iterable[str]) -> dict[str, int]:
    """Returns the number of each host: they are counted in the order of ranks."""
    return {name: number for number, name in enumerate(dict.fromkeys(hosts))}


def _alone(wires: Wires, pair: Pair) -> tuple[float, float] | None:
    """Returns latency and rate of a link; None on all ranks but the one that sends."""
    source, target = pair
    if wires.rank == target:
        while size := wires.hear(source):
            for _ in range(_REPEATS + 1):
                wires.exchange({}, {source: size})
                wires.tell(source, 0)
        return None
    if wires.rank != source:
        return None
    # The fastest empty message shows the link; a slower one, a host that was busy.
    trip = min(_trips(wires, target, 1))
    size, seconds = _FIRST_BYTES, 0.0
    while True:
        seconds = statistics.median(_trips(wires, target, size))
        # A message that takes less than a round trip shows how even round trips are, not the rate.
        if seconds - trip > max(_LONG_SECONDS, trip) or size >= _MOST_BYTES:
            break
        size *= _GROWTH
    wires.tell(target, 0)
    return fitted(trip, size, seconds)


def fitted(empty_seconds: float, num_bytes: int, seconds: float) -> tuple[float, float]:
    """Returns latency and rate, of the round trips of an empty and of a large message.

    The way back is an empty message, so the latency is half of the empty round trip.
    """
    extra = seconds - empty_seconds
    return empty_seconds / 2, num_bytes / extra if extra > 0 else math.inf


def _trips(wires: Wires, peer: int, num_bytes: int) -> list[float]:
    """Returns the times of some messages, each with its answer."""
    wires.tell(peer, num_bytes)
    times = []
    for _ in range(_REPEATS + 1):  # the first one connects
        began = time.perf_counter()
        wires.exchange({peer: num_bytes}, {})
        wires.hear(peer)
        times.append(time.perf_counter() - began)
    return times[1:]


def _at_once(
    wires: Wires,
    met: partial[list[dict[Pair, float]]],
    pairs: Sequence[Pair],
    alone: Mapping[Pair, LinkCosts],
    what: str,
) -> dict[Pair, float]:
    """Returns the rate of links that are used at once, by their rates alone."""
    # All carry one size: then they are busy together for as long as the fastest of them is.
    rates = [alone[p].bytes_per_second for p in pairs if alone[p].bytes_per_second < math.inf]
    seconds = max(_LONG_SECONDS, *(2 * alone[p].latency_seconds for p in pairs))
    size = int(min(max(seconds * min(rates, default=math.inf), _FIRST_BYTES), _MOST_BYTES))

    def together() -> dict[Pair, float]:
        sends = [target for source, target in pairs if source == wires.rank]
        receives = [source for source, target in pairs if target == wires.rank]
        if not (sends or receives):
            return {}

        def seconds_of(num_bytes: int) -> float:
            # A sender runs ahead of the links, so a single message may look fast: all of them
            # count.
            messages = dict.fromkeys(sends, num_bytes), dict.fromkeys(receives, num_bytes)
            return sum(wires.exchange(*messages) for _ in range(_REPEATS)) / _REPEATS

        # On gloo a message leaves when its sender has heard that the receive is posted. So messages
        # at once take a round trip, which says nothing of the rate.
        empty = seconds_of(1)
        extra = seconds_of(size) - empty
        return {pair: extra for pair in pairs if pair[1] == wires.rank}

    met(f"{what}, ready", dict)
    replies = met(f"{what} at once", together)
    result = {pair: extra for reply in replies for pair, extra in reply.items()}
    return {pair: reached(alone[pair], size, extra) for pair, extra in result.items()}


def reached(alone: LinkCosts, num_bytes: int, extra_seconds: float) -> float:
    """Returns the rate of a link beside others, by its rate alone.

    Args:
        alone: What it did alone.
        num_bytes: Of a message beside others.
        extra_seconds: What such a message took more than an empty one beside others.
    """
    expected = num_bytes / alone.bytes_per_second
    return expected / extra_seconds if extra_seconds > expected > 0 else 1.0


def host_name() -> str:
    """Returns what names the network that this rank sends by: its machine, and where it is a guest.

    Ranks of one machine may be in namespaces of their own, with NICs of their own.
    """
    try:
        network = os.readlink("/proc/self/ns/net")  # noqa: PTH115 - a link that leads to no path
    except OSError:
        network = ""
    return f"{socket.gethostname()} {machine_name()} {network}"


def machine_name() -> str:
    """Returns what names this run of this machine's kernel; "" where there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def network_of(measured: Sequence[Measured], hosts: Sequence[str]) -> Network:
    """Returns the network that explains what links did.

    If the links that leave one host are slower together than alone, they share its NIC. Its rate is
    what they reach together. A NIC of one link has the rate of that link while both ways are busy.

    Args:
        measured: Of each link.
        hosts: For each pipeline rank what `host_name` returns there.
    """
    numbers = numbers_of(hosts)
    by_rank = tuple(numbers[name] for name in hosts)
    known = {(link.costs.source, link.costs.target): link for link in measured}
    leaving = [[known[p] for p in own] for own in _leaving(known, hosts).values()]
    several = any(len(links) > 1 for links in leaving)
    # All links of a host send as many bytes, so its NIC is busy until the slowest has ended.
    shared = [
        len(links) * min(link.busy * link.costs.bytes_per_second for link in links)
        for links in leaving
        if (len(links) > 1 and max(link.busy for link in links) < _SHARED)
        or (not several and links[0].busy < 1.0)
    ]
    return Network(
        nic_bytes_per_second=max(shared, default=math.inf),
        hosts=by_rank,
        links=tuple(link.costs for link in measured),
    )
