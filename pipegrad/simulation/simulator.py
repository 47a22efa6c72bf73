"""simulate: runs a Program against costs, event by event."""

from __future__ import annotations

from dataclasses import dataclass

from pipegrad.schedules.program.program import Program
from pipegrad.simulation.costs import Costs
from pipegrad.simulation.timeline import Timeline


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

    The items that are simulated are those that the executor runs.

    Args:
        program: What every rank does.
        costs: What it takes.
        num_steps: How many steps follow each other.
        records: Whether to record a timeline; without, less memory and time is needed.

    Raises:
        ScheduleError: If the costs are not those of the program's stages.
    """
    raise NotImplementedError
