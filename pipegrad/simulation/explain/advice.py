"""Advice: what would make a step shorter, and by how much. Every line is a simulation."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pipegrad.schedules.program.program import Program
from pipegrad.simulation.costs import Costs
from pipegrad.simulation.explain.critical_path import critical_path
from pipegrad.simulation.explain.lookup import Lookup
from pipegrad.simulation.explain.what_ifs import what_ifs
from pipegrad.simulation.explain.words import in_percent, in_time
from pipegrad.simulation.simulator import simulate

_LEAST_GAIN = 0.005
# Items of all simulations together, which then take some seconds.
_MOST_ITEMS = 250_000


@dataclass(frozen=True)
class Advice:
    """A change, and what the simulator expects of it.

    Attributes:
        change: In words.
        step_seconds: Expected time of a step.
        gain: The share of the present step time that it saves.
        is_bound: True if nobody can do that, as with a network that takes no time. The gain is then
            the most that any change of this sort can bring.
        peak_bytes: The most that a rank holds with this change; 0 if memory is not known.
    """

    change: str
    step_seconds: float
    gain: float
    is_bound: bool = False
    peak_bytes: int = 0

    def __str__(self) -> str:
        at_most = "at most " if self.is_bound else ""
        memory = f", {self.peak_bytes / 2**20:,.0f} MiB at peak" if self.peak_bytes else ""
        expected = f"{at_most}{in_percent(self.gain)} less, {in_time(self.step_seconds)} a step"
        return f"{self.change}: {expected}{memory}"

    def to_json(self) -> dict[str, Any]:
        """Returns it as plain data."""
        return asdict(self)


def advise(
    program: Program, costs: Costs, *, step_seconds: float | None = None
) -> tuple[Advice, ...]:
    """Returns changes that make a step shorter: first real ones, then bounds, each by its gain.

    Args:
        program: What is run now.
        costs: What it takes.
        step_seconds: The time of a step that was measured. Expected times are then this time,
            shorter by the gain that the simulator sees. By default the simulated time.

    Raises:
        ScheduleError: If the costs are not those of the program's stages.
    """
    num_steps = _num_steps(program, costs)
    present = simulate(program, costs, num_steps=num_steps)
    base = present.step_seconds[-1]
    if present.timeline is None or base <= 0:
        return ()
    path = critical_path(Lookup(present.timeline), num_steps - 1)
    knows_memory = any(stage.held_bytes or stage.activation_bytes for stage in costs.stages)
    most = most_tried(program) // num_steps
    found = []
    for _, what_if in zip(range(max(1, most)), what_ifs(program, costs, path), strict=False):
        simulated = simulate(what_if.program, what_if.costs, num_steps=num_steps, records=False)
        gain = 1 - simulated.step_seconds[-1] / base
        if gain >= _LEAST_GAIN:
            expected = (step_seconds or base) * (1 - gain)
            peak = max(simulated.peak_bytes) if knows_memory else 0
            found.append(Advice(what_if.change, expected, gain, what_if.is_bound, peak))
    return tuple(sorted(found, key=lambda advice: (advice.is_bound, -advice.gain, advice.change)))


def steady_seconds(program: Program, costs: Costs) -> float:
    """Returns the simulated time of a step that follows another.

    Raises:
        ScheduleError: If the costs are not those of the program's stages.
    """
    steps = simulate(program, costs, num_steps=_num_steps(program, costs), records=False)
    return steps.step_seconds[-1]


def _num_steps(program: Program, costs: Costs) -> int:
    # Parameters that return under the next step's forwards need two steps to be seen.
    return 2 if not costs.ranks_meet or any(c.readers for c in program.collectives) else 1


def most_tried(program: Program) -> int:
    """Returns how many changes are simulated at most: many of a small program, few of a large."""
    return max(1, _MOST_ITEMS // max(1, program.num_items))
