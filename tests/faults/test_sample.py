"""A sample of the fault matrix. `python -m tests.faults` runs all of it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.faults.cell import Cell
from tests.faults.outcome import Outcome, outcome

Names = tuple[str, str, str]
TEST = "test_a_fault_ends_as_stated"
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


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Iterator[dict[Names, Future[Outcome]]]:
    """Starts the cells that are selected, three at a time: most of their time they wait."""
    here = {item.name for item in request.session.items if item.path == request.path}
    chosen = [names for names in SAMPLE if f"{TEST}[{' '.join(names)}]" in here]
    with ThreadPoolExecutor(3) as pool:
        yield {
            names: pool.submit(outcome, Cell.of(*names), by_torchrun=names == TORCHRUN)
            for names in chosen
        }


@pytest.mark.parametrize("names", SAMPLE, ids=" ".join)
def test_a_fault_ends_as_stated(names: Names, outcomes: dict[Names, Future[Outcome]]) -> None:
    found = outcomes[names].result()
    assert not found.complaints, found.ended.stderr
