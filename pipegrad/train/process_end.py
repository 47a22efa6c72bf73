"""Process end: what ends the process of a rank, a signal or a failure, and what it says then.

A run that is asked to end saves first. Of a failure there is one report for all ranks: that of the
watch (`pipegrad.comm.watch`). The rank that has made it prints it. torchrun gets the cause on each
machine, and prints it last.

[Note: a signal in a step] A signal may reach one rank alone, at any moment. It only sets a number.
The ranks exchange it in the message of metrics that every step makes. So all ranks stop after the
same step.

Python calls a handler in the main thread, between two of its instructions. A rank that waits in a
collective makes none. So a thread reads the signals from a file, into which Python writes each
signal at once. Then a second signal ends a process that hangs, too.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import torch.distributed as dist

from pipegrad import run_files
from pipegrad.comm.activity import failure_of
from pipegrad.comm.agreement import once_a_machine
from pipegrad.comm.failures import FAILED, FailureReport
from pipegrad.comm.watch import watch
from pipegrad.errors import PipegradError
from pipegrad.printable import printable_lines

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
# Launchers send a signal again that the terminal or the cluster has already sent to each process.
_ECHO_SECONDS = 1.0
_LATER_SECONDS = 0.5  # for the rank that prints the report: who ends first makes torchrun end all


class Signals:
    """Takes SIGINT, SIGTERM and SIGUSR1 inside of ``with signals``, in the main thread.

    The first one sets `received`. A second one ends the process at once. Contexts may be nested:
    the innermost one takes the signals.

    Args:
        end: Called by a thread with the first signal, to end the process. By default nothing is.

    Attributes:
        received: Number of the first signal; 0 if there was none.
    """

    def __init__(self, end: Callable[[int], object] | None = None) -> None:
        self.received = 0
        self._end = end
        self._since = 0.0
        self._before: dict[signal.Signals, Any] = {}
        self._sockets: tuple[socket.socket, socket.socket] | None = None
        self._old_file = -1

    def __enter__(self) -> Self:
        # Python allows handlers in the main thread alone. A notebook's thread keeps its own.
        if threading.current_thread() is not threading.main_thread():
            return self
        self._sockets = socket.socketpair()
        reading, writing = self._sockets
        writing.setblocking(False)
        self._old_file = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, _ignore) for number in ENDING}
        threading.Thread(
            target=self._read, args=(reading,), name="pipegrad signals", daemon=True
        ).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        if self._sockets is None:
            return
        for number, handler in self._before.items():
            # None: it was not made by Python, and cannot be set again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._old_file)
        self._sockets[1].close()  # this ends the thread
        self._sockets = None

    def _read(self, reading: socket.socket) -> None:
        """Reads the numbers of signals until the other end is closed."""
        with reading:
            while numbers := reading.recv(64):
                for number in numbers:
                    if number in ENDING:
                        self._take(number)

    def _take(self, number: int) -> None:
        now = time.monotonic()
        if not self.received:
            self.received, self._since = number, now
            if self._end is not None:
                self._end(number)
        elif now - self._since > _ECHO_SECONDS:
            name = signal.Signals(number).name
            line = f"{name} came after {signal.Signals(self.received).name}: ended at once\n"
            with suppress(OSError):
                os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, line.encode())
            os._exit(exit_code(number))


def exit_code(number: int) -> int:
    """Returns the exit code for a signal, as shells have it."""
    return 128 + number


def _ignore(number: int, frame: FrameType | None) -> None:
    """Is there so that the signal does not act; the thread takes it."""


def show_in(folder: Path) -> None:
    """Lets the report of a failure stand in a run's folder, too."""
    if (watched := watch()) is not None:
        watched.show = partial(_show, folder)


def _show(folder: Path, text: str) -> None:
    _print(text)
    with suppress(OSError):
        _write_text(folder / "failure.txt", f"{text}\n")


def fail(error: BaseException, folder: Path | None, *, shows_traceback: bool) -> int:
    """Prints what has failed, once for all ranks; returns the exit code.

    It takes some seconds at most, also if other ranks are gone.

    Args:
        error: What was raised on this rank.
        folder: Of the run that has failed, if there is one. It takes the traceback.
        shows_traceback: Whether to print the traceback, too.
    """
    file = _write_traceback(error, folder, shows=shows_traceback)
    note = f" (traceback: {file})" if file else ""
    watched = watch()
    # In a process group of the caller, whose ranks go on, nobody may end the job.
    if watched is None or not watched.ends_process:
        words = str(error) if isinstance(error, PipegradError) else failure_of(error).error
        once_a_machine(partial(_print, f"{words}{note}"))
        FailureReport(words, words, 0, "common").tell_launcher()
        return FAILED
    report = watched.fail(error, note)
    if report.kind == "common":
        once_a_machine(partial(_print, report.cause))
    if dist.get_rank() != report.reporter:
        time.sleep(_LATER_SECONDS)
    return report.exit_code


def _print(words: str) -> None:
    print(f"Error: {printable_lines(words)}", file=sys.stderr, flush=True)  # noqa: T201


def _write_traceback(error: BaseException, folder: Path | None, *, shows: bool) -> str:
    """Prints a traceback, writes it into a folder, or both; returns the file, "" without one."""
    text = "".join(traceback.format_exception(error))
    if shows:
        print(printable_lines(text), file=sys.stderr, flush=True)  # noqa: T201
    if folder is not None:
        with suppress(OSError):
            rank = dist.get_rank() if dist.is_initialized() else 0
            _write_text(file := folder / f"failure-rank{rank}.txt", text)
            return str(file)
    return ""


def _write_text(file: Path, text: str) -> None:
    run_files.replace(file, text.encode(errors="backslashreplace"))  # names of files may need it
