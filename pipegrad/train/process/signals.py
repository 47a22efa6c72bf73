"""Signals: a run that is asked to end saves first.

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
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Self

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
# Launchers send a signal again that the terminal or the cluster has already sent to each process.
_ECHO_SECONDS = 1.0


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
