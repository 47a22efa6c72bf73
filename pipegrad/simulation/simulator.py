"""simulate: runs the items of a Program, which the executor runs too, with costs, as events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from pipegrad.errors import ScheduleError
from pipegrad.schedules.program.program import (
    KIND_BITS,
    KIND_MASK,
    KINDS,
    MICROBATCH_BITS,
    MICROBATCH_MASK,
    OP_BITS,
    OP_MASK,
    Op,
    Program,
)
from pipegrad.simulation.costs import Costs
from pipegrad.simulation.engine.flows import Events, FairNetwork, Process
from pipegrad.simulation.engine.transport import Collectives, Engine, Job, Key, Memory, Messages
from pipegrad.simulation.timeline import Span, SpanKind, Timeline

# Plain integers, because comparing with members of an enum takes far longer.
_POST, _SEND, _COMPUTE = int(Op.POST_RECEIVE), int(Op.SEND), int(Op.COMPUTE)
_RECEIVE, _RELEASE = int(Op.WAIT_RECEIVE), int(Op.RELEASE)


@dataclass(frozen=True)
class Simulation:
    """The times and the memory of a simulated run.

    Attributes:
        step_seconds: Duration of each step, from the end of the step before it on all ranks.
        peak_bytes: The most bytes that each rank held.
        timeline: The spans of every rank; None if they were not recorded.
    """

    step_seconds: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    timeline: Timeline | None


def simulate(
    program: Program, costs: Costs, *, num_steps: int = 1, records: bool = True
) -> Simulation:
    """Returns the times and the memory of steps of `program` with `costs`.

    For example, ``simulate(lower(schedule), costs).step_seconds[0]`` is the time of the first step.

    It simulates the items that the executor runs. A message begins when it is sent, its receive is
    posted, and the message before it has left. A rank waits where its items wait. A bucket leaves
    inside of the last backward of its stage, after the share of this backward that the bytes up to
    the bucket have. Parameters come back during the forwards of the next step. The costs list the
    buckets, because a program has no reductions.

    Args:
        program: The items of every rank; `verify` has proven them.
        costs: Costs of whole sequences, or of the schedule's chunks of them.
        num_steps: Number of steps, one after the other.
        records: True to record a timeline. Without it, memory and time are saved.

    Raises:
        ScheduleError: If the costs do not fit the program's stages and ranks, or if the program
            cannot end.
    """
    _check(program, costs, num_steps)
    costs = costs.of_chunks(program.schedule.chunks)
    return _Run(program, costs, num_steps, records=records).result()


def _check(program: object, costs: object, num_steps: int) -> None:
    if not isinstance(program, Program):
        raise ScheduleError(
            f"program is a {type(program).__name__}, expected a Program: scheduler.program, or "
            f"pipegrad.schedules.lower(schedule)"
        )
    if not isinstance(costs, Costs):
        raise ScheduleError(
            f"costs is a {type(costs).__name__}, expected Costs: Costs.from_json reads data"
        )
    schedule, hosts = program.schedule, costs.network.hosts
    if len(costs.stages) != len(schedule.stage_to_rank):
        raise ScheduleError(
            f"there are costs of {len(costs.stages)} stages, and schedule {schedule.name!r} has "
            f"{len(schedule.stage_to_rank)}: give costs for each stage"
        )
    if hosts and len(hosts) != schedule.num_ranks:
        raise ScheduleError(
            f"network.hosts has {len(hosts)} hosts, and schedule {schedule.name!r} has "
            f"{schedule.num_ranks} ranks: give the host of each rank, or none"
        )
    connected = [
        *((x.source, x.target) for x in costs.network.links),
        *(x.ranks for x in costs.codecs),
    ]
    if far := next((ends for ends in connected if max(ends) >= schedule.num_ranks), None):
        raise ScheduleError(
            f"the costs have a link or a codec between the ranks {list(far)}, and schedule "
            f"{schedule.name!r} has the ranks 0 to {schedule.num_ranks - 1} of a pipeline"
        )
    of_stages = (s for own in costs.collectives.values() for s in (*own.stages, *own.readers))
    if unknown := next((stage for stage in of_stages if stage >= len(costs.stages)), None):
        raise ScheduleError(
            f"the costs have a reduction of stage {unknown}, and schedule {schedule.name!r} has "
            f"the stages 0 to {len(costs.stages) - 1}"
        )
    if num_steps < 1:
        raise ScheduleError(f"num_steps is {num_steps}, expected at least 1")


@dataclass
class _Rank:
    """The position of one rank; `clock` is ahead of `now` by its host's time for messages."""

    number: int
    step: int = 0
    now: float = 0.0
    clock: float = 0.0


class _Run:
    """One simulation. Each rank is a process that runs its items."""

    def __init__(self, program: Program, costs: Costs, num_steps: int, *, records: bool) -> None:
        events = Events()
        network = FairNetwork(costs.network, events)
        ranks = program.schedule.stage_to_rank
        reductions = () if program.forward_only else costs.reductions(ranks)
        spans: list[Span] | None = [] if records else None
        self._engine = engine = Engine(program, costs, events, network, reductions, spans)
        self._messages = Messages(engine)
        self._collectives = Collectives(engine)
        self._memory = Memory(engine)
        self._num_steps = num_steps
        self._seconds = [stage.seconds(kind) for stage in costs.stages for kind in KINDS]
        self._step_ends = [0.0] * num_steps
        self._num_ended = 0  # ranks
        self._num_met = [0] * num_steps

    def result(self) -> Simulation:
        """Runs all steps."""
        engine, schedule = self._engine, self._engine.program.schedule
        for rank in range(schedule.num_ranks):
            engine.events.start(self._steps(_Rank(rank)))
        engine.events.run()
        if self._num_ended < schedule.num_ranks:
            raise ScheduleError(
                f"schedule {schedule.name!r} cannot end: ranks wait for each other; "
                f"`verify` shows which"
            )
        seconds = (end - begin for begin, end in pairwise([0.0, *self._step_ends]))
        timeline = None
        if engine.spans is not None:
            timeline = Timeline(
                name=schedule.name,
                source="predicted",
                num_ranks=schedule.num_ranks,
                stage_to_rank=schedule.stage_to_rank,
                num_microbatches=schedule.num_microbatches,
                spans=tuple(engine.spans),
                step_ends=tuple(self._step_ends),
                memory=tuple(map(tuple, self._memory.points)),
                links=engine.program.links,
                collectives=engine.reductions,
            )
        return Simulation(tuple(seconds), tuple(self._memory.peak), timeline)

    def _steps(self, rank: _Rank) -> Process:
        """Runs all steps of a rank."""
        engine, number, collectives = self._engine, rank.number, self._collectives
        costs, record, is_training = engine.costs, engine.record, not engine.program.forward_only
        ranks = engine.program.schedule.stage_to_rank
        own = (s for s, holder in zip(costs.stages, ranks, strict=True) if holder == number)
        optimizer_seconds = sum(stage.optimizer_seconds for stage in own) * is_training
        for step in range(self._num_steps):
            rank.step = step
            begin, rank.now = rank.now, (yield rank.now + costs.host.step_seconds)
            record(number, "host", begin, rank.now, step)
            yield from self._items(rank)
            launched = (
                n for of_action in collectives.launches[number].values() for n, _ in of_action
            )
            jobs = [Job(step, n, is_sync=False) for n in launched]
            yield from self._finish(rank, "wait for reduction", jobs)
            begin = rank.now
            if costs.ranks_meet and is_training:
                self._num_met[step] += 1
                if self._num_met[step] == len(engine.program.items):
                    engine.events.at(
                        begin + costs.meeting_seconds, engine.events.wake, ("meeting", step)
                    )
                rank.now = yield "meeting", step
            record(number, "wait for ranks", begin, rank.now, step)
            begin, rank.now = rank.now, (yield rank.now + optimizer_seconds)
            record(number, "optimizer", begin, rank.now, step)
            for sync in collectives.published[number]:
                collectives.come(rank.now, Job(step, sync, is_sync=True), number)
            self._step_ends[step] = max(self._step_ends[step], rank.now)
        self._num_ended += 1

    def _items(self, rank: _Rank) -> Process:
        """Runs the items of a step."""
        engine, messages, memory = self._engine, self._messages, self._memory
        host_seconds = engine.costs.host.message_seconds
        rank.clock = rank.now
        for position, code in enumerate(engine.program.items[rank.number]):
            op, which = code & OP_MASK, code >> OP_BITS
            channel = which >> MICROBATCH_BITS
            if op == _COMPUTE:
                yield from self._compute(rank, position, which)
            elif op == _POST:
                memory.add(rank.clock, rank.number, memory.received_bytes[channel])
                messages.ready(rank.clock, (rank.step, which))
            elif op == _SEND:
                rank.clock += host_seconds + messages.crossings[channel].encode_seconds
                memory.add(rank.clock, rank.number, memory.sent_bytes[channel])
                messages.ready(rank.clock, (rank.step, which))
            elif op == _RECEIVE:
                yield from self._wait(rank, which, "receive", messages.arrived)
                rank.clock += host_seconds + messages.crossings[channel].decode_seconds
            elif op == _RELEASE:
                yield from self._wait(rank, which, "send", messages.delivered)
                memory.add(rank.now, rank.number, -memory.sent_bytes[channel])
        yield from self._catch_up(rank)

    def _catch_up(self, rank: _Rank) -> Process:
        """Lets the host finish. The next event of the rank may happen meanwhile."""
        if rank.clock > rank.now:
            self._engine.record(rank.number, "host", rank.now, rank.clock, rank.step)
            rank.now = yield rank.clock

    def _wait(
        self, rank: _Rank, which: int, what: Literal["receive", "send"], happened: set[Key]
    ) -> Process:
        """Waits for a message that arrives, or that is sent."""
        yield from self._catch_up(rank)
        begin, key = rank.now, (rank.step, which)
        if key not in happened:
            rank.now = rank.clock = yield what, key
        happened.remove(key)
        kind: SpanKind = "wait for receive" if what == "receive" else "wait for send"
        self._engine.record_transfer(rank.number, kind, begin, rank.now, key)

    def _finish(self, rank: _Rank, kind: SpanKind, jobs: Iterable[Job]) -> Process:
        """Waits for collectives, one after the other."""
        for job in jobs:
            if job not in self._collectives.done:
                yield from self._catch_up(rank)
            begin = rank.now
            if job not in self._collectives.done:  # it may have ended meanwhile
                rank.now = rank.clock = yield job
            self._engine.record_collective(
                kind, begin, rank.now, rank=rank.number, step=rank.step, number=job.number
            )

    def _compute(self, rank: _Rank, position: int, which: int) -> Process:
        """Waits for the parameters of an action, and runs it."""
        engine, number, step = self._engine, rank.number, rank.step
        index, microbatch = which >> MICROBATCH_BITS, which & MICROBATCH_MASK
        stage, kind = index >> KIND_BITS, KINDS[index & KIND_MASK]
        if step > 0 and (syncs := self._collectives.read[stage]):
            jobs = (Job(step - 1, sync, is_sync=True) for sync in syncs)
            yield from self._finish(rank, "wait for parameters", jobs)
        begin = rank.clock + engine.costs.host.action_seconds
        end = begin + self._seconds[index]
        engine.record(number, "host", rank.now, begin, step)
        engine.record(number, kind, begin, end, step, stage, microbatch)
        self._memory.add(begin, number, self._memory.filled_bytes[index])
        for collective, share in self._collectives.launches[number].get(position, ()):
            job, leaves = Job(step, collective, is_sync=False), begin + share * (end - begin)
            engine.events.at(leaves, self._collectives.come, job, number)
        rank.now = rank.clock = yield end
        self._memory.end(end, number, stage, kind, which=(step, microbatch))
