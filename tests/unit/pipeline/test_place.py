"""An interrupt between two items, and the grid in the report of a failure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest

from pipegrad import Topology, schedules
from pipegrad.pipeline.place import Place
from pipegrad.pipeline.steps import StepKind
from pipegrad.schedules import lower
from pipegrad.schedules.program.program import Program

RANKS = 2


TOPOLOGY = Topology((("pp", RANKS),), tuple(range(RANKS)), tuple(range(RANKS)), 0)


def program(*, forward_only: bool) -> Program:
    schedule = schedules.build("1f1b", num_ranks=RANKS, num_microbatches=3)
    return lower(schedule, forward_only=forward_only)


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
    marks = {0: "0B0", 1: "1F0"}
    lines = Place(program(forward_only=forward_only), TOPOLOGY).drawn(0, marks).splitlines()
    assert lines[1:] == grid


class Interrupted(list[Any]):
    """Calls behind which Ctrl-C comes."""

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()
        raise KeyboardInterrupt


def test_an_interrupt_behind_the_last_item_stays_an_interrupt() -> None:
    """It was an IndexError, since no item was left to name."""
    parts: dict[str, Any] = dict.fromkeys(
        ("values", "compute", "transfers", "sync", "weights", "sharded"), Mock()
    )
    kind = StepKind(program(forward_only=True), Mock(), topology=TOPOLOGY, **parts)
    kind._calls = Interrupted(kind._calls)
    with pytest.raises(KeyboardInterrupt):
        kind.run(Mock(), Mock(), keeps_outputs=False)
    details = kind.activity.details
    assert details is not None
    assert details().item == "all items of the step are done"
