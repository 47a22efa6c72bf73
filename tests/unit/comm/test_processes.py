"""What is known of a process on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public

from pipegrad.comm.processes import Neighbours, process_state
from pipegrad.comm.store import SignedStore


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


def test_a_process_runs_is_stopped_and_ends(
    monkeypatch: pytest.MonkeyPatch, child: subprocess.Popen[bytes]
) -> None:
    found = neighbours(monkeypatch, 2, of_2=f"{child.pid} {process_state(child.pid)[1]}")
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


def test_a_process_that_was_not_seen_to_run_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number may be another one's: in another container, or on another machine of this name."""
    own = os.getpid()
    found = neighbours(monkeypatch, 4, of_2=f"{own} 1", of_3=f"{own} ", of_5="1 1")
    assert not found.learn()  # rank 4 has not come
    assert (found.known, found.state(2), found.gone()) == ({}, "", set())
    assert found.sign(2).startswith("does not answer: its process or machine has ended")


def test_a_rank_alone_on_its_machine_has_no_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    own = f"{os.getpid()} {process_state(os.getpid())[1]}"
    found = neighbours(monkeypatch, 1, of_0=own, of_2=own)
    assert (found.learn(), found.known) == (True, {})
