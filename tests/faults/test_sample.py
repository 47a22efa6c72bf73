"""Five faults of a rank end the job as stated: a kill, a stop, a stall, an error and a shape.

`scripts/faults` has all faults at all places.
"""

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
    ("stop", "evaluation", "2x2"),  # waits for a timeout, while the others run beside it
    TORCHRUN,
    ("stall", "writing", "4"),
    ("raise", "checkpoint", "4"),
    ("shape", "forward", "2x2"),
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
