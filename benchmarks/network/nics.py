"""Networks of hosts with one full-duplex NIC each, for simulations: what is sent arrives when?"""

import math
from collections import defaultdict, deque
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from pipegrad.schedules import Action

Hop = tuple[int, int]  # from a rank to another


class Message(NamedTuple):
    """What a rank sends."""

    since: float
    hop: Hop
    action: Action  # that needs it


class Network(Protocol):
    """Messages on their way. It is told of all that are sent before `soonest`, and then steps."""

    def send(self, message: Message) -> None: ...

    def soonest(self) -> float:
        """Returns when it steps next: messages begin, or arrive."""

    def step(self) -> dict[Action, float]:
        """Returns when some arrive."""


class InTurns:
    """One message leaves a NIC at a time, first come first served, and one at a time enters.

    The switch forwards while it receives, and keeps what has to wait for the receiver.
    """

    def __init__(self, transfer: float) -> None:
        self._transfer = transfer
        self._queues: defaultdict[int, deque[Message]] = defaultdict(deque)
        self._leaves: defaultdict[int, float] = defaultdict(float)
        self._enters: defaultdict[int, float] = defaultdict(float)

    def send(self, message: Message) -> None:
        self._queues[message.hop[0]].append(message)

    def soonest(self) -> float:
        return self._next()[0]

    def step(self) -> dict[Action, float]:
        begin, source = self._next()
        _, (_, target), action = self._queues[source].popleft()
        self._leaves[source] = begin + self._transfer
        self._enters[target] = max(begin, self._enters[target]) + self._transfer
        return {action: self._enters[target]}

    def _next(self) -> tuple[float, int]:
        """Returns when the next message leaves, and whose it is."""
        queues = self._queues.items()
        begins = ((max(self._leaves[rank], q[0].since), rank) for rank, q in queues if q)
        return min(begins, default=(math.inf, -1))


class Shared:
    """A NIC's rate is shared, max-min fair, among the messages that leave, or enter, at once.

    A rank has one connection to each other: what goes from one to the same goes in turns.
    """

    def __init__(self, transfer: float) -> None:
        self._transfer = transfer
        self._now = 0.0
        self._queues: defaultdict[Hop, deque[Message]] = defaultdict(deque)
        self._left: dict[Hop, float] = {}  # of the first in a queue, begun: the time it needs alone

    def send(self, message: Message) -> None:
        self._queues[message.hop].append(message)

    def soonest(self) -> float:
        begins = (q[0].since for hop, q in self._queues.items() if q and hop not in self._left)
        return min((*begins, *self._ends().values()), default=math.inf)

    def step(self) -> dict[Action, float]:
        now, ends, rates = self.soonest(), self._ends(), fair_rates(self._left)
        for hop, rate in rates.items():
            self._left[hop] = max(0.0, self._left[hop] - rate * (now - self._now))
        done = [hop for hop, end in ends.items() if end <= now]
        for hop in done:
            del self._left[hop]
        arrived = {self._queues[hop].popleft().action: now for hop in done}
        for hop, queue in self._queues.items():
            if queue and queue[0].since <= now:
                self._left.setdefault(hop, self._transfer)
        self._now = now
        return arrived

    def _ends(self) -> dict[Hop, float]:
        """Returns when each message that has begun would arrive at its present rate."""
        rates = fair_rates(self._left)
        return {hop: self._now + left / rates[hop] for hop, left in self._left.items()}


def fair_rates(hops: Iterable[Hop]) -> dict[Hop, float]:
    """Returns the rates of messages at once, max-min fair: a rank sends and receives at most 1."""
    rates: dict[Hop, float] = {}
    free: defaultdict[tuple[int, int], float] = defaultdict(lambda: 1.0)  # of (side, rank)
    rest = set(hops)
    while rest:
        users = defaultdict(list)
        for hop in rest:
            for nic in enumerate(hop):
                users[nic].append(hop)
        each, tightest = min((free[nic] / len(users[nic]), nic) for nic in users)
        for hop in users[tightest]:
            rates[hop] = each
            rest.remove(hop)
            for nic in enumerate(hop):
                free[nic] -= each
    return rates
