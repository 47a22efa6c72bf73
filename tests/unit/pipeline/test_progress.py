"""The grid in the report of a failure."""

from __future__ import annotations

import pytest

from pipegrad import Topology, schedules
from pipegrad.pipeline.executor import drawn as grid_of
from pipegrad.schedules import lower
from pipegrad.schedules.program.program import Program

RANKS = 2


def drawn(program: Program, marks: dict[int, str]) -> list[str]:
    topology = Topology((("pp", RANKS),), tuple(range(RANKS)), tuple(range(RANKS)), 0)
    return grid_of(program, topology, 0, marks).splitlines()[1:]


@pytest.mark.parametrize(
    ("forward_only", "grid"),
    [
        (
            False,
            [
                "rank 0  0F0   0F1         >0B0< 0F2   0B1         0B2",
                "rank 1        >1F0< 1B0   1F1   1B1   1F2   1B2",
            ],
        ),
        # The report of a failed evaluation had no grid: it raised, and the report was lost.
        (True, ["rank 0  0F0   0F1   0F2", "rank 1  >1F0< 1F1   1F2"]),
    ],
    ids=["training", "evaluation"],
)
def test_the_last_actions_are_marked(forward_only: bool, grid: list[str]) -> None:
    schedule = schedules.build("1f1b", num_ranks=RANKS, num_microbatches=3)
    program = lower(schedule, forward_only=forward_only)
    assert drawn(program, {0: "0B0", 1: "1F0"}) == grid
