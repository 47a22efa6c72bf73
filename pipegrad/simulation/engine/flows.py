"""Flows: bytes that share NICs, and the events of a simulation. Finds when each message ends."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Generator, Hashable, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from pipegrad.simulation.costs import Network

# Yields a time in seconds, or an event, to wait for it. It is sent the time at which it goes on.
Process = Generator[Hashable, float, None]


class Events:
    """Runs processes and calls methods in order of time; at one time in the order of `at`."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._sequence = 0
        self._sleepers = defaultdict[Hashable, list[Process]](list)

    def at(self, seconds: float, method: Callable[..., None], *arguments: object) -> None:
        """Schedules the call ``method(seconds, *arguments)`` for that time."""
        self._sequence += 1
        heappush(self._heap, (seconds, self._sequence, method, arguments))

    def start(self, process: Process) -> None:
        """Runs a process until it waits for the first time."""
        self._go_on(None, process)

    def run(self) -> None:
        """Goes on until nothing happens any more."""
        heap = self._heap
        while heap:
            now, _, method, arguments = heappop(heap)
            method(now, *arguments)

    def wake(self, now: float, event: Hashable) -> None:
        """Lets all go on that wait for an event, in the order in which they began to wait."""
        for process in self._sleepers.pop(event, ()):
            self._go_on(now, process)

    def _go_on(self, now: float | None, process: Process) -> None:
        try:
            wanted = process.send(now)  # type: ignore[arg-type]  # None starts it
        except StopIteration:
            return
        if isinstance(wanted, float):
            self.at(wanted, self._go_on, process)
        else:
            self._sleepers[wanted].append(process)


Nic = tuple[int, int]  # 0 for bytes that leave and 1 for bytes that enter, and a host
# Rates are computed for the NICs that a begin or an end can touch. A chain of messages may join
# all NICs of a large cluster, and then rates further away are left as they are.
_MOST_NICS = 32


@dataclass(eq=False, slots=True)
class Flow:
    """Bytes on their way from one rank to another. It is the event that its last byte has left.

    Attributes:
        left: Bytes that are still to be sent.
        limit: The rate of its link.
        nics: The NICs that it uses; none within a host.
        since: When `left` was computed.
        rate: Bytes per second, at present.
        version: Counts changes of the rate. An end that was computed before the last one is void.
        has_ended: True if its last byte has left.
    """

    left: float
    limit: float
    nics: tuple[Nic, ...]
    since: float
    rate: float = 0.0
    version: int = 0
    has_ended: bool = False


class FairNetwork:
    """Shares the rate of every NIC among the flows that use it at once, as TCP does.

    [Note: round trips] Of two flows that share a NIC, the one with the longer round trip is slower,
    because TCP limits the bytes that are not yet acknowledged. Where NICs are shared, the round
    trip is the time in their queues. Data wait where they leave, after all flows that leave there.
    They wait again where they enter, if other flows enter there too. Acknowledgements wait in the
    two queues of the other direction. Each flow has a weight: 1 over the number of flows in these
    four queues. Rates are max-min fair by weight: no flow can have more without taking from one
    that has no more for its weight. For example, a link between two ranks that both have other
    neighbours is slower than a link to the last rank.

    Args:
        network: Rates and hosts.
        events: The events of the simulation.
    """

    def __init__(self, network: Network, events: Events) -> None:
        self._network = network
        self._events = events
        self._users = defaultdict[Nic, list[Flow]](list)

    def begin(self, now: float, source: int, target: int, num_bytes: float) -> Flow:
        """Begins to send; `source` and `target` may be one rank, which stands for its replicas."""
        network = self._network
        link, hosts = network.link(source, target), (network.host(source), network.host(target))
        crosses = source == target or hosts[0] != hosts[1]
        limited = crosses and network.nic_bytes_per_second < math.inf
        nics = ((0, hosts[0]), (1, hosts[1])) if limited else ()
        flow = Flow(num_bytes, link.bytes_per_second, nics, now)
        for nic in nics:
            self._users[nic].append(flow)
        if nics:
            self._share(now, flow)
        else:
            self._events.at(now + num_bytes / flow.limit, self._end, flow, flow.version)
        return flow

    def _end(self, now: float, flow: Flow, version: int) -> None:
        if flow.version != version:
            return  # its rate has changed since
        for nic in flow.nics:
            self._users[nic].remove(flow)
        if flow.nics:
            self._share(now, flow)
        flow.has_ended = True
        self._events.wake(now, flow)

    def _share(self, now: float, changed: Flow) -> None:
        """Computes the rates of all flows that one that begins or ends can touch."""
        nics = self._reached(changed)
        # A flow that also uses a NIC outside keeps its rate: others there count on it. A flow that
        # has just begun is never among them, because both of its NICs have changed.
        free = dict.fromkeys(nics, self._network.nic_bytes_per_second)
        open_flows = dict[Flow, None]()
        for flow in dict.fromkeys(flow for nic in nics for flow in self._users[nic]):
            inside = [nic for nic in flow.nics if nic in nics]
            if len(inside) == len(flow.nics):
                open_flows[flow] = None
                continue
            for nic in inside:
                free[nic] -= flow.rate
        weights = {flow: self._weight(flow) for flow in open_flows}
        for flow, new_rate in fair_rates(weights, free):
            if new_rate != flow.rate:
                flow.left = max(0.0, flow.left - flow.rate * (now - flow.since))
                flow.since, flow.rate = now, new_rate
                flow.version += 1
                self._events.at(now + flow.left / new_rate, self._end, flow, flow.version)

    def _weight(self, flow: Flow) -> float:
        """Returns its part of a NIC; see [Note: round trips]."""
        users = self._users
        (_, source), (_, target) = flow.nics
        return 1.0 / (
            len(users[0, source])
            + max(0, len(users[1, target]) - 1)
            + len(users[0, target])
            + max(0, len(users[1, source]) - 1)
        )

    def _reached(self, changed: Flow) -> dict[Nic, None]:
        """Returns the NICs that a flow touches, and the NICs that these reach by flows.

        The nearest come first, up to a number.
        """
        # Both sides of its two hosts, because acknowledgements count in weights on the other sides.
        own = [(side, host) for _, host in changed.nics for side in (0, 1)]
        # All flows at these NICs change, however many they are, because nothing might be left for a
        # flow that begins otherwise.
        nics = dict.fromkeys(own)
        nics |= dict.fromkeys(nic for end in own for flow in self._users[end] for nic in flow.nics)
        queue = list(nics)
        for nic in queue:
            if len(nics) >= _MOST_NICS:
                break
            reached = dict.fromkeys(other for flow in self._users[nic] for other in flow.nics)
            queue += [other for other in reached if other not in nics]
            nics |= reached
        return nics


def fair_rates(weights: Mapping[Flow, float], free: dict[Nic, float]) -> list[tuple[Flow, float]]:
    """Returns the max-min fair rate of each flow by its weight, from the free rate of each NIC.

    The tightest NIC, or link, settles the rates of its flows first. Other flows share the rest.
    """
    rates = list[tuple[Flow, float]]()
    rest = dict.fromkeys(weights)
    if len(rest) == 1:
        (flow,) = rest
        return [(flow, min(flow.limit, *(free[nic] for nic in flow.nics)))]
    users = defaultdict[Nic, dict[Flow, None]](dict)
    total = defaultdict[Nic, float](float)
    for flow, weight in weights.items():
        for nic in flow.nics:
            users[nic][flow] = None
            total[nic] += weight
    free = dict(free)
    while rest:
        share, nic = min((free[n] / total[n], n) for n, own in users.items() if own)
        limited = [flow for flow in rest if flow.limit <= share * weights[flow]]
        for flow in limited or list(users[nic]):
            # Rounding must not leave a flow without any rate: it would never end.
            least = 1e-9 * (flow.limit if flow.limit < math.inf else 1.0)
            rate = max(min(share * weights[flow], flow.limit), least)
            rates.append((flow, rate))
            del rest[flow]
            for own in flow.nics:
                free[own] -= rate
                del users[own][flow]
                total[own] = sum(weights[other] for other in users[own])
    return rates
