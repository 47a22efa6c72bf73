"""Programs: which schedule has the next step of a Scheduler, and the proven Program of it.

[Note: adaptive schedules] All ranks must run the same Program. So a schedule changes only between
two steps, on all ranks at once:

1. In a step that is not the first of its kind, each rank measures its computes and its hops:
   [Note: times of a step]. The numbers of all ranks are summed by the message of the loss, so no
   message is added.
2. Before the next training step, every rank reads the sums. They have the same bits on all ranks:
   each is one number, or a difference of two, and otherwise zeros.
3. The generator, which is pure, says on every rank whether another schedule is to be taken.
4. Only then do the ranks meet. They compare the schedules that they have made, and an error of one
   rank is an error of all. Each rank lowers and proves the Program, and goes on with it.

The sums of a step in which a rank failed are ignored. A step cannot begin before the message of the
one before it has arrived. On CPU that costs little, since the first rank ends a step last and
begins the next one first. Where the device has streams, the host waits for the device.

[Note: other numbers] Each number of microbatches has a Program of its own, which is made and proven
once. All ranks must run the same Program, so a step with a number that is not the Scheduler's own
begins with a meeting of all ranks. A step of the Scheduler's own number has no meeting, and costs
no message. So a rank that was not given the number may already run the Scheduler's own Program, and
wait for a rank that is in the meeting. The meeting then ends after ``agree_seconds``. A rank whose
meeting fails takes the step of the Scheduler's own number instead, as one whose batch is refused.
That sends what the other ranks wait for, and they raise too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral

from pipegrad.comm.agreement import agree, agree_keeping, same
from pipegrad.errors import StepError
from pipegrad.pipeline.wiring import ScheduleSpec, WiredPipeline, fed, refuse_moved, schedule_of
from pipegrad.schedules import Schedule, generate, registry
from pipegrad.schedules.measured import MeasuredGenerator, Times
from pipegrad.schedules.program.lower import lower
from pipegrad.schedules.program.program import Collective, Link, Program
from pipegrad.schedules.program.verify import Proof, verify


class Programs:
    """The schedules and Programs of one Scheduler.

    See [Note: adaptive schedules] and [Note: other numbers].

    Args:
        pipeline: What all ranks agreed on, with the first schedule.
        spec: What that was made of.
        collectives: The reductions of this rank's pipeline.
        depth: How many receives of an edge are posted ahead.
        name: Of the meetings; no other Scheduler has it.
        timeout_seconds: How long a meeting waits for the slowest rank.

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
        collectives: Sequence[Collective],
        depth: int,
        name: str,
        timeout_seconds: float,
    ) -> None:
        self._pipeline = pipeline
        self._collectives = collectives
        self._depth = depth
        self._name = name
        self._timeout_seconds = timeout_seconds
        self._ranks = sorted(pipeline.topology.ranks)
        self._read: Callable[[], Times | None] | None = None
        self._generator: MeasuredGenerator | None = None
        self.times: Times | None = None
        self.spec, self.schedule = spec, pipeline.schedule
        if not isinstance(spec, Schedule):
            resolved = registry.resolve(spec)
            if isinstance(resolved.plugin, MeasuredGenerator):
                self.spec = self._generator = resolved.plugin
        self._others: dict[int, Schedule] = {}  # by number; the same numbers on all ranks
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
            collectives=self._collectives,
            forward_only=forward_only,
        )
        return program, verify(program)

    # The Scheduler's own number of microbatches.

    @property
    def wants_times(self) -> bool:
        """Whether steps are to be measured."""
        return self._generator is not None and self._generator.wants_times

    def read_later(self, read: Callable[[], Times | None]) -> None:
        """Takes what reads the times of a step, on all ranks alike."""
        self._read = read

    def adapted(self, step: int) -> Schedule | None:
        """Returns another schedule for the next training step; None if it stays as it is.

        Args:
            step: Which step it is, counted alike on all ranks.

        Raises:
            PipegradError: If a rank cannot make the schedule, or does not come; on all ranks that
                are in the meeting. Then nothing has changed.

        Sync: the host waits for the loss of the step before, if that was measured.
        """
        if self._read is None:
            return None
        read, self._read = self._read, None
        times = read()
        if times is None or self._generator is None:
            return None
        self.times = times
        generator = self._generator.planned(times)
        if generator is self._generator:
            return None
        schedule = self._agreed(generator, step)
        self.spec = self._generator = generator
        return schedule

    def take(self, schedule: Schedule) -> None:
        """Takes a schedule that `adapted` returned, on all ranks alike."""
        self.schedule = schedule
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
            fitted = fed(schedule, pipeline.wiring)
            _ = fitted.ticks  # raises if it cannot be run on this wiring
            return fitted, f"stages on ranks {fitted.stage_to_rank}\n{fitted}"

        schedule, replies = agree_keeping(
            "another schedule",
            make,
            ranks=self._ranks,
            timeout_seconds=self._timeout_seconds,
            meeting=f"{self._name}/schedule/{step}",
        )
        same("the schedule", dict(zip(self._ranks, replies, strict=True)))
        refuse_moved(schedule, self.schedule)
        return schedule

    # Other numbers of microbatches.

    def of_number(self, number: object, step: int) -> Schedule:
        """Returns the schedule of a step; of another number than the Scheduler's all ranks meet.

        Args:
            number: How many microbatches this rank has; None for the Scheduler's own number.
            step: Which step it is, counted alike on all ranks.

        Raises:
            PipegradError: If there is no schedule of this number. Or if another rank has another
                number, or does not come; then on all ranks that are in the meeting.
        """
        if number in (None, self.schedule.num_microbatches):
            return self.schedule
        if isinstance(number, bool) or not isinstance(number, Integral):
            raise StepError(f"num_microbatches is {number!r}, expected a whole number")
        number = int(number)  # also numpy's
        schedule = self._others.get(number) or self._generated(number)
        what = "num_microbatches of a step, which every rank is given alike, with or without inputs"
        replies = agree(
            what,
            lambda: (str(number), "" if number in self._others else str(schedule)),
            ranks=self._ranks,
            timeout_seconds=self._timeout_seconds,
            # Ranks that stay away from this meeting come to later ones.
            meeting=f"{self._name}/{step}",
        )
        by_rank = dict(zip(self._ranks, replies, strict=True))
        same(what, {rank: words for rank, (words, _) in by_rank.items()})
        same("the schedule", {rank: grid for rank, (_, grid) in by_rank.items()})
        self._others[number] = schedule
        return schedule

    def _generated(self, number: int) -> Schedule:
        schedule = schedule_of(self.spec, self._pipeline.topology, number)
        schedule = fed(schedule, self._pipeline.wiring)
        refuse_moved(schedule, self._pipeline.schedule)
        _ = schedule.ticks  # raises if it cannot be run on this wiring
        return schedule
