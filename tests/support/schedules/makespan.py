"""How long a step takes: where ranks wait for nothing but what they consume, and simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipegrad.schedules import Action, Kind, Program, Schedule
from pipegrad.simulation.costs import Costs
from pipegrad.simulation.simulator import simulate
from pipegrad.simulation.timeline import Timeline


def makespan(
    schedule: Schedule, seconds: Mapping[Kind, float], hop_seconds: Sequence[float] = ()
) -> float:
    """Returns the time of a step whose transfers are asynchronous, and never meet.

    Args:
        schedule: A chain of stages, where all backwards are whole or all are split.
        seconds: For each kind of action its time.
        hop_seconds: For each stage but the last the time of a transfer to the next, or back. By
            default transfers take none.
    """
    num_stages = len(schedule.stage_to_rank)
    hops = hop_seconds or [0.0] * (num_stages - 1)
    ends: dict[Action, float] = {}
    free = [0.0] * schedule.num_ranks
    for action in sorted(schedule.ticks, key=schedule.ticks.__getitem__):
        rank = schedule.stage_to_rank[action.stage]
        ready = [ends[need] + c for need, c in _needs(action, hops).items()]
        free[rank] = ends[action] = max([free[rank], *ready]) + seconds[action.kind]
    return max(free)


def _needs(action: Action, hops: Sequence[float]) -> dict[Action, float]:
    """Returns what an action waits for, and for how long that is on its way."""
    stage, kind, microbatch = action
    if kind == "F":
        return {Action(stage - 1, "F", microbatch): hops[stage - 1]} if stage > 0 else {}
    if kind == "W":
        return {Action(stage, "I", microbatch): 0.0}
    own = {Action(stage, "F", microbatch): 0.0}
    if stage < len(hops):
        own[Action(stage + 1, kind, microbatch)] = hops[stage]
    return own


def warm_ups(schedule: Schedule) -> list[int]:
    """Returns for each rank how many forwards come before its first backward, or first I."""
    kinds = ([action.kind for action in row] for row in schedule.actions)
    return [next(at for at, kind in enumerate(row) if kind != "F") for row in kinds]


def recorded(program: Program, costs: Costs, num_steps: int = 1) -> Timeline:
    """Returns the timeline of a simulation."""
    timeline = simulate(program, costs, num_steps=num_steps).timeline
    assert timeline is not None
    return timeline
