"""Runs a function on several ranks: fresh processes on this machine that form one gloo world.

The caller's side comes first, the ranks' side from `_serve` on. A `_Task` goes one way, a `_Report`
comes back.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib.util
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in __all__

ResultT = TypeVar("ResultT")

_PRELOADED = (
    "torch",
    "torch.distributed",
    "torch.distributed.device_mesh",
    "torch.distributed.pipelining",
    "pipegrad.testing",
)
_GRACE_SECONDS = 5.0  # for ranks to end by themselves after another one failed
_SETTLE_SECONDS = 0.1  # within which a death and the errors it causes elsewhere arrive in any order
_STACK_SECONDS = 2.0  # for a stuck rank to write down where it is
_LEAVE_SECONDS = 2.0  # for a rank that is done to leave its process groups


@dataclass(frozen=True)
class _Task:
    """All that a rank needs; plain data."""

    rank: int
    num_ranks: int
    port: int
    timeout_seconds: float
    environment: dict[str, str]
    module: tuple[str, str | None]  # the function's home: name and file
    call: bytes  # pickled (function, args)
    stack_path: str


@dataclass(frozen=True)
class _Report:
    """How a rank ended: a pickled result, or a pickled exception and its traceback."""

    rank: int
    seconds: float  # on the monotonic clock, which all processes share
    payload: bytes
    traceback: str = ""
    summary: str = ""  # empty for a result


def run_ranks(
    function: Callable[..., ResultT], num_ranks: int, *args: object, timeout_seconds: float = 60.0
) -> list[ResultT]:
    """Returns what ``function(*args)`` returned on each rank, in rank order.

    Every rank is a fresh process with one thread, the caller's ``os.environ``, ``sys.path`` and
    working directory, and a gloo world of ``num_ranks`` as default process group. Function,
    arguments and results travel by pickle and by value, tensors too; the function is defined at the
    top level of a module. A rank that is done stays until all are, so an early one breaks no peer.

    The processes come from multiprocessing's fork server, which imports torch once. What is read
    while Python or torch load (``PYTHONHASHSEED``) is thus fixed at the first call.

    Args:
        function: Runs on every rank.
        num_ranks: Number of processes.
        *args: Arguments for the function, the same on every rank.
        timeout_seconds: For all ranks to finish. The world's own timeout is a little longer, so
            that one error shows where every rank is.

    Raises:
        TimeoutError: If ranks did not finish in time; names them, and notes hold their stacks.
        RuntimeError: If a rank ended without a result; names rank and exit code.
        TypeError: If the function, an argument or a result does not pickle.
        BaseException: What the first failing rank raised; a note holds rank and traceback. The
            other ranks get a few seconds to end and are then killed.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks is {num_ranks}, expected at least 1")
    call = _pickled((function, args), "the function or its arguments")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks: list[_Rank] = []
    with tempfile.TemporaryDirectory(prefix="run_ranks_") as folder:
        try:
            for rank in range(num_ranks):
                task = _Task(
                    rank=rank,
                    num_ranks=num_ranks,
                    port=store.port,
                    timeout_seconds=timeout_seconds,
                    environment=dict(os.environ),
                    module=_home(function),
                    call=call,
                    stack_path=str(Path(folder, str(rank))),
                )
                ranks.append(_Rank(task))
            _collect(ranks, time.monotonic() + timeout_seconds)
            return _results(ranks, timeout_seconds)
        finally:
            _end(ranks)
            del store  # else a kept traceback keeps its server


class _Rank:
    """One rank's process, seen from the caller."""

    def __init__(self, task: _Task) -> None:
        self.rank = task.rank
        self.report: _Report | None = None
        self._stack_path = Path(task.stack_path)
        context = _fork_server()
        self.connection, theirs = context.Pipe()
        # The fork server has the streams of its own start; the rank writes where the caller does.
        streams = [Connection(os.dup(number), readable=False) for number in (1, 2)]
        self.process = context.Process(target=_serve, args=(task, theirs, *streams))
        try:
            self.process.start()
        finally:
            for end in (theirs, *streams):
                end.close()

    def receive(self) -> None:
        """Takes the report, or makes one for a process that is gone without it."""
        try:
            if not self.connection.poll():
                raise EOFError
            self.report = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            self.process.join(_GRACE_SECONDS)
            text = f"rank {self.rank} ended without a result: {_exit_words(self.process.exitcode)}"
            seconds = time.monotonic() - _SETTLE_SECONDS
            self.report = _Report(self.rank, seconds, pickle.dumps(RuntimeError(text)), "", text)

    def stack(self, deadline: float) -> str:
        """Returns what the process wrote down after SIGUSR1, waiting for it until the deadline."""
        text = ""
        while time.monotonic() < deadline:
            time.sleep(0.02)
            with contextlib.suppress(FileNotFoundError):
                before, text = text, self._stack_path.read_text(errors="replace")
                if text and text == before:
                    break
        return text or "(no stack: it had not begun, or it cannot run)"

    def end(self) -> None:
        """Ends the process; one that has reported may leave by itself."""
        if self.report is not None:
            self.process.join(_LEAVE_SECONDS + 1.0)
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.process.close()


def _collect(ranks: Sequence[_Rank], deadline: float) -> None:
    """Waits for the reports until the deadline; after a failure only for the grace."""
    while pending := {r: (r.connection, r.process.sentinel) for r in ranks if r.report is None}:
        ready = wait(
            [end for ends in pending.values() for end in ends], deadline - time.monotonic()
        )
        if not ready:
            return
        for rank in (r for r, ends in pending.items() if any(end in ready for end in ends)):
            rank.receive()
            if rank.report is not None and rank.report.summary:
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)


def _results(ranks: Sequence[_Rank], timeout_seconds: float) -> list[Any]:
    reports = [rank.report for rank in ranks if rank.report is not None]
    stuck = [rank for rank in ranks if rank.report is None]
    failures = sorted((r for r in reports if r.summary), key=lambda report: report.seconds)
    if failures:
        raise _first_error(failures, killed=_names(stuck))
    if stuck:
        raise _late_error(stuck, timeout_seconds)
    return [_unpickled(report) for report in reports]


def _first_error(failures: Sequence[_Report], *, killed: str) -> BaseException:
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
    for rank in stuck:  # all first: a rank that the signal ends takes its peers with it
        if rank.process.is_alive():
            os.kill(rank.process.pid or 0, signal.SIGUSR1)
    deadline = time.monotonic() + _STACK_SECONDS
    for rank in stuck:
        error.add_note(f"Rank {rank.rank}, innermost call first:\n{rank.stack(deadline)}")
    return error


def _names(ranks: Sequence[_Rank]) -> str:
    return ", ".join(str(rank.rank) for rank in ranks)


def _end(ranks: Sequence[_Rank]) -> None:
    for rank in ranks:
        rank.connection.close()  # lets those go that are done
    for rank in sorted(ranks, key=lambda rank: rank.report is not None):
        rank.end()


@functools.cache
def _fork_server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    # pytest only where the caller uses it: then its test modules import it on every rank.
    context.set_forkserver_preload([*_PRELOADED, *({"pytest"} & sys.modules.keys())])
    return context


def _home(function: Callable[..., Any]) -> tuple[str, str | None]:
    name = (function.func if isinstance(function, functools.partial) else function).__module__
    return name, getattr(sys.modules.get(name), "__file__", None)


def _pickled(value: object, what: str) -> bytes:
    # Not multiprocessing's pickler: torch teaches that one to send tensors as shared memory.
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise TypeError(f"{what} cannot be pickled: {error}") from error


def _unpickled(report: _Report) -> object:
    try:
        return pickle.loads(report.payload)
    except Exception as error:
        what = report.summary or "the result"
        raise TypeError(f"rank {report.rank} sent what cannot be unpickled: {what}") from error


def _exit_words(code: int | None) -> str:
    return f"killed by {signal.Signals(-code).name}" if code and code < 0 else f"exit code {code}"


def _serve(task: _Task, connection: Connection, stdout: Connection, stderr: Connection) -> NoReturn:
    """Is the main function of a rank's process."""
    os.dup2(stdout.fileno(), 1)
    os.dup2(stderr.fileno(), 2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller gets it too, and ends this process
    threading.Thread(target=_follow_caller, daemon=True).start()
    with Path(task.stack_path).open("w", encoding="utf-8") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        report = _report(task)
        with contextlib.suppress(OSError, EOFError):  # a caller that is gone
            connection.send_bytes(pickle.dumps(report))
            if not report.summary:  # a failed rank leaves at once, which wakes its peers
                connection.poll(None)
                _leave()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(0)  # whatever threads still wait for


def _follow_caller() -> None:
    caller = multiprocessing.parent_process()
    assert caller is not None
    caller.join()
    os._exit(1)


def _report(task: _Task) -> _Report:
    try:
        payload = _pickled(_call(task), f"the result of rank {task.rank}")
        return _Report(task.rank, time.monotonic(), payload)
    except BaseException as error:  # noqa: BLE001 - SystemExit too
        seconds, text = time.monotonic(), "".join(traceback.format_exception(error))
        summary = f"{type(error).__qualname__}: {error}"
        try:
            payload = _pickled(error, f"what rank {task.rank} raised, {summary},")
        except TypeError as unpicklable:
            payload = pickle.dumps(unpicklable)
        return _Report(task.rank, seconds, payload, text, summary)


def _call(task: _Task) -> object:
    os.environ.clear()
    os.environ.update({"GLOO_SOCKET_IFNAME": "lo"} | task.environment)
    os.environ.update(RANK=str(task.rank), LOCAL_RANK=str(task.rank), OMP_NUM_THREADS="1")
    os.environ["WORLD_SIZE"] = str(task.num_ranks)
    torch.set_num_threads(1)
    _import_home(*task.module)
    function, args = pickle.loads(task.call)
    timeout = timedelta(seconds=task.timeout_seconds + _GRACE_SECONDS)
    store = TCPStore("127.0.0.1", task.port, is_master=False, timeout=timeout)
    dist.init_process_group(
        "gloo", store=store, rank=task.rank, world_size=task.num_ranks, timeout=timeout
    )
    result: object = function(*args)
    return result


def _import_home(name: str, path: str | None) -> None:
    """Imports the function's module, from its file where the name leads elsewhere (pytest's do)."""
    if name in sys.modules or path is None:
        return
    with contextlib.suppress(ModuleNotFoundError):
        found = importlib.util.find_spec(name)
        if found is not None and found.origin == path:
            return
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])


def _leave() -> None:
    """Destroys the process groups; not for long, a thread may still sit in a collective."""
    if dist.is_initialized():
        leaving = threading.Thread(target=dist.destroy_process_group, daemon=True)
        leaving.start()
        leaving.join(_LEAVE_SECONDS)
