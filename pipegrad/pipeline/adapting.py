"""Adapting: the schedule of a Scheduler that measures its steps.

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
"""

from __future__ import annotations

from collections.abc import Callable

from pipegrad.comm.agreement import agree_keeping, same
from pipegrad.pipeline.wiring import ScheduleSpec, WiredPipeline, fed, refuse_moved
from pipegrad.schedules import Schedule, generate, registry
from pipegrad.schedules.measured import MeasuredGenerator, Times


class Adapting:
    """Decides which schedule the next step has; see [Note: adaptive schedules].

    Args:
        pipeline: What all ranks agreed on, with the first schedule.
        spec: What that was made of.
        name: Of the meetings; no other Scheduler has it.
        timeout_seconds: How long a meeting waits for the slowest rank.

    Attributes:
        spec: What schedules are made of now.
        schedule: That of the next step, with the Scheduler's number of microbatches.
        times: Of the last step that was measured and read; None if there is none.
    """

    def __init__(
        self, pipeline: WiredPipeline, spec: ScheduleSpec, *, name: str, timeout_seconds: float
    ) -> None:
        self._pipeline = pipeline
        self._name = name
        self._timeout_seconds = timeout_seconds
        self._read: Callable[[], Times | None] | None = None
        self._generator: MeasuredGenerator | None = None
        self.times: Times | None = None
        self.spec, self.schedule = spec, pipeline.schedule
        if not isinstance(spec, Schedule):
            resolved = registry.resolve(spec)
            if isinstance(resolved.plugin, MeasuredGenerator):
                self.spec = self._generator = resolved.plugin

    @property
    def wants_times(self) -> bool:
        """Whether steps are to be measured."""
        return self._generator is not None and self._generator.wants_times

    def note(self, read: Callable[[], Times | None]) -> None:
        """Takes what reads the times of a step, on all ranks alike."""
        self._read = read

    def read(self) -> Times | None:
        """Returns the times of the step that `note` was called for, once; None if there are none.

        Reading waits for the message of the loss.
        """
        read, self._read = self._read, None
        times = read() if read is not None else None
        self.times = times or self.times
        return times

    def decide(self, times: Times, step: int) -> bool:
        """Decides which schedule a training step has; returns whether it was made anew.

        Args:
            times: What steps take now.
            step: Which step it is, counted alike on all ranks.

        Raises:
            PipegradError: If a rank cannot make the schedule, or does not come; on all ranks that
                are in the meeting. Then nothing has changed.
        """
        if self._generator is None:
            return False
        generator = self._generator.planned(times)
        if generator is self._generator:
            return False
        self.schedule = self._agreed(generator, step)
        self.spec = self._generator = generator
        return True

    def _agreed(self, generator: MeasuredGenerator, step: int) -> Schedule:
        pipeline, own = self._pipeline, self.schedule
        num_ranks = pipeline.topology.size(pipeline.topology.pipeline)

        def make() -> tuple[Schedule, str]:
            schedule = generate(
                registry.resolve(generator),
                num_ranks=num_ranks,
                num_microbatches=own.num_microbatches,
            )
            fitted = fed(schedule, pipeline.wiring)
            _ = fitted.ticks  # raises if it cannot be run on this wiring
            return fitted, f"stages on ranks {fitted.stage_to_rank}\n{fitted}"

        ranks = sorted(pipeline.topology.ranks)
        schedule, replies = agree_keeping(
            "another schedule",
            make,
            ranks=ranks,
            timeout_seconds=self._timeout_seconds,
            meeting=f"{self._name}/schedule/{step}",
        )
        same("the schedule", dict(zip(ranks, replies, strict=True)))
        refuse_moved(schedule, own)
        return schedule
