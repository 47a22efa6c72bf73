"""What waits in C++ is waited for in Python: an alarm ends it, and an interrupt loses nothing."""

from __future__ import annotations

import gc
import threading
import time

import pytest

from pipegrad.comm import waits
from pipegrad.comm.waits import ended
from pipegrad.errors import StallError


@pytest.fixture(autouse=True)
def looks(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """What the next looks raise, in order."""
    coming = list[BaseException]()

    def look() -> None:
        if coming:
            raise coming.pop(0)

    monkeypatch.setattr(waits, "_looks", [look])
    monkeypatch.setattr(waits, "_LOOK_SECONDS", 0.01)
    return coming


def test_a_call_has_its_result_or_raises_its_error_at_the_line_of_its_caller() -> None:
    assert [ended(lambda: 1), ended(lambda: None)] == [1, None]
    with pytest.raises(ValueError, match="no") as raised:
        ended(lambda: int("no"))
    assert raised.traceback[0].name.startswith("test_a_call_has_its_result")
    assert ended(threading.get_ident) != threading.get_ident()


def test_an_alarm_ends_the_wait_and_the_next_one_has_another_helper(
    looks: list[BaseException],
) -> None:
    held, came = threading.Event(), list[str]()
    looks.append(StallError("rank 1 has ended"))
    with pytest.raises(StallError, match="rank 1"):
        ended(lambda: came.append(str(held.wait(60))))
    assert ended(lambda: "the next") == "the next"
    assert came == []
    held.set()  # what was left behind comes to its end, and nobody reads it
    while not came:
        time.sleep(0.001)
    assert ended(lambda: "one more") == "one more"


def test_an_interrupt_comes_behind_the_call_and_a_second_one_at_once(
    looks: list[BaseException],
) -> None:
    came = list[int]()

    def slow() -> None:
        time.sleep(0.1)
        came.append(1)

    looks.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        ended(slow)
    assert came == [1]
    held = threading.Event()
    looks += KeyboardInterrupt("first"), KeyboardInterrupt("second")
    with pytest.raises(KeyboardInterrupt, match="second"):
        ended(lambda: held.wait(60))
    held.set()
    assert ended(lambda: 2) == 2


def test_a_thread_without_verbs_waits_by_itself() -> None:
    found = list[object]()

    def run() -> None:
        waits.let_block()
        found.append(ended(threading.get_ident) == threading.get_ident())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [True]


def test_a_helper_ends_with_its_thread() -> None:
    before = threading.active_count()
    thread = threading.Thread(target=ended, args=[int])
    thread.start()
    thread.join()
    del thread
    gc.collect()
    deadline = time.monotonic() + 60.0
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.001)
    assert threading.active_count() <= before
