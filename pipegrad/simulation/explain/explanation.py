"""Explanation: where a step went, why, and what would help. Of a simulated or a recorded run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipegrad.errors import ScheduleError
from pipegrad.schedules.program.program import Program
from pipegrad.simulation.costs import Costs
from pipegrad.simulation.explain.advice import Advice, advise, most_tried, steady_seconds
from pipegrad.simulation.explain.breakdown import Breakdown, break_down, typical_step
from pipegrad.simulation.explain.critical_path import CriticalPath, critical_path
from pipegrad.simulation.explain.inferred import costs_of, program_of
from pipegrad.simulation.explain.lookup import Lookup
from pipegrad.simulation.explain.reasons import longest_waits
from pipegrad.simulation.explain.words import in_time
from pipegrad.simulation.timeline import Timeline

_MOST_WAITS = 5
_ROUGH = 0.1  # what a simulation may be off before advice says so
_ALL_TRIED = 50  # there are never more changes than so many in two steps


@dataclass(frozen=True)
class Explanation:
    """What is known of one step.

    Attributes:
        breakdown: Where the time of each rank went.
        path: What decided when the step ended.
        waits: The longest waits, with their reasons in words.
        advice: What would make it shorter.
        notes: What could not be found out.
    """

    breakdown: Breakdown
    path: CriticalPath
    waits: Sequence[str]
    advice: Sequence[Advice]
    notes: Sequence[str] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns it as plain data."""
        return {
            "breakdown": self.breakdown.to_json(),
            "critical_path": self.path.to_json(),
            "waits": list(self.waits),
            "advice": [advice.to_json() for advice in self.advice],
            "notes": list(self.notes),
        }


def explain(
    timeline: Timeline,
    *,
    step: int | None = None,
    program: Program | None = None,
    costs: Costs | None = None,
) -> Explanation:
    """Returns where a step of a timeline went, why, and what would help.

    Args:
        timeline: A simulated or a recorded run.
        step: Number of the step, from 0; by default the one of median time.
        program: What was run. By default it is inferred from the timeline.
        costs: What it takes. By default they are inferred from the timeline.

    Raises:
        ScheduleError: If the timeline has no such step.
    """
    num_steps = len(timeline.step_ends)
    step = typical_step(timeline) if step is None else step
    if not 0 <= step < num_steps:
        known = f"steps 0 to {num_steps - 1}" if num_steps else "no step that has ended"
        raise ScheduleError(f"step {step} of timeline {timeline.name!r}, which has {known}")
    lookup = Lookup(timeline)
    breakdown = break_down(lookup, step)
    advice, notes = list[Advice](), list[str]()
    try:
        program = program or program_of(lookup, step)
        costs = costs or costs_of(lookup)
        advice.extend(advise(program, costs, step_seconds=breakdown.seconds))
        if advice and timeline.source == "measured":
            expected = steady_seconds(program, costs)
            if abs(expected - breakdown.seconds) > _ROUGH * breakdown.seconds:
                simulated = f"a simulation of this step takes {in_time(expected)}"
                notes.append(f"{simulated}: expected gains are rough")
        if most_tried(program) < _ALL_TRIED:
            notes.append("the schedule is large: not all changes were simulated")
    except ScheduleError as error:  # the step was recorded in part
        notes.append(f"no advice: {str(error).partition(chr(10))[0]}")
    waits = longest_waits(lookup, step, _MOST_WAITS)
    return Explanation(breakdown, critical_path(lookup, step), waits, advice, notes)
