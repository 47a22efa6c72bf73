"""record: the timeline of the real training steps of a `Scheduler`.

with pipegrad.record(scheduler) as recording:
    for x, y in data:
        scheduler.step(x, target=y)
        optimizer.step()
recording.timeline().save(Path("timeline.json"))

Ranks of one machine share `time.perf_counter`. Others do not, and their clocks drift. The first
rank of a pipeline answers each other rank with its time. It reads this time after the question was
sent and before the answer arrives. Therefore the fastest of some round trips bounds the error by
half of its time.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

import torch
import torch.distributed as dist

from pipegrad.comm import sync_points
from pipegrad.comm.agreement import agree
from pipegrad.errors import ScheduleError
from pipegrad.limits import num_cores
from pipegrad.observe.links import machine_name
from pipegrad.observe.measured_costs import reductions_of
from pipegrad.observe.step_recorder import Recorded, StepRecorder, stamps_of
from pipegrad.pipeline.edges import Edges
from pipegrad.pipeline.scheduler import Scheduler
from pipegrad.schedules.program.program import Program
from pipegrad.simulation.costs import Costs
from pipegrad.simulation.explain.explanation import Explanation, explain
from pipegrad.simulation.timeline import ON_RANK, Collective, Span, Timeline

_PINGS = 32
# An item that does not wait takes this long on a busy host. A shorter wait is host time.
_LEAST_WAIT_SECONDS = 20e-6
_ITEM_WAITS = ("wait for receive", "wait for send", "wait for parameters")
ANSWERED = sync_points.WaitWork("clocks.answered", "a time is read that is still arriving")

Ping = Callable[[], float]  # requests the first rank's time, and returns it


class Reading(NamedTuple):
    """A rank's clock at one time.

    Attributes:
        seconds: Time by its own clock.
        offset: Number to add to its clock to get the clock of the first rank.
        error: Largest error of the offset.
        machine: Id of the machine; ranks with the same one share a clock. "" if it is not known.
    """

    seconds: float
    offset: float = 0.0
    error: float = 0.0
    machine: str = ""


class Clock(NamedTuple):
    """The clock of one rank, from a reading before a run to one after it."""

    before: Reading
    after: Reading

    def aligned(self, seconds: float) -> float:
        """Returns a time of this clock by the clock of the first rank; the drift is even."""
        (begin, first, *_), (end, last, *_) = self
        share = (seconds - begin) / (end - begin) if end > begin else 1.0
        return seconds + first + (last - first) * share


def clocks_of(before: Sequence[Reading], after: Sequence[Reading]) -> tuple[Clock, ...]:
    """Returns the clock of each rank, from the readings of all ranks."""
    return tuple(map(Clock, _with_shared(before), _with_shared(after)))


def _with_shared(readings: Sequence[Reading]) -> list[Reading]:
    """Returns readings; a rank that shares the clock of the first rank has no offset."""
    machine = readings[0].machine
    return [
        # A container may have a separate clock. Then the offset is larger than its error.
        r._replace(offset=0.0, error=0.0)
        if r.machine == machine != "" and abs(r.offset) <= r.error
        else r
        for r in readings
    ]


def read_clock(edges: Edges, rank: int, num_ranks: int) -> Reading:
    """Returns the offset of this rank's clock from the clock of its pipeline's first rank.

    All ranks of the pipeline call it, between steps.
    """
    machine = machine_name()
    if rank == 0:
        for peer in range(1, num_ranks):
            group, peer_there = edges.host(peer)
            for _ in range(_PINGS):
                _receive(group, peer_there)
                _send(group, peer_there, time.perf_counter())
        return Reading(time.perf_counter(), machine=machine)
    group, first = edges.host(0)

    def ping() -> float:
        _send(group, first, 0.0)
        return _receive(group, first)

    return fastest(ping, machine)


def fastest(ping: Ping, machine: str) -> Reading:
    """Returns the reading of the fastest of some round trips."""
    readings = list[Reading]()
    for _ in range(_PINGS):
        asked = time.perf_counter()
        offset = ping() - asked
        answered = time.perf_counter()
        error = (answered - asked) / 2
        readings.append(Reading(answered, offset - error, error, machine))
    return min(readings, key=attrgetter("error"))


def _send(group: dist.ProcessGroup, peer: int, number: float) -> None:
    message = torch.tensor([number], dtype=torch.float64)
    ANSWERED(sync_points.in_use.send(group, message, peer, 0))


def _receive(group: dist.ProcessGroup, peer: int) -> float:
    message = torch.empty(1, dtype=torch.float64)
    ANSWERED(sync_points.in_use.receive(group, message, peer, 0))
    return message.item()


@contextmanager
def record(scheduler: Scheduler, *, steps: int = 3) -> Iterator[Recording]:
    """Records the training steps that `scheduler` makes inside, and the time between them.

    All ranks enter together. It costs less than one percent of a step, and without it recording
    costs nothing. One recording of a Scheduler runs at a time. A step that fails is recorded as far
    as it went.

    Args:
        scheduler: The Scheduler whose steps are recorded.
        steps: Number of the last steps that are kept.

    Raises:
        ScheduleError: On all ranks, if `steps` is no number above 0, or if another recording runs.
        AgreementError: If a rank does not enter.
    """
    recording = Recording(scheduler, steps)
    try:
        yield recording
    finally:
        recording.stop()


class Recording:
    """A recording of the steps of a `Scheduler` on this rank. `record` creates it.

    Both ranks of a message record it. It begins when its sender's program sends it. In a timeline,
    it has arrived when its receiver has waited for it. The receiver cannot measure the arrival: if
    it waited for no time, the message may have been there long before. Therefore a transfer in a
    measured timeline is the longest possible one.
    """

    def __init__(self, scheduler: Scheduler, steps: object) -> None:
        topology = scheduler.topology
        self._scheduler = scheduler
        self._ranks = topology.ranks_along(topology.pipeline)
        self._rank = topology.coordinate(topology.pipeline)
        self._tape = tape = scheduler.sync.tape

        def checked() -> int:
            if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
                raise ScheduleError(f"steps is {steps!r}, expected a number of steps, at least 1")
            if tape.recorder is not None:
                raise ScheduleError("this Scheduler is being recorded: end that recording first")
            scheduler.sync.refuse_closed()
            if scheduler.steps.edges.is_cut:
                raise ScheduleError(
                    "an interrupted step has cut this Scheduler's connections: make another one"
                )
            return steps

        self._since = time.process_time(), time.perf_counter()
        self._busy = 0.0  # cores that this process has used, when the recording has ended
        steps_kept = min(agree("recording", checked, ranks=self._ranks))
        self._before = self._read_clocks()
        sync = scheduler.sync
        plan, buckets = sync.plan, {bucket.index: bucket for bucket in sync.plan.buckets}
        stage_to_rank = scheduler.program.schedule.stage_to_rank
        unmeasured = Costs((), collectives=reductions_of(sync))
        self._collectives = unmeasured.reductions(stage_to_rank)
        self._recorder = tape.recorder = StepRecorder(
            self._rank,
            stamps_of(sync.device),
            steps=steps_kept,
            names={(x.bucket, x.step): buckets[x.bucket].name_of(x.step) for x in plan.launches},
            collectives=self._collectives,
        )

    def stop(self) -> None:
        """Ends the recording on this rank; the end of `record` calls it."""
        self._busy = self._busy or self._used_cores()
        self._recorder.stop()
        if self._tape.recorder is self._recorder:
            self._tape.recorder = None

    def timeline(self) -> Timeline:
        """Returns the timeline of all ranks of this rank's pipeline, by one clock.

        All ranks of the pipeline call it, between steps; inside of `record` or after it.

        Sync: waits for the device.

        Raises:
            ScheduleError: If no step was recorded on all ranks.
            AgreementError: If a rank does not call it.
        """
        replies = agree("the recorded steps", self._read, ranks=self._ranks)
        owns, layers, busy = zip(*replies, strict=True)
        after = self._read_clocks()
        clocks = clocks_of(self._before, after)
        made = assembled(owns, clocks, self._program, self._collectives)
        names = {stage: own for of_rank in layers for stage, own in of_rank.items()}
        known = all(names.values()) and len(names) == len(made.stage_to_rank)
        notes = {**made.notes, **self._notes(busy)}
        of_stages = tuple(names[stage] for stage in sorted(names)) if known else ()
        return replace(made, notes=notes, layers=of_stages)

    def explain(self) -> Explanation:
        """Returns the explanation of the median recorded step; as text, it is one sentence.

        All ranks of the pipeline call it, as `timeline`.

        Raises:
            ScheduleError: If no step was recorded on all ranks.
            AgreementError: If a rank does not call it.
        """
        return explain(self.timeline())

    def _read(self) -> tuple[Recorded, dict[int, dict[str, float]], float]:
        stages = self._scheduler.steps.pipeline.stages
        layers = {stage.index: dict(stage.layers) for stage in stages}
        return self._recorder.read(), layers, self._busy or self._used_cores()

    def _used_cores(self) -> float:
        cpu, began = self._since
        return (time.process_time() - cpu) / (time.perf_counter() - began)

    def _notes(self, busy: Sequence[float]) -> dict[str, str | float]:
        """Returns facts about a run that an explanation needs in addition to its spans."""
        pipeline, device = self._scheduler.steps.pipeline, self._scheduler.sync.device
        notes: dict[str, str | float] = {}
        if not pipeline.codecs.is_none:
            notes["codecs"] = str(pipeline.codecs)
        if device.type == "cpu":
            by_machine = defaultdict[str, list[float]](list)
            for reading, used in zip(self._before, busy, strict=True):
                by_machine[reading.machine].append(used)
            # These machines may also have ranks of other pipelines.
            local, cores = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), num_cores()
            used = max(sum(own) * max(1.0, local / len(own)) for own in by_machine.values())
            notes |= {"cores": cores, "busy_cores": used / cores}
        return notes

    @property
    def _program(self) -> Program:
        # The Program may have changed, by an adaptive schedule or another number of microbatches.
        return self._recorder.program or self._scheduler.program

    def _read_clocks(self) -> list[Reading]:
        """Returns the readings of all ranks; earlier ones if a rank cannot send any more."""
        edges, sync = self._scheduler.steps.edges, self._scheduler.sync
        if any(agree("clocks", lambda: edges.is_cut or sync.is_closed, ranks=self._ranks)):
            return self._before
        read = partial(read_clock, edges, self._rank, len(self._ranks))
        # No ping comes too late, because each rank posts its own reading after its last ping.
        return agree("clocks", read, ranks=self._ranks)


def assembled(
    owns: Sequence[Recorded],
    clocks: Sequence[Clock],
    program: Program,
    collectives: tuple[Collective, ...] = (),
) -> Timeline:
    """Returns one timeline from the recordings of all ranks.

    Raises:
        ScheduleError: If there is no step that all ranks have recorded.
    """
    pairs = list(zip(owns, clocks, strict=True))
    numbers = set.intersection(*({number for number, _ in own.steps} for own in owns))
    if not numbers:
        raise ScheduleError("there is no step that all ranks have recorded: record more steps")
    first = min(numbers)
    zero = min(clock.aligned(dict(own.steps)[first]) for own, clock in pairs)
    count = {number: step for step, number in enumerate(sorted(numbers))}
    aligned = [_aligned(own, clock, zero, count) for own, clock in pairs]
    begins = [[seconds for _, seconds in own.steps] for own in aligned]
    # A step of a rank ends when its next one begins.
    step_ends = [max(times) for times in zip(*(times[1:] for times in begins), strict=True)]
    step_ends.append(max(own.end for own in aligned))
    spans = list(_transfers(aligned))
    # Background work of a rank may overlap. The rank's own work may not, nor may it leave gaps.
    for own in aligned:
        spans += [s for s in own.spans if s.kind not in ON_RANK and s.kind != "transfer"]
        spans += _filled(own, step_ends[-1])
    schedule = program.schedule
    return Timeline(
        schedule.name,
        "measured",
        schedule.num_ranks,
        tuple(schedule.stage_to_rank),
        schedule.num_microbatches,
        tuple(sorted(spans, key=attrgetter("begin", "end", "rank"))),
        tuple(step_ends),
        notes={"clock_error_seconds": max(clock.after.error for clock in clocks)},
        links=program.links,
        collectives=collectives,
    )


def _aligned(own: Recorded, clock: Clock, zero: float, count: Mapping[int, int]) -> Recorded:
    """Returns some steps of a rank's recording, counted anew, by the clock of all ranks."""

    def at(seconds: float) -> float:
        return clock.aligned(seconds) - zero

    spans = tuple(
        span._replace(begin=at(span.begin), end=at(span.end), step=count[span.step])
        for span in own.spans
        if span.step in count
    )
    steps = tuple((count[number], at(begin)) for number, begin in own.steps if number in count)
    return Recorded(own.rank, steps, at(own.end), spans)


def _filled(own: Recorded, end: float) -> list[Span]:
    """Returns a rank's spans from the start of a timeline to its end, without gaps or overlaps.

    Gaps become "host" spans; a rank that has ended its steps waits for others.
    """
    rank, begins = own.rank, [seconds for _, seconds in own.steps]
    filled, now = list[Span](), 0.0
    on_rank = [
        span
        for span in own.spans
        if span.kind in ON_RANK
        and (span.kind not in _ITEM_WAITS or span.seconds >= _LEAST_WAIT_SECONDS)
    ]
    for span in sorted(on_rank, key=attrgetter("begin", "end")):
        begin = max(span.begin, now)
        filled += _hosts(rank, now, begin, begins)
        if span.end > begin or span.end == span.begin:
            filled.append(span._replace(begin=begin, end=max(span.end, begin)))
        now = max(now, span.end)
    filled += _hosts(rank, now, own.end, begins)
    last = filled[-1].end
    if end > last:
        step, label = len(begins) - 1, "the last rank"
        filled.append(Span(rank, "wait for ranks", last, end, step, label=label))
    return filled


def _hosts(rank: int, begin: float, end: float, begins: Sequence[float]) -> list[Span]:
    """Returns host time, cut at the starts of steps."""
    cuts = [begin, *(b for b in begins if begin < b < end), end]
    return [
        Span(rank, "host", a, b, max(0, bisect_right(begins, a) - 1))
        for a, b in pairwise(cuts)
        if b > a
    ]


def _transfers(owns: Sequence[Recorded]) -> Iterator[Span]:
    """Yields a transfer for each message that both of its ranks recorded; see `Recording`."""
    spans = [span for own in owns for span in own.spans]
    sent = {(s.step, s.which, s.microbatch): s for s in spans if s.kind == "transfer"}
    for wait in spans:
        span = sent.get((wait.step, wait.which, wait.microbatch))
        if span and wait.kind == "wait for receive":
            yield span._replace(end=max(wait.end, span.begin))  # clocks have an error
