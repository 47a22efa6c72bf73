"""Messages: transfers between the ranks of a simulation."""

from __future__ import annotations

from collections import defaultdict, deque
from functools import partial

from pipegrad.schedules.program.program import MICROBATCH_BITS, MICROBATCH_MASK, Program
from pipegrad.simulation.costs import Costs
from pipegrad.simulation.engine.events import Events
from pipegrad.simulation.engine.network import FairNetwork
from pipegrad.simulation.engine.recording import Recording

Key = tuple[int, int]  # a step, and a transfer as items encode it


class Messages:
    """A message begins when it is sent, its receive is posted, and its edge is free.

    An edge is an ordered pair of ranks. It is one connection, so its messages go one by one. Skips
    have another one; see [Note: skips] in `program`.

    Attributes:
        crossings: For each channel what a value costs that crosses it.
        arrived: What has arrived.
        delivered: What has arrived, and was not freed by the sender yet.
    """

    def __init__(
        self,
        program: Program,
        costs: Costs,
        *,
        events: Events,
        network: FairNetwork,
        recording: Recording,
    ) -> None:
        self._program = program
        self._costs = costs.network
        self._events = events
        self._network = network
        self._recording = recording
        self.crossings = [costs.crossing(program.links[c.link], c) for c in program.channels]
        # When a receive was posted and not sent, or the other way round. It may lie ahead of the
        # event in which it was noted, because hosts take time for messages.
        self._posted = dict[Key, float]()
        self._sent = dict[Key, float]()
        self.arrived = set[Key]()
        self.delivered = set[Key]()
        # By source, target, and whether it is the connection of skips.
        self._queues = defaultdict[tuple[int, int, bool], deque[tuple[Key, float]]](deque)

    def post(self, now: float, step: int, transfer: int) -> None:
        """The receiver is ready."""
        key = step, transfer
        if key in self._sent:
            self._enqueue(max(now, self._sent.pop(key)), key)
        else:
            self._posted[key] = now

    def send(self, now: float, step: int, transfer: int) -> None:
        """The sender is ready."""
        key = step, transfer
        if key in self._posted:
            self._enqueue(max(now, self._posted.pop(key)), key)
        else:
            self._sent[key] = now

    def _enqueue(self, ready: float, key: Key) -> None:
        queue = self._queue(key[1] >> MICROBATCH_BITS)
        queue.append((key, ready))
        if len(queue) == 1:
            self._events.at(ready, self._begin, key)

    def _queue(self, number: int) -> deque[tuple[Key, float]]:
        """Returns what is on the way on the connection of a channel, and waits for it."""
        channel = self._program.channels[number]
        return self._queues[channel.source, channel.target, channel in self._program.skips]

    def _begin(self, now: float, key: Key) -> None:
        number = key[1] >> MICROBATCH_BITS
        _, _, source, target = self._program.channels[number]
        then = partial(self._leave, key=key, begin=now)
        self._network.begin(now, source, target, self.crossings[number].num_bytes, then)

    def _leave(self, now: float, key: Key, begin: float) -> None:
        """Its last byte has left; it arrives after the latency of its link."""
        step, transfer = key
        number, microbatch = transfer >> MICROBATCH_BITS, transfer & MICROBATCH_MASK
        _, _, source, target = self._program.channels[number]
        queue = self._queue(number)
        queue.popleft()
        if queue:
            following, ready = queue[0]
            self._events.at(max(now, ready), self._begin, following)
        there = now + self._costs.link(source, target).latency_seconds
        self._recording.transfer(
            source, "transfer", begin, there, step, channel=number, microbatch=microbatch
        )
        if there > now:
            self._events.at(there, self._arrive, key)
        else:
            self._arrive(now, key)

    def _arrive(self, now: float, key: Key) -> None:
        self.arrived.add(key)
        self.delivered.add(key)
        self._events.wake(now, ("receive", *key))
        self._events.wake(now, ("send", *key))
