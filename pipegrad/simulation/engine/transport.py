"""Transport: the messages and collectives of a simulation, and what they wait for."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from itertools import accumulate, pairwise
from typing import NamedTuple

from pipegrad.schedules.program.program import MICROBATCH_BITS, Op, Program
from pipegrad.simulation.costs import CollectiveCosts, Costs
from pipegrad.simulation.engine.flows import Events, FairNetwork, Process
from pipegrad.simulation.engine.ledger import Recording
from pipegrad.simulation.timeline import SpanKind

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

    def post(self, now: float, key: Key) -> None:
        """The receiver is ready."""
        if key in self._sent:
            self._enqueue(max(now, self._sent.pop(key)), key)
        else:
            self._posted[key] = now

    def send(self, now: float, key: Key) -> None:
        """The sender is ready."""
        if key in self._posted:
            self._enqueue(max(now, self._posted.pop(key)), key)
        else:
            self._sent[key] = now

    def _enqueue(self, ready: float, key: Key) -> None:
        channel = self._program.channels[key[1] >> MICROBATCH_BITS]
        is_skip = channel in self._program.skips
        queue = self._queues[channel.source, channel.target, is_skip]
        queue.append((key, ready))
        if len(queue) == 1:
            self._events.start(self._pass(queue))

    def _pass(self, queue: deque[tuple[Key, float]]) -> Process:
        """Sends the messages of a connection, one after the other."""
        now = -math.inf
        while queue:
            key, ready = queue[0]
            begin = yield max(now, ready)
            number = key[1] >> MICROBATCH_BITS
            _, _, source, target = self._program.channels[number]
            now = yield self._network.begin(begin, source, target, self.crossings[number].num_bytes)
            queue.popleft()
            # Its last byte has left; it arrives after the latency of its link.
            there = now + self._costs.link(source, target).latency_seconds
            self._recording.transfer(source, "transfer", begin, there, key)
            self._events.at(there, self._arrive, key)

    def _arrive(self, now: float, key: Key) -> None:
        self.arrived.add(key)
        self.delivered.add(key)
        self._events.wake(now, ("receive", key))
        self._events.wake(now, ("send", key))


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

    Attributes:
        launches: For each rank what leaves inside of an action; see `_launches`.
        published: For each rank the reductions whose parameter sync it begins after a step.

    A reduction over the replicas of one pipeline rank leaves and enters that rank's NIC. The other
    replicas do the same at the same time, so one pipeline stands for all.
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
        self._forward_only = program.forward_only
        self._costs = costs
        self._reductions = costs.reductions(program.schedule.stage_to_rank)
        self._events = events
        self._network = network
        self._recording = recording
        self._queues = defaultdict[tuple[int, int], deque[Job]](deque)  # by rank and comm stream
        self._waiting = defaultdict[Job, int](int)  # how many of its ranks have come to it
        self._done = set[Job]()
        ranks = range(len(program.items))
        self.launches = [self._launches(program, rank) for rank in ranks]
        self._own = [[n for own in table.values() for n, _ in own] for table in self.launches]
        self._readers = defaultdict[int, list[int]](list)  # stage -> syncs that write to it
        self.published: list[list[int]] = [[] for _ in ranks]
        for number, collective in enumerate(self._reductions):
            for stage in collective.readers:
                self._readers[stage].append(number)
            if collective.readers and not program.forward_only:
                for rank in collective.ranks:
                    self.published[rank].append(number)

    def come(self, now: float, job: Job, rank: int) -> None:
        """A rank comes to a job: its gradients are complete, or its optimizer has ended."""
        queue = self._queues[rank, self._reductions[job.number].comm_stream]
        queue.append(job)
        if len(queue) == 1:
            self._events.start(self._stream(now, queue, rank))

    def unfinished(self, step: int, rank: int) -> Job | None:
        """Returns a reduction of a rank that has not ended."""
        jobs = (Job(step, number, is_sync=False) for number in self._own[rank])
        return next((job for job in jobs if job not in self._done), None)

    def unsynced(self, step: int, stage: int) -> Job | None:
        """Returns a parameter sync that a stage still waits for, in its first use of a step."""
        if self._forward_only:  # no step before it has an optimizer
            return None
        jobs = (Job(step - 1, number, is_sync=True) for number in self._readers.get(stage, ()))
        return next((job for job in jobs if step > 0 and job not in self._done), None)

    def _stream(self, now: float, queue: deque[Job], rank: int) -> Process:
        """Runs the jobs of a comm stream of a rank, one after the other."""
        while queue:
            job = queue[0]
            ranks = self._reductions[job.number].ranks
            # The owner posts its receive when a step begins, before its own gradient is complete.
            is_sent = self._costs_of(job).kind == "send" and not job.is_sync
            needed = (ranks[1:] if is_sent else ()) or ranks
            # A rank that only receives comes to it late, perhaps when it has ended.
            if job not in self._done and rank in needed:
                self._waiting[job] += 1
                if self._waiting[job] == len(needed):
                    del self._waiting[job]
                    self._events.start(self._run(now, job))
            if job not in self._done:
                now = yield job
            queue.popleft()

    def _run(self, now: float, job: Job) -> Process:
        costs, begin = self._costs_of(job), now
        fixed = costs.sync_seconds if job.is_sync else costs.seconds
        for ends in self._rounds_of(job) if fixed <= 0 else ():
            flows = [self._network.begin(now, *own) for own in ends]
            for flow in flows:
                if not flow.has_ended:
                    now = yield flow
            now = yield now + self._latency(job, ends)
        now = yield now + fixed
        self._done.add(job)
        kind: SpanKind = "parameter sync" if job.is_sync else "reduction"
        for rank in self._reductions[job.number].ranks:
            self._recording.collective(
                kind, begin, now, rank=rank, step=job.step, number=job.number
            )
        self._events.wake(now, job)

    def _rounds_of(self, job: Job) -> list[list[Ends]]:
        """Returns what is sent: flows of one round are on their way at once.

        What is sent to an owner goes from rank to rank, from the last one to the first, and its
        parameters go back the same way. All else goes round in a ring.
        """
        costs, ranks = self._costs_of(job), self._reductions[job.number].ranks
        num_bytes = float(costs.sync_bytes if job.is_sync else costs.num_bytes)
        if costs.kind == "send" and len(ranks) > 1:
            chain = ranks if job.is_sync else ranks[::-1]
            rounds = [[(*ends, num_bytes)] for ends in pairwise(chain)]
        else:
            share = (costs.num_ranks - 1) / costs.num_ranks
            around = share * num_bytes * (1 if job.is_sync else _RINGS.get(costs.kind, 0))
            rounds = [[(a, b, around) for a, b in zip(ranks, (*ranks[1:], ranks[0]), strict=True)]]
        return [flows for flows in rounds if flows[0][2] > 0]

    def _latency(self, job: Job, flows: list[Ends]) -> float:
        """Returns the latency of a round: that of its slowest link, for each message in a row."""
        costs = self._costs_of(job)
        network = self._costs.network
        slowest = max(
            network.latency_seconds if a == b else network.link(a, b).latency_seconds
            for a, b, _ in flows
        )
        if costs.kind == "send" or job.is_sync:
            return slowest
        return slowest * max(1, _RINGS[costs.kind] * (costs.num_ranks - 1))

    def _costs_of(self, job: Job) -> CollectiveCosts:
        return self._costs.collectives[self._reductions[job.number].name]

    def _launches(self, program: Program, rank: int) -> dict[int, list[tuple[int, float]]]:
        """Returns what leaves inside of an action: by its position the reductions, and when.

        When: the share of the action that has passed. It is that of the bytes up to and with a
        bucket.
        """
        queues = defaultdict[int, deque[int]](deque)  # by comm stream
        for number, collective in enumerate(self._reductions):
            if rank in collective.ranks:
                queues[collective.comm_stream].append(number)
        left = {s for s, holder in enumerate(program.schedule.stage_to_rank) if holder == rank}
        table, position = defaultdict[int, list[int]](list), 0
        for index, item in enumerate(program.decoded(rank)):
            if item.op is Op.COMPUTE:
                position = index
            elif item.op is Op.FINAL:
                left.remove(item.which)
                # What is ready waits behind what is not, so all ranks have one order.
                for queue in queues.values():
                    while queue and left.isdisjoint(self._reductions[queue[0]].stages):
                        table[position].append(queue.popleft())
        result = dict[int, list[tuple[int, float]]]()
        for position, numbers in table.items():
            names = (self._reductions[number].name for number in numbers)
            sizes = [self._costs.collectives[name].num_bytes for name in names]
            total = sum(sizes)
            shares = (done / total if total else 1.0 for done in accumulate(sizes))
            result[position] = list(zip(numbers, shares, strict=True))
        return result
