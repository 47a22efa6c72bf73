"""Signals in a run: the first one is noted, a second one ends it, and then all is as before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from pipegrad.train.process.signals import ENDING, Signals, exit_code


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
from pipegrad.train.process import signals
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


@pytest.mark.slow
def test_a_second_signal_ends_a_process_that_hangs() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == exit_code(signal.SIGINT) == 130
    assert ended.stderr == "SIGINT came after SIGTERM: ended at once\n"
