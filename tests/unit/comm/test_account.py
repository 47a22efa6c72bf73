"""What a rank tells of itself: where it is, for how long, and what it has raised."""

from __future__ import annotations

import gc
import pickle
import threading
from types import SimpleNamespace

import pytest

from pipegrad.comm import activity
from pipegrad.comm.activity import Account, Activity, Details, failed_at, failure_of, frames_of
from pipegrad.errors import StepError, causes_of, root_of


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    time = SimpleNamespace(monotonic=lambda: now[0], time=lambda: 0.0)
    monkeypatch.setattr(activity, "time", time)
    return now


def test_an_item_counts_from_when_it_is_seen(clock: list[float]) -> None:
    account, position = Account(0), 0
    with Activity("step 1", within_seconds=1e9, position=lambda: position):
        account.look()
        clock[0] = 103.0
        assert account.record().seconds == 3.0
        position, clock[0] = 1, 107.0
        account.look()
        clock[0] = 110.0
        assert account.record().seconds == 3.0


def test_a_rank_has_been_in_its_innermost_activity_since_that_began(clock: list[float]) -> None:
    account = Account(0)
    with Activity("step 1", within_seconds=1e9):
        clock[0] = 104.0
        with Activity("the optimizer"):
            clock[0] = 109.5
            record = account.record()
    assert (record.at, record.seconds, record.waits) == ("step 1, the optimizer", 5.5, ())
    assert record.words.startswith("was in step 1, the optimizer, for 5.5 s (")


def test_time_that_does_not_count_makes_nothing_late(clock: list[float]) -> None:
    account = Account(3)
    with Activity("step 1", within_seconds=8.0):
        clock[0] = 102.0
        account.look()
        clock[0] = 106.0
        account.look(counts=False)
        clock[0] = 112.0
        late = "step 1 took longer than 8 s on rank 3"
        assert (account.late(), account.late(share=0.5)) == (None, late)
        clock[0] = 112.1
        assert account.late() == late


def test_a_rank_that_has_failed_is_where_it_failed_and_waits_for_nobody() -> None:
    account, error = Account(1), ValueError("boom")
    with pytest.raises(ValueError, match="boom"):  # noqa: SIM117
        with Activity("step 3", details=lambda: Details("compute 1F0", waits_for=(2,))):
            raise error
    account.fail(error, " (a file)")
    with Activity("the report", within_seconds=1e9):
        record = account.record()
    assert (record.at, record.waits, record.words) == (
        "step 3, compute 1F0",
        (),
        "was in step 3, compute 1F0",
    )
    assert record.failure.error.startswith("ValueError('boom') (test_account.py:")
    assert (record.failure.follows, record.failure.note) == (False, " (a file)")


def test_an_error_goes_to_another_process_with_what_its_thread_was_at() -> None:
    """Its grid is drawn by objects that cannot be pickled; it goes without."""
    outer = Activity("a step", details=lambda: Details("1F0", drawing=lambda _number, _marks: ""))
    with pytest.raises(StepError) as raised, outer, Activity("a part of it"):
        raise StepError("no value")
    arrived = pickle.loads(pickle.dumps(raised.value))
    assert str(arrived) == "no value"
    failed, before = failed_at(arrived), failed_at(raised.value)
    assert failed is not None
    assert before is not None
    assert failed.doing == before.doing == ("a step", "a part of it")
    assert failed == before._replace(drawing=None)
    assert before.drawing is not None


def test_the_innermost_frame_comes_first_and_the_garbage_collector_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A gc.disable() of the user was lost, between two calls of the watch."""
    monkeypatch.setattr(gc, "enable", pytest.fail)
    monkeypatch.setattr(gc, "disable", pytest.fail)

    def inner() -> list[str]:
        return [frame.name for frame in frames_of(threading.get_ident())]

    name = test_the_innermost_frame_comes_first_and_the_garbage_collector_is_left_alone.__name__
    assert inner()[:3] == ["frames_of", "inner", name]
    assert frames_of(8) == []


def test_a_ring_of_causes_has_an_end() -> None:
    """Ranks stayed for ever in their last words: `raise inner from outer` had closed the ring."""
    inner, outer = ValueError("inner"), RuntimeError("outer")
    outer.__cause__, inner.__cause__ = inner, outer
    assert [*causes_of(outer)] == [outer, inner]
    assert root_of(outer) is inner
    assert "inner" in failure_of(outer).error
