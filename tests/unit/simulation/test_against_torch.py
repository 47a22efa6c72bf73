"""simulate against the simulation of torch's own drawings: every action begins at the same time."""

from __future__ import annotations

import contextlib
import io

import pytest

from pipegrad.schedules import Action, Schedule, build, lower
from pipegrad.schedules.schedule import Kind
from pipegrad.simulation.costs import Costs, StageCosts
from pipegrad.simulation.timeline import COMPUTE
from tests.support.schedules.makespan import recorded

# Private, and so missing in some versions of torch.
visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")

RANKS, MICROBATCHES = 4, 8
WIDTHS: dict[Kind, int] = {"F": 1, "B": 2, "I": 1, "W": 1}  # of torch's drawings
Begins = dict[Action, float]


def spaced(rows: list[list[str]]) -> Begins:
    """Returns when each action begins, as torch draws rows of actions."""
    from torch.distributed.pipelining.schedules import _Action

    actions = [[_Action.from_str(text) for text in row] for row in rows]
    with contextlib.redirect_stdout(io.StringIO()):  # it prints every step
        drawn = visualizer.add_schedule_op_spacing(actions)
    begins = Begins()
    for row in drawn:
        time = 0
        for cell in row:
            if cell is None:
                time += 1
                continue
            action = parsed(str(cell))
            begins[action] = float(time)
            time += WIDTHS[action.kind]
    return begins


def parsed(text: str) -> Action:
    kind = next(kind for kind in WIDTHS if kind in text)
    stage, microbatch = map(int, text.split(kind))
    return Action(stage, kind, microbatch)


def simulated(schedule: Schedule) -> Begins:
    """Returns the same of a simulation."""
    costs = Costs((StageCosts(1.0, 2.0, 1.0),) * len(schedule.stage_to_rank))
    computes = (s for s in recorded(lower(schedule), costs).spans if s.kind in COMPUTE)
    return {parsed(span.action): span.begin for span in computes}


@pytest.mark.parametrize(
    "name", ["gpipe", "1f1b", "eager-1f1b", "interleaved-1f1b", "zb-h1", "zbv", "v-half", "v-min"]
)
def test_our_schedules(name: str) -> None:
    schedule = build(name, num_ranks=RANKS, num_microbatches=MICROBATCHES)
    assert simulated(schedule) == spaced([list(map(str, row)) for row in schedule.actions])
