"""Programs: which schedule has the next step, its Program, and the times that it follows.

[Note: adaptive schedules] All ranks must run the same Program. So a schedule changes only between
two steps, on all ranks at once:

1. In a step that is not the first of its kind, each rank measures its computes and its hops:
   [Note: times of a step]. The numbers of all ranks are summed by the message of the loss, so no
   message is added.
2. Before the next training step, every rank reads the sums. They have the same bits on all ranks:
   each is one number, or a difference of two, and otherwise zeros.
3. The generator, which is pure, says on every rank whether another schedule is to be taken.
4. Only then do the ranks agree. They compare their new schedules, and an error of one rank is an
   error of all. Each rank lowers and proves the Program, and goes on with it.

The sums of a step in which a rank failed are ignored. A step cannot begin before the message of the
one before it has arrived. On CPU that costs little, since the first rank ends a step last and
begins the next one first. Where the device has streams, the host waits for the device.

[Note: other numbers] Each number of microbatches has a Program of its own, which is made and proven
once. All ranks must run the same Program, so a step with a number that is not the Scheduler's own
begins with an agreement of all ranks. A step of the Scheduler's own number has none, and costs no
message. So a rank that was not given the number may already run the Scheduler's own Program, and
wait for a rank that is in the agreement, which then ends after ``agree_seconds``. A rank whose
agreement fails takes the step of the Scheduler's own number instead, as one whose batch is refused.
That sends what the other ranks wait for, and they raise too.

[Note: times of a step] Clocks of two ranks differ, and no clock is read on both ends of a message.
Still a hop can be measured without a message of its own. Rank s sends a value at t1, and rank s+1
has it at t2. Rank s+1 sends the gradient back at t3, and rank s has it at t4. What both transfers
took is::

    (t4 - t1) - (t3 - t2)

Each bracket has times of one clock. So rank s adds its own to a number that all ranks sum anyway,
beside the loss, and rank s+1 subtracts its own. A message that waits, for the one before it or for
a rank that still computes, makes the difference larger, but nothing makes it smaller. So a hop
takes what the smallest difference of the first microbatches says: rank s+1 is idle before the
first of them, and rank s before its gradient.

Where the device has streams, times are those of events on the current stream, and the host waits
for the device at the end of a step.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from functools import partial
from numbers import Integral
from typing import Any

import torch

from pipegrad.comm import sync_points
from pipegrad.comm.agreement import agree, agree_keeping, same
from pipegrad.errors import StepError
from pipegrad.pipeline.compute import Method
from pipegrad.pipeline.wiring import ScheduleSpec, WiredPipeline, schedule_of
from pipegrad.schedules import Schedule, generate, registry
from pipegrad.schedules.measured import MeasuredGenerator, Times
from pipegrad.schedules.program.lower import lower
from pipegrad.schedules.program.program import Item, Link, Op, Program
from pipegrad.schedules.program.verify import Proof, verify
from pipegrad.schedules.schedule import Kind
from pipegrad.topology import Topology

_SAMPLES = 3  # microbatches that measure hops
_Stamp = float | torch.Event
_FORWARD, _BACKWARD, _WEIGHTS = _ROWS = 0, 1, 2  # of a rank's computes; W is a part of a backward


class Programs:
    """The schedules and Programs of one Scheduler.

    See [Note: adaptive schedules] and [Note: other numbers].

    Args:
        pipeline: What all ranks agreed on, with the first schedule.
        spec: What that was made of.
        synced: Stages with parameters that other ranks update.
        depth: How many receives of an edge are posted ahead.
        name: Of the agreements; no other Scheduler has it.
        timeout_seconds: How long an agreement waits for the slowest rank.

    Attributes:
        spec: What schedules are made of now.
        schedule: That of training steps of the Scheduler's own number of microbatches.
        first: The Program of the first schedule if every value has a gradient, and its proof.
        times: Of the last step that was measured and read; None if there is none.

    Raises:
        ScheduleError: If the proof of the first Program fails.
    """

    def __init__(
        self,
        pipeline: WiredPipeline,
        spec: ScheduleSpec,
        *,
        synced: Collection[int],
        depth: int,
        name: str,
        timeout_seconds: float,
    ) -> None:
        self._pipeline = pipeline
        self._synced = synced
        self._depth = depth
        self._name = name
        self._timeout_seconds = timeout_seconds
        self._ranks = sorted(pipeline.topology.ranks)
        self._generator: MeasuredGenerator | None = None
        self.times: Times | None = None
        self.spec, self.schedule = spec, pipeline.schedule
        if not isinstance(spec, Schedule):
            resolved = registry.resolve(spec)
            if isinstance(resolved.plugin, MeasuredGenerator):
                self.spec = self._generator = resolved.plugin
        # By number and chunks; the same ones on all ranks.
        self._others: dict[tuple[int, int], Schedule] = {}
        self.first = self._lowered(self.schedule, pipeline.wiring.links, depth)

    def proven(
        self, schedule: Schedule, links: Sequence[Link], *, posts_ahead: bool, forward_only: bool
    ) -> tuple[Program, Proof]:
        """Returns the Program of a schedule, and its proof.

        Args:
            schedule: What every rank computes.
            links: The values that stages hand on, differentiable or not.
            posts_ahead: Whether receives are posted ahead of their waits.
            forward_only: Whether it is an evaluation.

        Raises:
            ScheduleError: If the proof fails.
        """
        depth = self._depth if posts_ahead else 0
        # The proof of a large schedule takes long, and most models need no other Program.
        first = self._pipeline.schedule, self.first[0].links, self._depth, False
        if (schedule, tuple(links), depth, forward_only) == first:
            return self.first
        return self._lowered(schedule, links, depth, forward_only=forward_only)

    def _lowered(
        self, schedule: Schedule, links: Sequence[Link], depth: int, *, forward_only: bool = False
    ) -> tuple[Program, Proof]:
        program = lower(
            schedule,
            links=links,
            depth=depth,
            synced=self._synced,
            forward_only=forward_only,
        )
        return program, verify(program)

    # The Scheduler's own number of microbatches.

    @property
    def wants_times(self) -> bool:
        """Whether steps are to be measured."""
        return self._generator is not None and self._generator.wants_times

    def adapted(self, times: Times, step: int) -> Schedule | None:
        """Returns another schedule for the next training step; None if it stays as it is.

        Args:
            times: What steps take now.
            step: Which step it is, counted alike on all ranks.

        Raises:
            PipegradError: If a rank cannot make the schedule, or does not come; on all ranks that
                take part. Then nothing has changed.
        """
        self.times = times
        assert self._generator is not None  # nothing else has steps measured
        generator = self._generator.planned(times)
        if generator is self._generator:
            return None
        # Nothing of this rank changes before all ranks have agreed: a rank whose agreement fails
        # goes on with the schedule that the others have, too.
        schedule = self._agreed(generator, step)
        self.spec = self._generator = generator
        return schedule

    def take(self, schedule: Schedule) -> None:
        """Takes a schedule that `adapted` returned, on all ranks alike."""
        self.schedule = schedule
        # They were made for the schedule before. All ranks forget them at once: in `of_number` a
        # rank says nothing of a schedule that all have compared.
        self._others.clear()

    def _agreed(self, generator: MeasuredGenerator, step: int) -> Schedule:
        pipeline = self._pipeline
        num_ranks = pipeline.topology.size(pipeline.topology.pipeline)

        def make() -> tuple[Schedule, str]:
            schedule = generate(
                registry.resolve(generator),
                num_ranks=num_ranks,
                num_microbatches=self.schedule.num_microbatches,
            )
            fitted = pipeline.fitted(schedule)
            return fitted, f"stages on ranks {fitted.stage_to_rank}\n{fitted}"

        schedule, replies = agree_keeping(
            "another schedule",
            make,
            ranks=self._ranks,
            timeout_seconds=self._timeout_seconds,
            name=f"{self._name}/schedule/{step}",
        )
        same("the schedule", dict(zip(self._ranks, replies, strict=True)))
        return schedule

    # Other numbers of microbatches.

    def of_number(self, number: object, chunks: object, step: int) -> Schedule:
        """Returns the schedule of a step of other numbers, after an agreement of all ranks.

        Args:
            number: How many microbatches this rank has; None if the Scheduler's own.
            chunks: Into how many chunks of time it cuts each, or their lengths; None likewise.
            step: Which step it is, counted alike on all ranks.

        Raises:
            PipegradError: If there is no schedule of this number. Or if another rank has another
                number, or does not come; then on all ranks that take part.
        """
        number = self.schedule.num_sequences if number is None else number
        if isinstance(number, bool) or not isinstance(number, Integral):
            raise StepError(f"num_microbatches is {number!r}, expected a whole number")
        key = int(number), _num_chunks(chunks, self.schedule.chunks)  # also numpy's
        schedule = self._others.get(key) or self._generated(*key)
        numbers = "num_microbatches and chunks" if chunks else "num_microbatches"
        what = f"{numbers} of a step, which every rank is given alike, with or without inputs"
        words = f"{key[0]} microbatches, chunks {chunks}" if chunks else f"{key[0]}"
        replies = agree(
            what,
            lambda: (words, "" if key in self._others else str(schedule)),
            ranks=self._ranks,
            timeout_seconds=self._timeout_seconds,
            # Ranks that stay away from this agreement come to later ones.
            name=f"{self._name}/{step}",
        )
        by_rank = dict(zip(self._ranks, replies, strict=True))
        same(what, {rank: words for rank, (words, _) in by_rank.items()})
        same("the schedule", {rank: grid for rank, (_, grid) in by_rank.items()})
        # Behind the agreement: if it fails on any rank, all of them compare the schedule again the
        # next time.
        self._others[key] = schedule
        return schedule

    def _generated(self, number: int, chunks: int) -> Schedule:
        topology = self._pipeline.topology
        return self._pipeline.fitted(schedule_of(self.spec, topology, number, chunks))


def _num_chunks(chunks: object, own: int) -> int:
    """Returns how many chunks a step wants.

    Raises:
        StepError: If it is given something else than a number or lengths.
    """
    if chunks is None:
        return own
    numbers: list[Any] = list(chunks) if isinstance(chunks, tuple | list) else [chunks]
    if not numbers or any(isinstance(n, bool) or not isinstance(n, Integral) for n in numbers):
        numbers = [0]
    if min(map(int, numbers)) < 1:
        raise StepError(
            f"chunks is {chunks!r}, expected how many there are, or a list of their lengths"
        )
    return len(numbers) if isinstance(chunks, tuple | list) else int(numbers[0])


class StepTimes:
    """How long the computes of a rank take, and the transfers between neighbours.

    Each rank has entries for its numbers among those that all ranks sum.

    Args:
        program: What all ranks do.
        topology: As this rank sees it.
        device: Where the rank computes.

    Attributes:
        num_samples: Microbatches that measure hops.
        size: How many numbers there are of all ranks.
    """

    def __init__(self, program: Program, topology: Topology, device: torch.device) -> None:
        self._program = program
        self._device = device
        self._rank = topology.coordinate(topology.pipeline)
        self._num_ranks = topology.size(topology.pipeline)
        self.num_samples = min(_SAMPLES, program.schedule.num_microbatches)
        self._of_pipeline = len(_ROWS) * self._num_ranks + self.num_samples * (self._num_ranks - 1)
        pipelines = topology.pipelines
        self.size = len(pipelines) * self._of_pipeline
        ranks = topology.ranks_along(topology.pipeline)
        self._first = pipelines.index(ranks) * self._of_pipeline  # index of this pipeline's numbers
        self.begin()

    def begin(self) -> None:
        """Forgets what was seen; called when a step begins."""
        self._computes = defaultdict[tuple[int, Kind], list[tuple[_Stamp, _Stamp]]](list)
        # By the direction in which a transfer goes, whether this rank sends it, and microbatch.
        self._transfers: dict[tuple[str, bool, int], _Stamp] = {}

    def watched(self, item: Item, method: Method) -> Method:
        """Returns the method of an item, watched if it says something of time."""
        if item.op is Op.COMPUTE:
            stage, kind, _ = self._program.action(item)
            return partial(self._compute, method, (stage, kind))
        if item.microbatch < self.num_samples and item.op in (Op.SEND, Op.WAIT_RECEIVE):
            channel = self._program.channels[item.which]
            if channel.target - channel.source == (1 if channel.kind == "F" else -1):
                watch = self._send if item.op is Op.SEND else self._receive
                return partial(watch, method, channel.kind)
        return method

    def _compute(
        self, method: Method, action: tuple[int, Kind], which: int, microbatch: int
    ) -> None:
        begin = self._now()
        method(which, microbatch)
        self._computes[action].append((begin, self._now()))

    def _send(self, method: Method, kind: str, which: int, microbatch: int) -> None:
        # Several values may go to the neighbour. They take from the first send to the last arrival.
        self._transfers.setdefault((kind, True, microbatch), self._now())
        method(which, microbatch)

    def _receive(self, method: Method, kind: str, which: int, microbatch: int) -> None:
        method(which, microbatch)
        self._transfers[kind, False, microbatch] = self._now()

    def _now(self) -> _Stamp:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = sync_points.timing_event(self._device)
        sync_points.record_time(event, self._device)
        return event

    def numbers(self) -> list[float]:
        """Returns what this rank adds to the numbers of all ranks.

        Sync: the host waits for the device.
        """
        sync_points.finish_device(self._device)
        numbers = [0.0] * self.size
        for (_, kind), stamps in self._computes.items():
            row = _FORWARD if kind == "F" else _BACKWARD
            median = statistics.median(_seconds(begin, end) for begin, end in stamps)
            numbers[self.index_of_compute(row)] += median
            if kind == "W":
                numbers[self.index_of_compute(_WEIGHTS)] += median
        marks = self._transfers
        for microbatch in range(self.num_samples):
            out, back = ("F", True, microbatch), ("B", False, microbatch)
            if out in marks and back in marks:  # t1 and t4
                seconds = _seconds(marks[out], marks[back])
                numbers[self.index_of_hop(microbatch, self._rank)] = seconds
            out, back = ("F", False, microbatch), ("B", True, microbatch)
            if out in marks and back in marks:  # t2 and t3
                seconds = _seconds(marks[out], marks[back])
                numbers[self.index_of_hop(microbatch, self._rank - 1)] = -seconds
        return numbers

    def index_of_compute(self, row: int) -> int:
        """Returns where this rank has its forwards, backwards or W."""
        return self._first + row * self._num_ranks + self._rank

    def index_of_hop(self, microbatch: int, hop: int) -> int:
        """Returns where a hop of this pipeline has a microbatch."""
        hops = self._first + len(_ROWS) * self._num_ranks
        return hops + microbatch * (self._num_ranks - 1) + hop

    def times(self, numbers: Sequence[float]) -> Times:
        """Returns what the sums of all ranks say, the same on every rank."""
        size, hops = self._num_ranks, self._num_ranks - 1
        pipelines = list[list[Sequence[float]]]()
        for begin in range(0, self.size, self._of_pipeline):
            of_pipeline = numbers[begin : begin + self._of_pipeline]
            computes = [of_pipeline[row * size : (row + 1) * size] for row in _ROWS]
            both_ways = of_pipeline[len(_ROWS) * size :]
            # A clock that is read twice at once may go backwards by a rounding error.
            hop_seconds = [max(0.0, min(both_ways[hop::hops]) / 2) for hop in range(hops)]
            pipelines.append([*computes, hop_seconds])
        forwards, backwards, weights, slowest_hops = (
            tuple(map(max, zip(*column, strict=True))) for column in zip(*pipelines, strict=True)
        )
        return Times(forwards, backwards, slowest_hops, weights)


def _seconds(begin: _Stamp, end: _Stamp) -> float:
    if isinstance(begin, float) or isinstance(end, float):
        assert isinstance(begin, float)
        assert isinstance(end, float)
        return end - begin
    return float(begin.elapsed_time(end)) / 1e3
