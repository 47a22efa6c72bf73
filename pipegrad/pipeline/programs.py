"""Programs: the schedule of the next step, its Program, and the times that it follows.

[Note: adaptive schedules] A schedule changes only between two steps, on all ranks at once, because
all ranks must run the same Program:

1. In a step that is not the first of its kind, each rank measures its computes and its hops:
   [Note: times of a step]. No message is added, because the message of the loss sums the numbers of
   all ranks.
2. Before the next training step, every rank reads the sums. They have the same bits on all ranks:
   each is one number, or a difference of two, and otherwise zeros.
3. The generator, which is pure, decides on every rank whether another schedule follows.
4. Only then do the ranks agree. They compare their new schedules, and an error of one rank is an
   error of all. Each rank lowers and proves the Program, and continues with it.

The sums of a step in which a rank failed are ignored. A step cannot begin before the message of the
one before it has arrived. On CPU that costs little, because the first rank ends a step last and
begins the next one first. Where the device has streams, the host waits for the device.

[Note: other numbers] Each number of microbatches has a Program of its own, which is made and proven
once. A step with another number than the Scheduler's own begins with an agreement of all ranks,
because all of them must run the same Program. A step of the Scheduler's own number has no
agreement, and costs no message. A rank that was not given the number may therefore already run the
Scheduler's own Program, and wait for a rank in the agreement. That agreement ends after
``agree_seconds``. A rank whose agreement fails runs the step of the Scheduler's own number instead,
as a rank whose batch is refused. It sends the messages that the other ranks wait for, and they
raise too.

[Note: times of a step] Clocks of two ranks differ, and no clock is read on both ends of a message.
Still a hop can be measured without an additional message. Rank s sends a value at t1, and rank s+1
has it at t2. Rank s+1 sends the gradient back at t3, and rank s has it at t4. The time of both
transfers is::

    (t4 - t1) - (t3 - t2)

Each bracket has times of one clock. Rank s adds its own bracket to a number that all ranks sum
together with the loss, and rank s+1 subtracts its own. A message that waits, for the one before it
or for a rank that still computes, makes the difference larger, but nothing makes it smaller.
Therefore the smallest difference of the first microbatches measures a hop: rank s+1 is idle before
the first of them, and rank s before its gradient.

Where the device has streams, times come from events on the current stream, and the host waits for
the device at the end of a step.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from functools import partial
from numbers import Integral
from typing import Any, TypeGuard

import torch

from pipegrad.comm import sync_points
from pipegrad.comm.agreement import agree_keeping, same
from pipegrad.errors import StepError
from pipegrad.pipeline.cells import Method
from pipegrad.pipeline.wiring import ScheduleSpec, WiredPipeline, schedule_of
from pipegrad.schedules import Schedule, registry
from pipegrad.schedules.measured import MeasuredGenerator, Times
from pipegrad.schedules.program.lower import lower
from pipegrad.schedules.program.program import Item, Link, Op, Program
from pipegrad.schedules.program.verify import Proof, verify
from pipegrad.schedules.schedule import Kind
from pipegrad.topology import Topology

_SAMPLES = 3  # microbatches that measure hops
_Stamp = float | torch.Event
_Span = tuple[_Stamp, _Stamp]
_FORWARD, _BACKWARD, _WEIGHTS = _ROWS = 0, 1, 2  # of a rank's computes; W is a part of a backward


class Programs:
    """The schedules and Programs of one Scheduler.

    See [Note: adaptive schedules] and [Note: other numbers].

    Attributes:
        spec: The spec that generates schedules now.
        schedule: The schedule of training steps with the Scheduler's own number of microbatches.
        first: The Program of the first schedule if every value has a gradient, and its proof.
        times: Times of the last step that was measured and read; None if there is none.

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
        self.times: Times | None = None
        plugin = None if isinstance(spec, Schedule) else registry.resolve(spec).plugin
        self.spec = plugin if isinstance(plugin, MeasuredGenerator) else spec
        self.schedule = pipeline.schedule
        # By number and chunks; the same ones on all ranks.
        self._others: dict[tuple[int, int], Schedule] = {}
        self.first = self._lowered(self.schedule, pipeline.wiring.links)

    def proven(
        self, schedule: Schedule, links: Sequence[Link], *, forward_only: bool
    ) -> tuple[Program, Proof]:
        """Returns the Program of a schedule, and its proof.

        Raises:
            ScheduleError: If the proof fails.
        """
        # The proof of a large schedule takes long, and most models need no other Program.
        first = self.first[0]
        if (schedule, tuple(links), forward_only) == (first.schedule, first.links, False):
            return self.first
        return self._lowered(schedule, links, forward_only=forward_only)

    def _lowered(
        self, schedule: Schedule, links: Sequence[Link], *, forward_only: bool = False
    ) -> tuple[Program, Proof]:
        program = lower(
            schedule,
            links=links,
            depth=self._depth,
            synced=self._synced,
            forward_only=forward_only,
        )
        return program, verify(program)

    # The Scheduler's own number of microbatches.

    @property
    def wants_times(self) -> bool:
        """True if steps are to be measured."""
        return isinstance(self.spec, MeasuredGenerator) and self.spec.wants_times

    def adapt(self, times: Times, step: int) -> bool:
        """Replaces the schedule of the next training steps if the times require it; returns if so.

        Raises:
            PipegradError: If a rank cannot make the schedule, or does not come; on all ranks that
                take part. Then nothing has changed.
        """
        self.times = times
        assert isinstance(self.spec, MeasuredGenerator)  # nothing else has steps measured
        generator = self.spec.planned(times)
        if generator is self.spec:
            return False

        def make() -> tuple[Schedule, tuple[str, str]]:
            schedule = self._generated(generator, self.schedule.num_microbatches)
            return schedule, ("", f"stages on ranks {schedule.stage_to_rank}\n{schedule}")

        # Nothing on this rank changes before all ranks have agreed, because a rank whose agreement
        # fails continues with the schedule of the others.
        self.schedule = self._agreed("another schedule", make, f"schedule/{step}")
        self.spec = generator
        # They were made for the schedule before. All ranks drop them at once, because in
        # `of_number` a rank sends no grid of a schedule that all have compared.
        self._others.clear()
        return True

    # Other numbers of microbatches.

    def of_number(self, number: object, chunks: object, step: int) -> Schedule:
        """Returns the schedule of a step of other numbers, after an agreement of all ranks.

        Raises:
            PipegradError: If there is no schedule of this number. Or if another rank has another
                number, or does not come; then on all ranks that take part.
        """
        number = self.schedule.num_sequences if number is None else number
        if not _is_whole(number):
            raise StepError(f"num_microbatches is {number!r}, expected a whole number")
        key = int(number), _num_chunks(chunks, self.schedule.chunks)  # also numpy's
        schedule = self._others.get(key) or self._generated(self.spec, *key)
        what, words = "num_microbatches", f"{key[0]}"
        if chunks:
            what, words = f"{what} and chunks", f"{words} microbatches, chunks {chunks}"
        # After the agreement, because all ranks must compare the schedule again if it fails on any
        # rank.
        self._others[key] = self._agreed(
            f"{what} of a step, which every rank is given alike, with or without inputs",
            lambda: (schedule, (words, "" if key in self._others else str(schedule))),
            # A name for each step, because ranks that miss this agreement come to later ones.
            f"{step}",
        )
        return schedule

    def _generated(self, spec: ScheduleSpec, number: int, chunks: int | None = None) -> Schedule:
        return self._pipeline.fitted(schedule_of(spec, self._pipeline.topology, number, chunks))

    def _agreed(
        self, what: str, make: Callable[[], tuple[Schedule, tuple[str, str]]], name: str
    ) -> Schedule:
        """Returns the schedule of `make`, if its words and grids are the same on all ranks."""
        schedule, replies = agree_keeping(
            what,
            make,
            ranks=self._ranks,
            timeout_seconds=self._timeout_seconds,
            name=f"{self._name}/{name}",
        )
        by_rank = dict(zip(self._ranks, replies, strict=True))
        same(what, {rank: words for rank, (words, _) in by_rank.items()})
        same("the schedule", {rank: grid for rank, (_, grid) in by_rank.items()})
        return schedule


def _is_whole(number: object) -> TypeGuard[int]:
    return isinstance(number, Integral) and not isinstance(number, bool)


def _num_chunks(chunks: object, own: int) -> int:
    """Returns the number of chunks of a step.

    Raises:
        StepError: If `chunks` is neither a number nor lengths.
    """
    if chunks is None:
        return own
    lengths = chunks if isinstance(chunks, tuple | list) else None
    numbers: list[Any] = [chunks] if lengths is None else [*lengths]
    if not numbers or not all(_is_whole(n) and n >= 1 for n in numbers):
        raise StepError(
            f"chunks is {chunks!r}, expected how many there are, or a list of their lengths"
        )
    return int(numbers[0]) if lengths is None else len(lengths)


class StepTimes:
    """The times of a rank's computes, and of transfers between neighbours.

    All ranks sum a table with a column for each rank of each pipeline. Rows are forwards,
    backwards, W, and for each of the first microbatches the hop from this rank to the next.

    Attributes:
        shape: Pipelines, rows, ranks of a pipeline.
        size: The number of entries of the table.
    """

    def __init__(self, program: Program, topology: Topology, device: torch.device) -> None:
        self._program = program
        self._device = device
        self._rank = topology.coordinate(topology.pipeline)
        pipelines, ranks = topology.pipelines, topology.ranks_along(topology.pipeline)
        self._pipeline = pipelines.index(ranks)
        self._num_samples = min(_SAMPLES, program.schedule.num_microbatches)
        self.shape = len(pipelines), len(_ROWS) + self._num_samples, len(ranks)
        self.size = math.prod(self.shape)
        self._computes = defaultdict[tuple[int, Kind], list[_Span]](list)
        # By hop, microbatch, and the direction of the transfer.
        self._transfers = defaultdict[tuple[int, int, str], list[_Span]](list)

    def begin(self) -> None:
        """Drops the times of the last step; called when a step begins."""
        self._computes.clear()
        self._transfers.clear()

    def watched(self, item: Item, method: Method) -> Method:
        """Returns the method of an item, timed if its time counts."""
        if item.op is Op.COMPUTE:
            stage, kind, _ = self._program.action(item)
            return partial(self._timed, method, self._computes, (stage, kind))
        if item.microbatch < self._num_samples and item.op in (Op.SEND, Op.WAIT_RECEIVE):
            channel = self._program.channels[item.which]
            if channel.target - channel.source == (1 if channel.kind == "F" else -1):
                hop = min(channel.source, channel.target)
                key = hop, item.microbatch, channel.kind
                return partial(self._timed, method, self._transfers, key)
        return method

    def _timed(
        self, method: Method, spans: dict[Any, list[_Span]], key: object, *arguments: int
    ) -> None:
        begin = self._now()
        method(*arguments)
        spans[key].append((begin, self._now()))

    def _now(self) -> _Stamp:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = sync_points.timing_event(self._device)
        sync_points.record_time(event, self._device)
        return event

    def numbers(self) -> list[float]:
        """Returns this rank's terms of the sums over all ranks.

        Sync: the host waits for the device.
        """
        sync_points.finish_device(self._device)
        table = torch.zeros(self.shape, dtype=torch.float64)
        rows = table[self._pipeline]
        for (_, kind), spans in self._computes.items():
            median = statistics.median(_seconds(*span) for span in spans)
            rows[_FORWARD if kind == "F" else _BACKWARD, self._rank] += median
            if kind == "W":
                rows[_WEIGHTS, self._rank] += median
        for (hop, microbatch, direction), there in self._transfers.items():
            back = self._transfers.get((hop, microbatch, "B"))
            if direction == "F" and back:
                # Several values may cross: from the first send to the last arrival.
                if hop == self._rank:  # t1 and t4
                    seconds = _seconds(there[0][0], back[-1][1])
                else:  # t2 and t3
                    seconds = -_seconds(there[-1][1], back[0][0])
                rows[len(_ROWS) + microbatch, hop] = seconds
        return [float(number) for number in table.flatten().tolist()]

    def times(self, numbers: Sequence[float]) -> Times:
        """Returns the times in the sums of all ranks, the same on every rank."""
        table = torch.tensor(numbers, dtype=torch.float64).view(self.shape)
        computes, both_ways = table.split([len(_ROWS), self._num_samples], dim=1)
        # A clock that is read twice at once may go backwards by a rounding error.
        hops = both_ways[:, :, :-1].amin(1).clamp(min=0) / 2
        # Of all pipelines the slowest counts.
        forwards, backwards, weights = map(tuple, computes.amax(0).tolist())
        return Times(forwards, backwards, tuple(hops.amax(0).tolist()), weights)


def _seconds(begin: Any, end: Any) -> float:  # noqa: ANN401 - two numbers, or two events
    return float(end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3)
