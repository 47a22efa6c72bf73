"""What is known of a process on this machine, and how long it waits for threads when it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public

from pipegrad.comm.comm_stream import CommStream
from pipegrad.comm.ending import Ending, set_all_in_vain
from pipegrad.comm.store import SignedStore
from pipegrad.comm.watch import Neighbours, _machine, process_state


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield child
    child.kill()
    child.wait()


def neighbours(monkeypatch: pytest.MonkeyPatch, num_local: int, **posts: str) -> Neighbours:
    """Returns those of rank 1, the first of its machine, after others have posted theirs."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_local))
    store = SignedStore(HashStore())
    for rank, post in posts.items():
        store.set(f"job/{rank.removeprefix('of_')}", post)
    return Neighbours(store, "job", 1)


def post(pid: int, began: str = "", machine: str = "") -> str:
    return f"{pid} {began or process_state(pid)[1]} {machine or _machine()}"


def test_a_process_runs_is_stopped_and_ends(
    monkeypatch: pytest.MonkeyPatch, child: subprocess.Popen[bytes]
) -> None:
    found = neighbours(monkeypatch, 2, of_2=post(child.pid))
    assert (found.learn(), found.state(2), found.gone()) == (True, "running", set())
    child.send_signal(signal.SIGSTOP)
    while found.state(2) == "running":
        time.sleep(0.01)
    assert (found.state(2), found.gone()) == ("stopped", {2})
    child.kill()
    # It runs for a moment between the two, and ends as a zombie: nobody has waited for it.
    while found.state(2) != "ended":
        time.sleep(0.01)
    assert found.sign(2) == f"has ended without a word (process {child.pid})"
    child.wait()
    assert (found.state(2), found.gone()) == ("ended", {2})


def test_a_number_that_is_used_again_is_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    found = neighbours(monkeypatch, 2, of_2=post(os.getpid(), began="1"))
    assert (found.learn(), found.state(2)) == (True, "ended")


def test_a_process_of_another_machine_or_container_is_not_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other, same = "a pid:[1]", post(os.getpid())
    found = neighbours(monkeypatch, 4, of_2=post(1, machine=other), of_3="1  ", of_5=same)
    assert not found.learn()  # rank 4 has not come
    assert (found.known, found.state(2), found.gone()) == ({}, "", set())
    assert found.sign(2).startswith("does not answer: its process or machine has ended")


def test_a_rank_alone_on_its_machine_has_no_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    own = post(os.getpid())
    found = neighbours(monkeypatch, 1, of_0=own, of_2=own)
    assert (found.learn(), found.known) == (True, {})


class Stuck(CommStream):
    """A thread in a collective that never ends."""

    def __init__(self) -> None:
        super().__init__("stuck", torch.device("cpu"), threaded=False)
        self.waits: list[float] = []

    def join(self, timeout_seconds: float | None = None) -> bool:
        self.waits.append(timeout_seconds or 0.0)
        return False


@pytest.mark.parametrize(("has_failed", "waits"), [(False, [10.0, 5.0]), (True, [0.0, 5.0])])
def test_after_a_failure_no_thread_has_time_for_its_collective(
    has_failed: bool, waits: list[float]
) -> None:
    """A stopped rank held others for 15 s more, in the thread that writes checkpoints."""
    thread = Stuck()
    ending = Ending(thread, threads=[thread], is_idle=lambda: True)
    if has_failed:
        set_all_in_vain()
    ending.end()
    assert thread.waits == pytest.approx(waits, abs=0.1)
