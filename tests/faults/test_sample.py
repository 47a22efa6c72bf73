"""A sample of the fault matrix. `python -m tests.faults` runs all of it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.faults.cell import Cell
from tests.faults.outcome import Outcome, outcome
from tests.support.worlds import World

TORCHRUN = ("kill", "forward", "4")  # started by torchrun; the others are ranks without it
SAMPLE = (
    # These wait for a timeout, while the others run beside them.
    ("stop", "evaluation", "2x2"),
    ("stall", "transfer", "4"),
    ("kill", "first step", "2x2"),
    TORCHRUN,
    ("slow", "parameter sync", "2x2"),
    ("raise", "construction", "2x2"),
    ("raise", "checkpoint", "4"),
    ("exit", "optimizer", "4"),
    ("_exit", "reduction", "2x2"),
    ("no gradient", "backward", "4"),
    ("shape", "forward", "2x2"),
    ("non-finite", "reduction", "4"),
)


def run(sample: Sequence[tuple[str, str, str]]) -> list[Outcome]:
    with ThreadPoolExecutor(3) as pool:
        return list(
            pool.map(lambda names: outcome(Cell.of(*names), by_torchrun=names == TORCHRUN), sample)
        )


world = World(SAMPLE, run)


@pytest.mark.parametrize("names", SAMPLE, ids=" ".join)
def test_a_fault_ends_as_stated(names: tuple[str, str, str]) -> None:
    assert not world[names].complaints, world[names].ended.stderr
