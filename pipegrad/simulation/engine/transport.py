"""Transport: the memory of the ranks of a simulation, their messages and collectives."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from pipegrad.schedules.program.program import (
    KINDS,
    MICROBATCH_BITS,
    MICROBATCH_MASK,
    Op,
    Program,
)
from pipegrad.schedules.schedule import Kind
from pipegrad.simulation.costs import Costs
from pipegrad.simulation.engine.flows import Events, FairNetwork, Process
from pipegrad.simulation.timeline import COMPUTE, Collective, MemoryPoint, Span, SpanKind

_ALWAYS = (*COMPUTE, "transfer")  # are recorded also if they take no time


@dataclass
class Engine:
    """The state that all parts of a simulation share.

    Attributes:
        program: The items of every rank.
        costs: The costs of these items.
        events: The events to come.
        network: The NICs.
        reductions: Reductions in the order of launching; none in a program without backwards.
        spans: The recorded spans; None if no timeline is wanted.
    """

    program: Program
    costs: Costs
    events: Events
    network: FairNetwork
    reductions: tuple[Collective, ...]
    spans: list[Span] | None

    def record(
        self, rank: int, kind: SpanKind, begin: float, end: float, step: int, *more: int | str
    ) -> None:
        """Records a span, if a timeline is wanted; `more` are its other fields."""
        if self.spans is not None and (end > begin or kind in _ALWAYS):
            self.spans.append(Span(rank, kind, begin, end, step, *more))  # type: ignore[arg-type]

    def record_transfer(
        self, rank: int, kind: SpanKind, begin: float, end: float, key: tuple[int, int]
    ) -> None:
        """Records a transfer, or a wait of one of its two ranks, of a step and transfer."""
        if self.spans is None:
            return
        step, which = key
        channel, microbatch = which >> MICROBATCH_BITS, which & MICROBATCH_MASK
        link, _, source, target = self.program.channels[channel]
        stage, peer = self.program.links[link].producer, source if rank == target else target
        label = self.program.transfer(channel, microbatch)
        self.record(rank, kind, begin, end, step, stage, microbatch, peer, channel, label)

    def record_collective(
        self, kind: SpanKind, begin: float, end: float, *, rank: int, step: int, number: int
    ) -> None:
        """Records a reduction, a parameter sync, or the wait for one."""
        label = self.reductions[number].name
        self.record(rank, kind, begin, end, step, -1, -1, -1, number, label)


class Memory:
    """Counts parameters, gradients, optimizer state, activations, and receive and send buffers.

    A receive buffer is held from the post on: a value until the last backward of the rank that
    reads it, a gradient until the B or W that it belongs to. A gradient that is sent is held
    until it is released; an output belongs to its activations.

    Attributes:
        received_bytes: For each channel the bytes that its receiver holds: the size of the value,
            even if a codec makes the message shorter.
        sent_bytes: For each channel the bytes that its sender holds; an activation is held anyway.
        filled_bytes: For each stage, and kind of action, the bytes that its begin adds.
        peak: For each rank its most bytes so far.
        points: For each rank its bytes over time; only the first point if nothing is recorded.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        program, stages = engine.program, engine.costs.stages
        links = [program.links[channel.link] for channel in program.channels]
        self.received_bytes = [stages[x.producer].outputs.get(x.name, 0) for x in links]
        self.sent_bytes = [
            num_bytes * (channel.kind == "B")
            for num_bytes, channel in zip(self.received_bytes, program.channels, strict=True)
        ]
        self.filled_bytes = [own.activation_bytes * (k == "F") for own in stages for k in KINDS]
        self._held = [0] * program.schedule.num_ranks
        for stage, rank in enumerate(program.schedule.stage_to_rank):
            self._held[rank] += stages[stage].held_bytes
        self.peak = list(self._held)
        self.points = [[MemoryPoint(0.0, held)] for held in self._held]
        # By rank, link, step and microbatch: how many actions still read the value.
        self._readers = defaultdict[tuple[int, int, int, int], int](int)

    def add(self, now: float, rank: int, num_bytes: int) -> None:
        """A rank holds more bytes from now on, or fewer."""
        if num_bytes == 0:
            return
        self._held[rank] += num_bytes
        self.peak[rank] = max(self.peak[rank], self._held[rank])
        if self._engine.spans is not None:
            self.points[rank].append(MemoryPoint(now, self._held[rank]))

    def end(self, now: float, rank: int, stage: int, kind: Kind, *, which: tuple[int, int]) -> None:
        """An action of a step and microbatch ends, and frees bytes that no later action needs."""
        program, costs = self._engine.program, self._engine.costs.stages[stage]
        freed = costs.activation_bytes * program.forward_only
        if kind != "F":
            freed = -costs.changed_bytes(kind)
        links, is_last = program.rank_links[rank], kind in ("B", "W")
        if is_last:
            channels = (c for link in links.made[stage] for c in links.gradients[link].values())
            freed += sum(self.received_bytes[channel] for channel in channels)
        for link in links.taken[stage] if is_last or program.forward_only else ():
            if link in links.values:
                key = rank, link, *which
                self._readers[key] += 1
                if self._readers[key] == len(links.consumers[link]):
                    del self._readers[key]
                    freed += self.received_bytes[links.values[link]]
        self.add(now, rank, -freed)


Key = tuple[int, int]  # a step, and a transfer as items encode it


class Messages:
    """A message begins when it is sent, its receive is posted, and its edge is free.

    An edge is an ordered pair of ranks. Its messages go one by one, because it is one connection.
    Skips have another one; see [Note: skips] in `program`.

    Attributes:
        crossings: For each channel the costs of a value that crosses it.
        arrived: Messages that have arrived, until their receiver has waited for them.
        delivered: Messages that have arrived, until their sender has waited for them.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        program = engine.program
        self.crossings = [engine.costs.crossing(program.links[c.link], c) for c in program.channels]
        # When the first end of a message was ready. It may lie ahead of the event in which it was
        # noted, because hosts take time for messages.
        self._ready = dict[Key, float]()
        self.arrived = set[Key]()
        self.delivered = set[Key]()
        # By source, target, and whether it is the connection of skips.
        self._queues = defaultdict[tuple[int, int, bool], deque[tuple[Key, float]]](deque)

    def ready(self, now: float, key: Key) -> None:
        """One end of a message is ready: its receive is posted, or its value is there to send."""
        if key not in self._ready:
            self._ready[key] = now
            return
        program = self._engine.program
        channel = program.channels[key[1] >> MICROBATCH_BITS]
        queue = self._queues[channel.source, channel.target, channel in program.skips]
        queue.append((key, max(now, self._ready.pop(key))))
        if len(queue) == 1:
            self._engine.events.start(self._pass(queue))

    def _pass(self, queue: deque[tuple[Key, float]]) -> Process:
        """Sends the messages of a connection, one after the other."""
        engine, now = self._engine, -math.inf
        while queue:
            key, ready = queue[0]
            begin = yield max(now, ready)
            number = key[1] >> MICROBATCH_BITS
            _, _, source, target = engine.program.channels[number]
            num_bytes = self.crossings[number].num_bytes
            now = yield engine.network.begin(begin, source, target, num_bytes)
            queue.popleft()
            # Its last byte has left; it arrives after the latency of its link.
            there = now + engine.costs.network.link(source, target).latency_seconds
            engine.record_transfer(source, "transfer", begin, there, key)
            engine.events.at(there, self._arrive, key)

    def _arrive(self, now: float, key: Key) -> None:
        self.arrived.add(key)
        self.delivered.add(key)
        self._engine.events.wake(now, ("receive", key))
        self._engine.events.wake(now, ("send", key))


# How often a ring of n ranks is gone round: n-1 messages one after the other, (n-1)/n of the bytes.
_RINGS = {"all-reduce": 2, "reduce-scatter": 1}
Ends = tuple[int, int, float]  # of a flow: from a rank, to a rank, and how many bytes


class Job(NamedTuple):
    """A reduction of a step, or the parameter sync that belongs to it; the event that it ends."""

    step: int
    number: int
    is_sync: bool


class Collectives:
    """Comm streams: each runs its jobs one by one, and a job needs all its ranks.

    A reduction over the replicas of one pipeline rank leaves and enters that rank's NIC. One
    pipeline represents all, because the other replicas do the same at the same time.

    Attributes:
        launches: For each rank the reductions that leave inside of an action; see `_launches`.
        published: For each rank the reductions whose parameter sync it begins after a step.
        read: For each stage the reductions whose parameter sync its first forward waits for.
        done: Jobs that have ended.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        reductions, schedule = list(enumerate(engine.reductions)), engine.program.schedule
        self._costs = [engine.costs.collectives[own.name] for _, own in reductions]
        self._queues = defaultdict[tuple[int, int], deque[Job]](deque)  # by rank and comm stream
        self._waiting = defaultdict[Job, int](int)  # how many of its ranks have come to it
        self.done = set[Job]()
        ranks = range(schedule.num_ranks)
        self.launches = [self._launches(rank) for rank in ranks]
        self.published = [
            [n for n, own in reductions if own.readers and r in own.ranks] for r in ranks
        ]
        self.read = [
            [n for n, own in reductions if s in own.readers]
            for s in range(len(schedule.stage_to_rank))
        ]

    def come(self, now: float, job: Job, rank: int) -> None:
        """A rank comes to a job: its gradients are complete, or its optimizer has ended."""
        queue = self._queues[rank, self._engine.reductions[job.number].comm_stream]
        queue.append(job)
        if len(queue) == 1:
            self._engine.events.start(self._stream(now, queue, rank))

    def _stream(self, now: float, queue: deque[Job], rank: int) -> Process:
        """Runs the jobs of a comm stream of a rank, one after the other."""
        while queue:
            job = queue[0]
            ranks = self._engine.reductions[job.number].ranks
            # The owner posts its receive when a step begins, before its own gradient is complete.
            is_sent = self._costs[job.number].kind == "send" and not job.is_sync
            needed = (ranks[1:] if is_sent else ()) or ranks
            # A rank that only receives comes to it late, perhaps when it has ended.
            if job not in self.done and rank in needed:
                self._waiting[job] += 1
                if self._waiting[job] == len(needed):
                    del self._waiting[job]
                    self._engine.events.start(self._run(now, job))
            if job not in self.done:
                now = yield job
            queue.popleft()

    def _run(self, now: float, job: Job) -> Process:
        engine, costs, begin = self._engine, self._costs[job.number], now
        fixed = costs.sync_seconds if job.is_sync else costs.seconds
        for ends, latency in self._rounds_of(job) if fixed <= 0 else ():
            flows = [engine.network.begin(now, *own) for own in ends]
            for flow in flows:
                if not flow.has_ended:
                    now = yield flow
            now = yield now + latency
        now = yield now + fixed
        self.done.add(job)
        kind: SpanKind = "parameter sync" if job.is_sync else "reduction"
        for rank in engine.reductions[job.number].ranks:
            engine.record_collective(kind, begin, now, rank=rank, step=job.step, number=job.number)
        engine.events.wake(now, job)

    def _rounds_of(self, job: Job) -> Iterator[tuple[list[Ends], float]]:
        """Yields the rounds of a job: flows that are on their way at once, and their latency.

        Gradients go to an owner from rank to rank, from the last one to the first, and its
        parameters go back the same way. All else goes round in a ring, whose slowest link has
        one message after the other.
        """
        costs, ranks = self._costs[job.number], self._engine.reductions[job.number].ranks
        num_bytes = float(costs.sync_bytes if job.is_sync else costs.num_bytes)
        times = 1 if job.is_sync else _RINGS.get(costs.kind, 0)
        around = times * num_bytes * (costs.num_ranks - 1) / costs.num_ranks
        rounds = [[(a, b, around) for a, b in zip(ranks, (*ranks[1:], ranks[0]), strict=True)]]
        in_a_row = 1 if job.is_sync else max(1, times * (costs.num_ranks - 1))
        if costs.kind == "send" and len(ranks) > 1:
            chain = ranks if job.is_sync else ranks[::-1]
            rounds = [[(*ends, num_bytes)] for ends in pairwise(chain)]
        network = self._engine.costs.network
        for flows in rounds:
            latencies = (
                network.latency_seconds if a == b else network.link(a, b).latency_seconds
                for a, b, _ in flows
            )
            if flows[0][2] > 0:
                yield flows, in_a_row * max(latencies)

    def _launches(self, rank: int) -> dict[int, list[tuple[int, float]]]:
        """Returns the reductions that leave inside of an action, by its position, with a share.

        A reduction leaves after this share of the action. It is the share of the action's bytes up
        to and with the bucket.
        """
        program, reductions = self._engine.program, self._engine.reductions
        queues = defaultdict[int, deque[int]](deque)  # by comm stream
        for number, collective in enumerate(reductions):
            if rank in collective.ranks:
                queues[collective.comm_stream].append(number)
        left = {s for s, holder in enumerate(program.schedule.stage_to_rank) if holder == rank}
        table, position = defaultdict[int, list[int]](list), 0
        for index, item in enumerate(program.decoded(rank)) if queues else ():
            if item.op is Op.COMPUTE:
                position = index
            elif item.op is Op.FINAL:
                left.remove(item.which)
                # A ready reduction waits for one before it, because all ranks need one order.
                for queue in queues.values():
                    while queue and left.isdisjoint(reductions[queue[0]].stages):
                        table[position].append(queue.popleft())
        result = dict[int, list[tuple[int, float]]]()
        for position, numbers in table.items():
            sizes = [self._costs[number].num_bytes for number in numbers]
            total = sum(sizes)
            shares = (done / total if total else 1.0 for done in accumulate(sizes))
            result[position] = list(zip(numbers, shares, strict=True))
        return result
