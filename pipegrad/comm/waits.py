"""Waits that Python can end: no verb waits where only a backend could end the wait.

[Note: waits] A helper thread waits in C++, and the verb waits for the helper, in Python. There are
three reasons: gloo never ends a send or receive that is half on its way when its peer has ended,
torch's store has no limit of time, and an error that is thrown into a thread does not arrive in
C++. The verb looks a few times a second, and raises at its line when a rank has raised the alarm or
its time is over. A helper that stays in C++ is abandoned. Every wait for another rank is one of
these:

1. Transfers and collectives of the host, the store, and groups that are made: `ended`. The wait for
   a send whose message has arrived needs no helper.
2. Tasks of a comm stream, whose thread may stay in C++: `Ticket.wait`, whose callers look.
3. Devices: a verb enqueues kernels, which do not block it.
4. Torch's own stages and shards wait in C++. The watch closes all connections for them. That ends
   each wait but those for a message that is half on its way.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar
from weakref import finalize

import torch.distributed as dist

T = TypeVar("T")
_LOOK_SECONDS = 0.25


class _Helper:
    """A thread that waits in C++ for another one.

    Attributes:
        tasks: The functions that it calls.
        outcome: The result, and the error, of the last call; `done` is released after it is set.
    """

    def __init__(self) -> None:
        self.tasks: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self.outcome: tuple[Any, BaseException | None] | None = None
        self.done = threading.Lock()
        self.done.acquire()
        finalize(threading.current_thread(), self.tasks.put, None)  # it ends with its thread
        threading.Thread(target=self._run, name="pipegrad wait", daemon=True).start()

    def _run(self) -> None:
        while (call := self.tasks.get()) is not None:
            try:
                self.outcome = call(), None
            except BaseException as error:  # noqa: BLE001 - raised by the caller
                self.outcome = None, error
            del call  # because its objects would live until the next call
            self.done.release()

    def come(self, seconds: float) -> None:
        """Waits for the end of a call, at most so long, and looks meanwhile."""
        deadline = time.monotonic() + seconds
        while not self.done.acquire(timeout=_LOOK_SECONDS):
            if self.outcome is not None:  # just now; or an interrupt came right after `acquire`
                self.done.acquire(timeout=_LOOK_SECONDS)
                return
            if time.monotonic() > deadline:
                raise dist.DistNetworkError(f"no answer in {seconds:g} s")
            if not _thread.may_block:
                look()


class PerThread(threading.local):
    """State of a thread: `may_block` if no verb runs in it, and the helper that waits for it."""

    may_block = False
    helper: _Helper | None = None


_thread = PerThread()
_looks: list[Callable[[], object]] = []
os.register_at_fork(after_in_child=lambda: setattr(_thread, "helper", None))


def look() -> None:
    """Raises StallError if a rank has raised the alarm; waits in Python call it often."""
    for each in _looks:
        each()


def look_with(function: Callable[[], object]) -> None:
    """Registers a function that `look` calls."""
    _looks.append(function)


def let_block() -> None:
    """Lets this thread wait in C++: no verb runs in it."""
    _thread.may_block = True


def ended(call: Callable[[], T], seconds: float = math.inf) -> T:
    """Returns the result of a call that waits in C++; see [Note: waits].

    An interrupt is raised after the call, because the effect of half a call is unknown. A second
    interrupt is raised at once.

    Raises:
        StallError: If a rank has raised the alarm. The call still runs.
        DistNetworkError: If it takes longer than so many seconds.
    """
    if _thread.may_block and seconds == math.inf:
        return call()
    helper = _thread.helper or _Helper()
    _thread.helper = None  # unless it comes back
    helper.tasks.put(call)
    interrupt: KeyboardInterrupt | None = None
    try:
        try:
            if not helper.done.acquire(timeout=_LOOK_SECONDS):
                helper.come(seconds)
        except KeyboardInterrupt as error:
            interrupt = error
            helper.come(seconds)
    except BaseException:
        helper.tasks.put(None)  # it ends when the call has
        raise
    _thread.helper = helper
    assert helper.outcome is not None
    (result, raised), helper.outcome = helper.outcome, None
    if interrupt is not None:
        raise interrupt
    if raised is not None:
        raise raised
    return result  # type: ignore[no-any-return]
