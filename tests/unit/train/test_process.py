"""A process of a run: ranks of one start find each other, and signals end it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest
import torch.distributed as dist
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]  # public

from pipegrad.train.process import ENDING, Signals, exit_code, store_of_start

SIZE = 3


def started(store: Store, ranks: list[int]) -> dict[int, str | None]:
    """Lets ranks start; returns what each reads of what rank 0 wrote, None if it fails."""
    found: dict[int, str | None] = {}

    def start(rank: int) -> None:
        try:
            own = store_of_start(store, rank, SIZE, 3.0)
            if rank == 0:
                own.set("address", str(len(found)))
            own.set(f"rank {rank}", "")
            own.wait([f"rank {other}" for other in range(SIZE)])
            found[rank] = own.get("address").decode()
        except dist.DistStoreError:
            found[rank] = None

    threads = [threading.Thread(target=start, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_a_later_start_does_not_see_an_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    store = HashStore()
    assert started(store, [0, 1, 2]) == dict.fromkeys(range(SIZE), "0")
    # Rank 2 was killed before it came, so the others have waited in vain.
    assert started(store, [0, 1]) == {0: None, 1: None}
    assert started(store, [2, 1, 0]) == dict.fromkeys(range(SIZE), "0")


def test_a_store_of_rank_0_is_new_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    store = HashStore()
    assert store_of_start(store, 0, SIZE, 1.0) is store


def wait_for(signals: Signals) -> int:
    while not signals.received:
        pass
    return signals.received


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_is_noted_and_ends_nothing(number: signal.Signals) -> None:
    before = {number: signal.getsignal(number) for number in ENDING}
    with Signals() as signals:
        assert signals.received == 0
        os.kill(os.getpid(), number)
        assert wait_for(signals) == number
        os.kill(os.getpid(), number)  # the echo of a launcher
    assert {number: signal.getsignal(number) for number in ENDING} == before
    assert signal.set_wakeup_fd(-1) == -1


def test_another_thread_changes_no_handler() -> None:
    before = signal.getsignal(signal.SIGTERM)
    during = []

    def run() -> None:
        with Signals():
            during.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert during == [before]


STUCK = """
import ctypes, os, signal, threading, time
from pipegrad.train import process as signals
signals._ECHO_SECONDS = 0.0
def ask():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGINT)
with signals.Signals():
    threading.Timer(0.1, ask).start()
    # The main thread makes no instruction of Python, as in a collective that hangs.
    while ctypes.CDLL(None).sleep(60):
        pass
"""


def test_a_second_signal_ends_a_process_that_hangs() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == exit_code(signal.SIGINT) == 130
    assert ended.stderr == "SIGINT came after SIGTERM: ended at once\n"


RAISING = """
from pipegrad.train.process import process_group

def layer_of_the_user():
    raise ValueError("no such layer")

with process_group():
    layer_of_the_user()
"""


def test_the_traceback_of_an_unexpected_error_is_printed() -> None:
    one = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", RAISING],
        env={**os.environ, **one, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 1
    assert "in layer_of_the_user\n" in ended.stderr
    assert "ValueError: no such layer" in ended.stderr
