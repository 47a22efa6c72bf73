"""For how long a rank has been where it is, as its report says."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pipegrad.comm import activity
from pipegrad.comm.activity import Activity, Details, Failed
from pipegrad.comm.failures import Failure
from pipegrad.comm.watch import rank_state
from pipegrad.comm.watch.rank_state import LastProgress, state_of_this_rank


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    time = SimpleNamespace(monotonic=lambda: now[0], time=lambda: 0.0)
    for module in (activity, rank_state):
        monkeypatch.setattr(module, "time", time)
    return now


def test_the_first_item_counts_from_its_activity_and_later_ones_from_when_they_are_seen(
    clock: list[float],
) -> None:
    progress, position = LastProgress(), 0
    with Activity("step 1", within_seconds=1e9, position=lambda: position):
        clock[0] = 103.0
        assert progress.look() == 100.0
        position, clock[0] = 1, 107.0
        assert progress.look() == 107.0
        clock[0] = 110.0
        assert progress.look() == 107.0


def test_a_rank_has_been_in_its_innermost_activity_since_that_began(clock: list[float]) -> None:
    with Activity("step 1", within_seconds=1e9):
        clock[0] = 104.0
        with Activity("the optimizer"):
            clock[0] = 109.5
            state = state_of_this_rank(0, None, LastProgress())
    assert (state.doing, state.seconds) == (("step 1", "the optimizer"), 5.5)


@pytest.mark.usefixtures("clock")
def test_a_rank_that_has_failed_is_where_it_failed_and_waits_for_nobody() -> None:
    details = Details(item="compute 1F0", waits_for=(2,))
    failed = Failed(("step 3", "scheduler.step() 4"), details, None)
    failure = Failure("ValueError: boom", follows=False, time=-2.5, failed=failed)
    with Activity("the report", within_seconds=1e9):
        state = state_of_this_rank(1, failure, LastProgress())
    assert (state.doing, state.item, state.seconds) == (failed.doing, "compute 1F0", 2.5)
    assert (state.error, state.follows, state.waits) == ("ValueError: boom", False, ())
