"""examine: checks ranks and links before a run, and reports unusual ones in words.

Everything is bounded in time. The ranks agree over the store of the process group, because then an
error names a rank that does not answer.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from itertools import permutations
from typing import Any

import torch
import torch.distributed as dist

from pipegrad.comm.agreement import agree
from pipegrad.comm.collectives import backend_of
from pipegrad.limits import num_cores
from pipegrad.observe.links import Pair, host_name, measure_links, network_of
from pipegrad.observe.recording import Reading, read_clock
from pipegrad.pipeline.edges import Edges
from pipegrad.schedules.program.program import Channel
from pipegrad.simulation.costs import Costs, LinkCosts, Network, StageCosts
from pipegrad.topology import Topology

_ALL_PAIRS_RANKS = 8  # more ranks have too many pairs: only neighbours are measured
_LATE_SECONDS = 1.0
_SLOW = 2.0  # times slower than the median: reported
_ASYMMETRIC = 1.5
_CLOCK_SECONDS = 1.0


@dataclass(frozen=True)
class RankFacts:
    """The facts that one rank reports of itself.

    Attributes:
        rank: The global rank.
        host: Name of its host.
        home: Name of its machine and network: ranks with the same one share NICs.
        device: The device on which it would compute, in words.
        backend: The backend that sends tensors of this device.
        versions: Name -> version: pipegrad, torch, Python, and on GPUs NCCL.
        cores: Number of CPU cores that it may use.
        threads: Value of OMP_NUM_THREADS; None if it is unset.
        compute_threads: Number of threads that torch computes with.
        asked_seconds: Time at which it came to the first agreement, by the clock of its host.
    """

    rank: int
    host: str
    home: str
    device: str
    backend: str
    versions: dict[str, str]
    cores: int
    threads: str | None
    compute_threads: int
    asked_seconds: float


@dataclass(frozen=True)
class Examination:
    """The result of `examine`.

    Attributes:
        ranks: Facts about each rank.
        late_seconds: For each rank, the delay of its answer after the first answer.
        clocks: For each rank, the offset of its clock from the first rank's clock.
        links: Costs of messages on each measured link.
        network: The links, and the ranks that share a host, for `Costs`.
        odd: Sentences about unusual ranks and links; empty if all is well.
    """

    ranks: tuple[RankFacts, ...]
    late_seconds: tuple[float, ...]
    clocks: tuple[Reading, ...]
    links: tuple[LinkCosts, ...]
    network: Network
    odd: tuple[str, ...]

    @property
    def costs(self) -> Costs:
        """The network as `Costs`, with a stage for each rank that takes no time."""
        return Costs(tuple(StageCosts() for _ in self.ranks), self.network)

    def to_json(self) -> dict[str, Any]:
        """Returns the examination as plain data."""
        return {
            "ranks": [
                {**asdict(facts), "late_seconds": late, "clock_offset_seconds": clock.offset}
                for facts, late, clock in zip(
                    self.ranks, self.late_seconds, self.clocks, strict=True
                )
            ],
            "links": [
                # JSON has no infinity.
                {**asdict(x), "bytes_per_second": min(x.bytes_per_second, sys.float_info.max)}
                for x in self.links
            ],
            "network": self.costs.to_json().get("network", {}),
            "odd": list(self.odd),
        }


def examine(device: torch.device, *, timeout_seconds: float = 30.0) -> Examination:
    """Returns facts about the ranks of the default process group, and about their links.

    All ranks call it together. A process without a group may call it, too.

    Raises:
        AgreementError: If a rank does not answer. The error names it.
    """
    met = partial(agree, timeout_seconds=timeout_seconds)
    ranks = tuple(met("pipegrad doctor", partial(_facts, device)))
    size, pairs, hosts = len(ranks), _pairs(ranks), [facts.home for facts in ranks]
    readings: Sequence[Reading] = [Reading(0.0)] * size
    links: tuple[LinkCosts, ...] = ()
    if pairs:
        topology = Topology.create(pipeline=size, device_type=device.type)
        channels = [Channel(0, "F" if a < b else "B", a, b) for a, b in pairs]
        edges = Edges(channels, topology, device)
        rank = dist.get_rank()
        readings = met("clocks", partial(read_clock, edges, rank, size))
        links = measure_links(
            edges,
            rank=rank,
            ranks=range(size),
            pairs=pairs,
            device=device,
            timeout_seconds=timeout_seconds,
        )
        edges.close()
    late = lateness(ranks, readings)
    return Examination(
        ranks,
        late,
        tuple(readings),
        links,
        network_of(links, hosts),
        tuple(oddities(ranks, late, readings, links)),
    )


def _pairs(ranks: Sequence[RankFacts]) -> list[Pair]:
    """Returns the links to measure: all if there are few ranks, else links to both neighbours.

    The list is empty if ranks have different backends or types of device, because these cannot send
    to each other. `oddities` reports them. GPUs with different names can send to each other.
    """
    types = {(facts.backend, facts.device.partition(" ")[0].partition(":")[0]) for facts in ranks}
    size = len(ranks)
    if len(types) > 1:
        return []
    if size <= _ALL_PAIRS_RANKS:
        return list(permutations(range(size), 2))
    return [(a, b) for a in range(size) for b in (a - 1, a + 1) if 0 <= b < size]


def _facts(device: torch.device) -> RankFacts:
    began = time.perf_counter()
    versions = {
        "pipegrad": metadata.version("pipegrad"),
        "torch": str(torch.__version__),
        "Python": platform.python_version(),
    }
    if device.type == "cuda":
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return RankFacts(
        rank=dist.get_rank() if dist.is_initialized() else 0,
        host=platform.node(),
        home=host_name(),
        device=f"{device} ({name})",
        backend=backend_of(None, device) if dist.is_initialized() else "none",
        versions=versions,
        cores=num_cores(),
        threads=os.environ.get("OMP_NUM_THREADS"),
        compute_threads=torch.get_num_threads(),
        asked_seconds=began,
    )


def lateness(ranks: Sequence[RankFacts], readings: Sequence[Reading]) -> tuple[float, ...]:
    """Returns the delay of each rank after the first one, by one clock."""
    came = [
        facts.asked_seconds + reading.offset for facts, reading in zip(ranks, readings, strict=True)
    ]
    return tuple(seconds - min(came) for seconds in came)


# Oddities.


def oddities(
    ranks: Sequence[RankFacts],
    late_seconds: Sequence[float],
    clocks: Sequence[Reading],
    links: Sequence[LinkCosts],
) -> Iterator[str]:
    """Yields sentences about ranks and links that a person should look at."""
    yield from _other_versions(ranks)
    yield from _hosts(ranks)
    for facts, seconds in zip(ranks, late_seconds, strict=True):
        if seconds > _LATE_SECONDS:
            yield (
                f"rank {facts.rank} on {facts.host} answered {seconds:.1f} s after the first rank: "
                f"it starts slowly, or its host is busy"
            )
    for facts, clock in zip(ranks, clocks, strict=True):
        if clock.error > _CLOCK_SECONDS:
            yield f"rank {facts.rank}: its clock is known to {clock.error:.1f} s only"
    home = {facts.rank: facts.home for facts in ranks}
    is_local = [home[link.source] == home[link.target] for link in links]
    # On gloo, messages inside a host cost CPU time. Therefore they do not show the speed of a link.
    of_hosts = [link for link, local in zip(links, is_local, strict=True) if not local]
    of_cards = [link for link, local in zip(links, is_local, strict=True) if local]
    for alike in (of_hosts, of_cards if all(f.backend != "gloo" for f in ranks) else []):
        yield from _slow_links(alike)
        yield from _directions(alike)


def _other_versions(ranks: Sequence[RankFacts]) -> Iterator[str]:
    names = dict.fromkeys(name for facts in ranks for name in facts.versions)
    what = {name: [facts.versions.get(name, "missing") for facts in ranks] for name in names}
    what["backend"] = [facts.backend for facts in ranks]
    what["kind of device"] = [facts.device.partition(" ")[2] for facts in ranks]
    for name, values in what.items():
        (most, _), *others = Counter(values).most_common()
        for other, _ in others:
            who = [f.rank for f, value in zip(ranks, values, strict=True) if value == other]
            yield f"{name} is {other!r} on ranks {who}, and {most!r} on the others"


def _hosts(ranks: Sequence[RankFacts]) -> Iterator[str]:
    by_home = defaultdict[str, list[RankFacts]](list)
    for facts in ranks:
        by_home[facts.home].append(facts)
    homes = Counter(own[0].host for own in by_home.values())
    for host, number in homes.items():
        if number > 1:
            yield (
                f"{number} machines or networks have the host name {host!r}: if they are different "
                f"machines, give each a name of its own, or messages name the wrong one"
            )
    for own in by_home.values():
        who, first = [facts.rank for facts in own], own[0]
        threads = sum(facts.compute_threads for facts in own)
        if all(facts.device.startswith("cpu") for facts in own) and first.cores < len(own):
            yield f"{first.host}: {len(own)} ranks, {who}, compute on {first.cores} cores"
        elif len(own) > 1 and any(f.threads is None for f in own) and threads > first.cores:
            yield (
                f"{first.host}: OMP_NUM_THREADS is unset, and ranks {who} compute with {threads} "
                f"threads on {first.cores} cores: set it to {max(1, first.cores // len(own))}"
            )


def _slow_links(links: Sequence[LinkCosts]) -> Iterator[str]:
    if len(links) < 3:
        return
    rate = statistics.median(link.bytes_per_second for link in links)
    latency = statistics.median(link.latency_seconds for link in links)
    for costs in links:
        ends = f"rank {costs.source} to rank {costs.target}"
        if costs.bytes_per_second * _SLOW < rate:
            yield (
                f"{ends}: {costs.bytes_per_second / 1e6:.0f} MB/s, and the median of all links is "
                f"{rate / 1e6:.0f} MB/s"
            )
        if costs.latency_seconds > _SLOW * latency + 1e-3:
            yield (
                f"{ends}: {costs.latency_seconds * 1e3:.1f} ms for an empty message, and the "
                f"median of all links is {latency * 1e3:.1f} ms"
            )


def _directions(links: Sequence[LinkCosts]) -> Iterator[str]:
    rates = {(link.source, link.target): link.bytes_per_second for link in links}
    for (source, target), there in rates.items():
        back = rates.get((target, source), there)
        if back > _ASYMMETRIC * there:
            yield (
                f"rank {source} to rank {target}: {there / 1e6:.0f} MB/s, and back "
                f"{back / 1e6:.0f} MB/s"
            )
