"""Runs a function on several ranks: new processes on this machine in one gloo process group.

This is the caller's side. `rank_process` is the side of a rank. A `Task` goes to each rank, then
`Call`s, and a `Report` of each comes back.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from typing import Any, Self, TypeVar, cast

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public

from pipegrad.comm.store import STORE_KEY, loopback_store, of_one_machine
from pipegrad.testing.rank_process import (
    GRACE_SECONDS,
    LEAVE_SECONDS,
    Call,
    Report,
    Task,
    pickled,
    serve,
)

ResultT = TypeVar("ResultT")

_PRELOADED = (
    "pipegrad.testing.rank_process",
    "torch",
    "torch.distributed",
    "torch.distributed.device_mesh",
    "torch.distributed.pipelining",
    "pipegrad.testing",
)
_ONE_CARD = {
    "LOCAL_RANK": "0",
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "4",
}
# Within this time, a dead rank and the errors that it causes on others may be seen in any order.
_SETTLE_SECONDS = 0.1
_STACK_SECONDS = 2.0  # timeout for stuck ranks to write their stacks

_group_numbers = itertools.count()
_store_lock = threading.Lock()


def run_ranks(
    function: Callable[..., ResultT], num_ranks: int, *args: object, timeout_seconds: float = 300.0
) -> list[ResultT]:
    """Returns the results of ``function(*args)`` on each rank, in rank order.

    Every rank is a new process with one thread. It has the caller's ``os.environ``, ``sys.path``
    and working directory. Its default process group is gloo over ``num_ranks`` ranks. Function,
    arguments and results are pickled, tensors by value. The function must be defined at the top
    level of a module. A rank that is done stays until all ranks are done, so its peers can finish.

    The processes come from multiprocessing's fork server, which imports torch once. So settings
    that Python or torch read when they load, such as ``PYTHONHASHSEED``, are fixed by the first
    call. Ranks look up host names only in files, never in the DNS.

    Args:
        function: Runs on every rank.
        num_ranks: Number of processes.
        *args: Arguments for the function, the same on every rank.
        timeout_seconds: Timeout for all ranks to finish. The timeout of the process group is a
            little longer, so that one error shows where every rank is.

    Raises:
        TimeoutError: If ranks did not finish in time. Names them, and notes have their stacks.
        RuntimeError: If a rank ended without a result. Names rank and exit code.
        TypeError: If the function, an argument, a result or an exception does not pickle.
        BaseException: The exception of the first rank that failed. A note has rank and traceback.
            The other ranks get a few seconds to end and are then killed.
    """
    with Ranks(num_ranks, timeout_seconds=timeout_seconds) as ranks:
        return ranks.run(function, *args)


class Ranks:
    """Ranks that stay: each runs one function after the other, as with `run_ranks`.

    A function that fails ends all ranks. Nothing is run after that.

    Args:
        num_ranks: Number of processes.
        timeout_seconds: Timeout for all ranks to finish a function, if `run` is given none.
    """

    def __init__(self, num_ranks: int, *, timeout_seconds: float = 300.0) -> None:
        if num_ranks < 1:
            raise ValueError(f"num_ranks is {num_ranks}, expected at least 1")
        self.is_open = True
        self._timeout_seconds = timeout_seconds
        self._ranks: list[_Rank] = []
        store = (_store_server().port, f"world{next(_group_numbers)}")
        launch = of_one_machine()
        try:
            for rank in range(num_ranks):
                environment = _environment(rank, num_ranks, launch)
                self._ranks.append(
                    _Rank(Task(rank, num_ranks, store, timeout_seconds, environment))
                )
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self,
        function: Callable[..., ResultT],
        *args: object,
        timeout_seconds: float | None = None,
    ) -> list[ResultT]:
        """Returns the results of ``function(*args)`` on each rank, in rank order.

        Raises:
            RuntimeError: If the ranks have ended. Otherwise as `run_ranks`.
        """
        if not self.is_open:
            raise RuntimeError("these ranks have ended: start others")
        seconds = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        try:
            call = Call(_home(function), pickled((function, args), "the function or its arguments"))
            for rank in self._ranks:
                rank.send(call)
            _collect(self._ranks, time.monotonic() + seconds)
            return _results(self._ranks, seconds)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the ranks."""
        self.is_open = False
        for rank in self._ranks:
            rank.connection.close()  # ends the ranks that are done and wait for the others
        for rank in sorted(self._ranks, key=lambda rank: rank.report is not None):
            rank.end()
        self._ranks = []


class _Rank:
    """One rank's process, seen from the caller."""

    def __init__(self, task: Task) -> None:
        self.rank = task.rank
        self.report: Report | None = None
        self._stack = tempfile.TemporaryFile()  # noqa: SIM115 - end() closes it
        context = _fork_server()
        self.connection, rank_end = context.Pipe()
        # The fork server has the output streams of its first start. The rank must write to the
        # caller's current ones, so they are sent to it.
        outputs = [
            Connection(os.dup(number), readable=False) for number in (1, 2, self._stack.fileno())
        ]
        self.process = context.Process(target=serve, args=(task, rank_end, *outputs))
        try:
            self.process.start()
        except BaseException:
            self._stack.close()
            raise
        finally:
            for end in (rank_end, *outputs):
                end.close()

    def send(self, call: Call) -> None:
        """Starts a call. A process that is gone is noticed when its report is received."""
        self.report = None
        with contextlib.suppress(OSError):
            self.connection.send(call)

    def receive(self) -> None:
        """Receives the report, or makes one for a process that ended without it."""
        try:
            if not self.connection.poll():
                raise EOFError
            self.report = self.connection.recv()
        except (EOFError, OSError):
            self.process.join(GRACE_SECONDS)
            text = f"rank {self.rank} ended without a result: {_exit_words(self.process.exitcode)}"
            # Other ranks fail because this one is gone, and may report first. An earlier time makes
            # this report the first failure.
            seconds = time.monotonic() - _SETTLE_SECONDS
            self.report = Report(self.rank, seconds, pickle.dumps(RuntimeError(text)), text)

    def stack(self, deadline: float) -> str:
        """Returns the stack that the process writes after SIGUSR1; waits until the deadline."""
        previous, text = b"", b""
        while time.monotonic() < deadline and not (text and text == previous):
            time.sleep(0.02)
            # `pread`: the process writes through the same file offset, which must not move.
            previous, text = text, os.pread(self._stack.fileno(), 2**20, 0)
        return text.decode(errors="replace") or "(no stack: it had not begun, or it cannot run)"

    def end(self) -> None:
        """Ends the process. A process that has reported gets time to end by itself."""
        if self.report is not None:
            self.process.join(LEAVE_SECONDS + 1.0)
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.process.close()
        self._stack.close()


def _collect(ranks: Sequence[_Rank], deadline: float) -> None:
    """Waits for the reports until the deadline, and only a few seconds after a failure."""
    while pending := {r: (r.connection, r.process.sentinel) for r in ranks if r.report is None}:
        left = deadline - time.monotonic()
        ready = wait([end for ends in pending.values() for end in ends], left)
        if not ready:
            return
        for rank in (r for r, ends in pending.items() if any(end in ready for end in ends)):
            rank.receive()
            if rank.report is not None and rank.report.summary:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)


def _results(ranks: Sequence[_Rank], timeout_seconds: float) -> list[Any]:
    reports = [rank.report for rank in ranks if rank.report is not None]
    stuck = [rank for rank in ranks if rank.report is None]
    failures = sorted((r for r in reports if r.summary), key=lambda report: report.seconds)
    if failures:
        raise _first_error(failures, killed=_names(stuck))
    if stuck:
        raise _late_error(stuck, timeout_seconds)
    return [_unpickled(report) for report in reports]


def _first_error(failures: Sequence[Report], *, killed: str) -> BaseException:
    first, *others = failures
    try:
        error = cast("BaseException", _unpickled(first))
    except TypeError as unreadable:
        error = unreadable
    error.add_note(f"First failure on rank {first.rank}. {first.traceback}".rstrip())
    for other in others:
        error.add_note(f"Then on rank {other.rank}: {other.summary}")
    if killed:
        error.add_note(f"Killed, having neither finished nor failed: rank {killed}")
    return error


def _late_error(stuck: Sequence[_Rank], timeout_seconds: float) -> TimeoutError:
    error = TimeoutError(f"not finished after {timeout_seconds:g} s: rank {_names(stuck)}")
    # All ranks get the signal before any stack is read. If the signal ends a rank, its peers fail
    # soon, and could not write their stacks any more.
    for rank in stuck:
        if rank.process.is_alive():
            os.kill(rank.process.pid or 0, signal.SIGUSR1)
    deadline = time.monotonic() + _STACK_SECONDS
    for rank in stuck:
        error.add_note(f"Rank {rank.rank}, innermost call first:\n{rank.stack(deadline)}")
    return error


def _names(ranks: Sequence[_Rank]) -> str:
    return ", ".join(str(rank.rank) for rank in ranks)


def _exit_words(code: int | None) -> str:
    return f"killed by {signal.Signals(-code).name}" if code and code < 0 else f"exit code {code}"


def share_one_card(rank: int) -> None:
    """Lets ranks on NCCL share card 0. Call it in each, before the process group is made.

    NCCL refuses two ranks on one device, unless they seem to be on two hosts. They talk through
    sockets then: results are right, and times mean nothing.

    Args:
        rank: Of this process.
    """
    os.environ.update(_ONE_CARD, NCCL_HOSTID=f"pipegrad-rank-{rank}")


@functools.cache
def _fork_server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    # pytest is preloaded only if the caller uses it. Then its test modules import it on every rank.
    context.set_forkserver_preload([*_PRELOADED, *({"pytest"} & sys.modules.keys())])
    return context


def _store_server() -> TCPStore:
    with _store_lock:  # threads that start ranks at the same time share one
        return _started_store_server()


@functools.cache
def _started_store_server() -> TCPStore:
    """Returns the store of this process, on loopback only. Process groups differ by prefix."""
    return loopback_store()


def _environment(rank: int, num_ranks: int, launch: Mapping[str, str]) -> dict[str, str]:
    settings = {"RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": 1}
    settings |= {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    own = {name: str(value) for name, value in settings.items()}
    return {**launch, **os.environ, STORE_KEY: launch[STORE_KEY], **own}


def _home(function: Callable[..., Any]) -> tuple[str, str | None]:
    name = (function.func if isinstance(function, functools.partial) else function).__module__
    return name, getattr(sys.modules.get(name), "__file__", None)


def _unpickled(report: Report) -> object:
    try:
        return pickle.loads(report.payload)
    except Exception as error:
        subject = report.summary or "the result"
        raise TypeError(f"rank {report.rank} sent what cannot be unpickled: {subject}") from error
