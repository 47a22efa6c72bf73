"""Other numbers: steps that have another number of microbatches than the Scheduler.

[Note: other numbers] Each number of microbatches has a Program of its own, which is made and proven
once. All ranks must run the same Program, so a step with a number that is not the Scheduler's own
begins with a meeting of all ranks. A step of the Scheduler's own number has no meeting, and costs
no message. So a rank that was not given the number may already run the Scheduler's own Program, and
wait for a rank that is in the meeting. The meeting then ends after ``agree_seconds``. A rank whose
meeting fails takes the step of the Scheduler's own number instead, as one whose batch is refused.
That sends what the other ranks wait for, and they raise too.
"""

from __future__ import annotations

from numbers import Integral

from pipegrad.comm.agreement import agree, same
from pipegrad.errors import StepError
from pipegrad.pipeline.wiring import ScheduleSpec, WiredPipeline, fed, refuse_moved, schedule_of
from pipegrad.schedules import Schedule


class OtherNumbers:
    """The schedules of one Scheduler, by number of microbatches; see [Note: other numbers].

    Args:
        pipeline: What all ranks agreed on, with the schedule of the Scheduler's own number.
        spec: What the schedules are made of.
        name: Of the meetings; no other Scheduler has it.
        timeout_seconds: How long a meeting waits for the slowest rank.
    """

    def __init__(
        self, pipeline: WiredPipeline, spec: ScheduleSpec, *, name: str, timeout_seconds: float
    ) -> None:
        self._pipeline = pipeline
        self._spec = spec
        self._name = name
        self._timeout_seconds = timeout_seconds
        self._known: dict[int, Schedule] = {}  # the same numbers on all ranks

    def take(self, spec: ScheduleSpec) -> None:
        """Takes another schedule, on all ranks alike."""
        self._spec = spec
        self._known.clear()

    def agreed(self, number: object, step: int) -> Schedule:
        """Returns the schedule of a step, after a meeting of all ranks.

        Args:
            number: How many microbatches this rank has.
            step: Which step it is, counted alike on all ranks.

        Raises:
            PipegradError: If there is no schedule of this number. Or if another rank has another
                number, or does not come; then on all ranks that are in the meeting.
        """
        if isinstance(number, bool) or not isinstance(number, Integral):
            raise StepError(f"num_microbatches is {number!r}, expected a whole number")
        number = int(number)  # also numpy's
        schedule = self._known.get(number) or self._generated(number)
        ranks = sorted(self._pipeline.topology.ranks)
        what = "num_microbatches of a step, which every rank is given alike, with or without inputs"
        replies = agree(
            what,
            lambda: (str(number), "" if number in self._known else str(schedule)),
            ranks=ranks,
            timeout_seconds=self._timeout_seconds,
            # Ranks that stay away from this meeting come to later ones.
            meeting=f"{self._name}/{step}",
        )
        same(what, {rank: words for rank, (words, _) in zip(ranks, replies, strict=True)})
        same("the schedule", {rank: grid for rank, (_, grid) in zip(ranks, replies, strict=True)})
        self._known[number] = schedule
        return schedule

    def _generated(self, number: int) -> Schedule:
        own, wiring = self._pipeline.schedule, self._pipeline.wiring
        schedule = fed(schedule_of(self._spec, self._pipeline.topology, number), wiring)
        refuse_moved(schedule, own)
        _ = schedule.ticks  # raises if it cannot be run on this wiring
        return schedule
