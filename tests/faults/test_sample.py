"""A sample of the fault matrix. `python -m tests.faults` runs all of it."""

from __future__ import annotations

import pytest

from tests.faults.cell import Cell
from tests.faults.outcome import outcome

SAMPLE = (
    ("raise", "construction", "2x2"),
    ("raise", "checkpoint", "4"),
    ("exit", "optimizer", "4"),
    ("_exit", "reduction", "2x2"),
    ("kill", "first step", "2x2"),
    ("stop", "evaluation", "2x2"),
    ("stall", "transfer", "4"),
    ("slow", "parameter sync", "2x2"),
    ("no gradient", "backward", "4"),
    ("shape", "forward", "2x2"),
    ("non-finite", "reduction", "4"),
)


@pytest.mark.parametrize("names", SAMPLE, ids=" ".join)
def test_a_fault_ends_as_stated(names: tuple[str, str, str]) -> None:
    found = outcome(Cell.of(*names))
    assert not found.complaints, found.ended.stderr


def test_a_killed_rank_ends_torchrun_with_one_report() -> None:
    found = outcome(Cell.of("kill", "forward", "4"), by_torchrun=True)
    assert not found.complaints, found.ended.stderr
