"""simulate: runs a Program against costs, event by event. What is simulated is what is executed."""

from __future__ import annotations

from dataclasses import dataclass

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
from pipegrad.simulation.engine.flows import Event, Events, FairNetwork
from pipegrad.simulation.engine.ledger import Memory, Recording
from pipegrad.simulation.engine.transport import Collectives, Job, Messages
from pipegrad.simulation.timeline import Span, Timeline

# Plain integers: comparing with members of an enum takes far longer.
_POST, _SEND, _COMPUTE = int(Op.POST_RECEIVE), int(Op.SEND), int(Op.COMPUTE)
_RECEIVE, _RELEASE = int(Op.WAIT_RECEIVE), int(Op.RELEASE)
# A compute waits for the parameters of its stage.
_TRANSFERS, _WAITS = (_POST, _SEND), (_RECEIVE, _RELEASE, _COMPUTE)


@dataclass(frozen=True)
class Simulation:
    """What a simulated run took.

    Attributes:
        step_seconds: How long each step took, from the end of the step before it on all ranks.
        peak_bytes: For each rank the most that it held.
        timeline: What every rank did, and when; None if it was not recorded.
    """

    step_seconds: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    timeline: Timeline | None


def simulate(
    program: Program, costs: Costs, *, num_steps: int = 1, records: bool = True
) -> Simulation:
    """Returns what steps of `program` take, if computing and sending cost what `costs` says.

    The items that are simulated are those that the executor runs. A message begins when it is sent,
    its receive is posted, and the message before it has left. A rank waits where its items wait. A
    bucket leaves inside of the last backward of its stage, after a share of that backward: that of
    the bytes up to this bucket. Parameters come back during the forwards of the next step. Which
    buckets there are is in the costs, since a program has no reductions.

    Args:
        program: What every rank does; `verify` has proven it.
        costs: What that takes; of whole sequences, or of the schedule's chunks of them.
        num_steps: How many steps follow each other.
        records: Whether to record a timeline. Without it, memory and time are saved.

    Raises:
        ScheduleError: If the costs are not those of the program's stages and ranks, or if the
            program cannot end.
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


class _Rank:
    """Where one rank is.

    Attributes:
        position: Of its next item.
        sleeps_since: When it began to wait; below 0 if it does not wait.
    """

    __slots__ = ("number", "position", "sleeps_since", "step")

    def __init__(self, number: int) -> None:
        self.number = number
        self.position = self.step = 0
        self.sleeps_since = -1.0


class _Run:
    """One simulation: time goes on from event to event.

    At an event a rank runs its items, until one takes time or waits for another event.
    """

    def __init__(self, program: Program, costs: Costs, num_steps: int, *, records: bool) -> None:
        self._program = program
        self._costs = costs
        self._num_steps = num_steps
        self._ranks = [_Rank(number) for number in range(len(program.items))]
        self._events = events = Events()
        self._reductions = costs.reductions(program.schedule.stage_to_rank)
        names = [collective.name for collective in self._reductions]
        self._recording = recording = Recording(program, names, records=records)
        network = FairNetwork(costs.network, events)
        self._messages = Messages(
            program, costs, events=events, network=network, recording=recording
        )
        self._collectives = Collectives(
            program, costs, events=events, network=network, recording=recording
        )
        self._memory = Memory(program, costs, records=records)
        self._crossings = self._messages.crossings
        self._optimizer_seconds = [0.0] * len(self._ranks)
        if not program.forward_only:
            for stage, holder in zip(costs.stages, program.schedule.stage_to_rank, strict=True):
                self._optimizer_seconds[holder] += stage.optimizer_seconds
        self._seconds = [stage.seconds(kind) for stage in costs.stages for kind in KINDS]
        self._step_ends = [0.0] * num_steps
        self._num_ended = [0] * num_steps
        self._met = list[_Rank]()

    def result(self) -> Simulation:
        """Runs all steps."""
        for rank in self._ranks:
            self._events.at(0.0, self._begin_step, rank)
        self._events.run()
        if self._num_ended[-1] < len(self._ranks):
            raise ScheduleError(
                f"schedule {self._program.schedule.name!r} cannot end: ranks wait for each other; "
                f"`verify` shows which"
            )
        begins = [0.0, *self._step_ends[:-1]]
        seconds = (end - begin for begin, end in zip(begins, self._step_ends, strict=True))
        timeline = None
        if self._recording.spans is not None:
            schedule = self._program.schedule
            timeline = Timeline(
                name=schedule.name,
                source="predicted",
                num_ranks=schedule.num_ranks,
                stage_to_rank=schedule.stage_to_rank,
                num_microbatches=schedule.num_microbatches,
                spans=tuple(self._recording.spans),
                step_ends=tuple(self._step_ends),
                memory=tuple(map(tuple, self._memory.points)),
                links=self._program.links,
                collectives=self._reductions,
            )
        return Simulation(tuple(seconds), tuple(self._memory.peak), timeline)

    # A step of a rank.

    def _begin_step(self, now: float, rank: _Rank) -> None:
        rank.position = 0
        self._after(now, rank, self._costs.host.step_seconds)

    def _after(self, now: float, rank: _Rank, host_seconds: float) -> None:
        """Lets a rank go on after time of its host."""
        self._recording.add(rank.number, "host", now, now + host_seconds, rank.step)
        if host_seconds > 0:
            self._events.at(now + host_seconds, self._go_on, rank)
        else:
            self._go_on(now, rank)

    def _go_on(self, now: float, rank: _Rank) -> None:
        """Runs the items of a rank until one takes time, or waits."""
        items = self._program.items[rank.number]
        clock = now  # ahead of now by what the host takes for messages
        while rank.position < len(items):
            code = items[rank.position]
            op, which = code & OP_MASK, code >> OP_BITS
            if op == _COMPUTE and self._unsynced(rank, which) is None:
                self._compute(now, clock, rank, which)
                return
            if op in _TRANSFERS:
                clock = self._transfer(clock, rank, op, which)
            elif op in _WAITS:
                if clock > now:  # what this rank waits for may happen until then
                    break
                if not self._has_happened(now, rank, op, which):
                    return
                if op == _RECEIVE:
                    decoding = self._crossings[which >> MICROBATCH_BITS].decode_seconds
                    clock += self._costs.host.message_seconds + decoding
            rank.position += 1
        self._recording.add(rank.number, "host", now, clock, rank.step)
        if clock > now:
            self._events.at(clock, self._go_on, rank)
        else:
            self._finish(now, rank)

    def _transfer(self, clock: float, rank: _Rank, op: int, which: int) -> float:
        """Posts a receive or sends; returns when the host has done so."""
        channel = which >> MICROBATCH_BITS
        if op == _POST:
            self._memory.post(clock, rank.number, channel)
            self._messages.post(clock, rank.step, which)
            return clock
        clock += self._costs.host.message_seconds + self._crossings[channel].encode_seconds
        self._memory.send(clock, rank.number, channel)
        self._messages.send(clock, rank.step, which)
        return clock

    def _compute(self, now: float, clock: float, rank: _Rank, which: int) -> None:
        """Begins an action; the rank goes on when it has ended."""
        index, microbatch = which >> MICROBATCH_BITS, which & MICROBATCH_MASK
        stage, kind = index >> KIND_BITS, index & KIND_MASK
        begin = clock + self._costs.host.action_seconds
        end = begin + self._seconds[index]
        number, step = rank.number, rank.step
        self._recording.add(number, "host", now, begin, step)
        self._recording.compute(Span(number, KINDS[kind], begin, end, step, stage, microbatch))
        self._memory.begin(begin, number, stage, kind)
        for collective, share in self._collectives.launches[number].get(rank.position, ()):
            leaves = begin + share * (end - begin)
            job = Job(step, collective, is_sync=False)
            self._events.at(leaves, self._collectives.come, job, number)
        rank.position += 1
        self._events.at(end, self._end_compute, rank, stage, kind, microbatch)

    def _end_compute(self, now: float, rank: _Rank, stage: int, kind: int, microbatch: int) -> None:
        self._memory.end(now, rank.number, stage, kind, step=rank.step, microbatch=microbatch)
        self._go_on(now, rank)

    # Waits.

    def _has_happened(self, now: float, rank: _Rank, op: int, which: int) -> bool:
        """Returns whether a rank can pass a wait; if not, the rank sleeps until it can."""
        if op == _COMPUTE:
            job = self._unsynced(rank, which)
            return job is None or self._sleep(now, rank, job.event)
        key, messages = (rank.step, which), self._messages
        channel, microbatch = which >> MICROBATCH_BITS, which & MICROBATCH_MASK
        arrived = messages.arrived if op == _RECEIVE else messages.delivered
        if key not in arrived:
            return self._sleep(now, rank, ("receive" if op == _RECEIVE else "send", *key))
        arrived.remove(key)
        if op == _RELEASE:
            self._memory.send(now, rank.number, channel, sign=-1)
        self._recording.transfer(
            rank.number,
            "wait for receive" if op == _RECEIVE else "wait for send",
            self._slept_since(now, rank),
            now,
            rank.step,
            channel=channel,
            microbatch=microbatch,
        )
        return True

    def _unsynced(self, rank: _Rank, which: int) -> Job | None:
        stage = which >> MICROBATCH_BITS + KIND_BITS
        return self._collectives.unsynced(rank.step, stage)

    def _sleep(self, now: float, rank: _Rank, event: Event) -> bool:
        """Lets a rank sleep until an event; returns that it cannot go on."""
        rank.sleeps_since = now

        def wake(then: float) -> None:
            kind = event[0]
            if kind in ("sync", "reduction"):
                self._recording.collective(
                    rank.number,
                    "wait for parameters" if kind == "sync" else "wait for reduction",
                    rank.sleeps_since,
                    then,
                    step=rank.step,
                    number=event[2],
                )
                rank.sleeps_since = -1.0
            self._go_on(then, rank)

        self._events.sleep(event, wake)
        return False

    @staticmethod
    def _slept_since(now: float, rank: _Rank) -> float:
        since, rank.sleeps_since = rank.sleeps_since, -1.0
        return since if since >= 0 else now

    # The end of a step.

    def _finish(self, now: float, rank: _Rank) -> None:
        """Waits for the reductions of a rank, and for the other ranks if all meet."""
        job = self._collectives.unfinished(rank.step, rank.number)
        if job is not None:
            self._sleep(now, rank, job.event)
            return
        rank.sleeps_since = now
        if not self._costs.ranks_meet or self._program.forward_only:
            self._step_parameters(now, rank)
            return
        self._met.append(rank)
        if len(self._met) == len(self._ranks):
            met, self._met = self._met, []
            for other in met:
                self._events.at(now + self._costs.meeting_seconds, self._step_parameters, other)

    def _step_parameters(self, now: float, rank: _Rank) -> None:
        """Runs the optimizer; then the rank publishes its parameters."""
        since = self._slept_since(now, rank)
        self._recording.add(rank.number, "wait for ranks", since, now, rank.step)
        seconds = self._optimizer_seconds[rank.number]
        self._recording.add(rank.number, "optimizer", now, now + seconds, rank.step)
        self._events.at(now + seconds, self._end_step, rank)

    def _end_step(self, now: float, rank: _Rank) -> None:
        step = rank.step
        for number in self._collectives.published[rank.number]:
            self._collectives.come(now, Job(step, number, is_sync=True), rank.number)
        self._num_ended[step] += 1
        self._step_ends[step] = max(self._step_ends[step], now)
        rank.step += 1
        if rank.step < self._num_steps:
            self._begin_step(now, rank)
