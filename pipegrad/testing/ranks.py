"""Runs a function on several ranks: fresh processes on this machine that form one gloo world.

The caller's side comes first, the ranks' side from `_serve` on. A `_Task` goes one way, a `_Report`
comes back.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import importlib.util
import itertools
import multiprocessing
import os
import pickle
import signal
import socket
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
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # public

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
_STACK_SECONDS = 2.0  # for stuck ranks to write down where they are
_LEAVE_SECONDS = 2.0  # for a rank that is done to leave its process groups

_world_numbers = itertools.count()


@dataclass(frozen=True)
class _Task:
    """All that a rank needs; plain data."""

    rank: int
    num_ranks: int
    store: tuple[int, str]  # port, and prefix of this world's keys
    timeout_seconds: float
    environment: dict[str, str]
    module: tuple[str, str | None]  # the function's home: name and file
    call: bytes  # pickled (function, args)


@dataclass(frozen=True)
class _Report:
    """How a rank ended: a pickled result, or a pickled exception with summary and traceback."""

    rank: int
    seconds: float  # on the monotonic clock, which all processes share
    payload: bytes
    summary: str = ""  # empty for a result
    traceback: str = ""


def run_ranks(
    function: Callable[..., ResultT], num_ranks: int, *args: object, timeout_seconds: float = 300.0
) -> list[ResultT]:
    """Returns what ``function(*args)`` returned on each rank, in rank order.

    Every rank is a fresh process with one thread, the caller's ``os.environ``, ``sys.path`` and
    working directory, and a gloo world of ``num_ranks`` as default process group. Function,
    arguments and results travel by pickle and by value, tensors too; the function is defined at the
    top level of a module. A rank that is done stays until all are, so an early one breaks no peer.

    The processes come from multiprocessing's fork server, which imports torch once: what is read
    while Python or torch load (``PYTHONHASHSEED``) is fixed at the first call. Ranks look up host
    names in files only, never in the DNS.

    Args:
        function: Runs on every rank.
        num_ranks: Number of processes.
        *args: Arguments for the function, the same on every rank.
        timeout_seconds: For all ranks to finish. The world's own timeout is a little longer, so
            that one error shows where every rank is.

    Raises:
        TimeoutError: If ranks did not finish in time; names them, and notes hold their stacks.
        RuntimeError: If a rank ended without a result; names rank and exit code.
        TypeError: If the function, an argument, a result or an exception does not pickle.
        BaseException: What the first failing rank raised; a note holds rank and traceback. The
            other ranks get a few seconds to end and are then killed.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks is {num_ranks}, expected at least 1")
    call = _pickled((function, args), "the function or its arguments")
    store = (_store_server().port, f"world{next(_world_numbers)}")
    ranks: list[_Rank] = []
    try:
        for rank in range(num_ranks):
            environment = _environment(rank, num_ranks)
            task = _Task(
                rank, num_ranks, store, timeout_seconds, environment, _home(function), call
            )
            ranks.append(_Rank(task))
        _collect(ranks, time.monotonic() + timeout_seconds)
        return _results(ranks, timeout_seconds)
    finally:
        for started in ranks:
            started.connection.close()  # lets those go that are done
        for started in sorted(ranks, key=lambda rank: rank.report is not None):
            started.end()


class _Rank:
    """One rank's process, seen from the caller."""

    def __init__(self, task: _Task) -> None:
        self.rank = task.rank
        self.report: _Report | None = None
        self._stack = tempfile.TemporaryFile()  # noqa: SIM115 - end() closes it
        context = _fork_server()
        self.connection, theirs = context.Pipe()
        # The fork server has the streams of its own start; the rank writes where the caller does.
        outputs = [
            Connection(os.dup(number), readable=False) for number in (1, 2, self._stack.fileno())
        ]
        self.process = context.Process(target=_serve, args=(task, theirs, *outputs))
        try:
            self.process.start()
        except BaseException:
            self._stack.close()
            raise
        finally:
            for end in (theirs, *outputs):
                end.close()

    def receive(self) -> None:
        """Takes the report, or makes one for a process that is gone without it."""
        try:
            if not self.connection.poll():
                raise EOFError
            self.report = self.connection.recv()
        except (EOFError, OSError):
            self.process.join(_GRACE_SECONDS)
            text = f"rank {self.rank} ended without a result: {_exit_words(self.process.exitcode)}"
            seconds = time.monotonic() - _SETTLE_SECONDS
            self.report = _Report(self.rank, seconds, pickle.dumps(RuntimeError(text)), text)

    def stack(self, deadline: float) -> str:
        """Returns what the process wrote down after SIGUSR1, waiting for it until the deadline."""
        before, text = b"", b""
        while time.monotonic() < deadline and not (text and text == before):
            time.sleep(0.02)
            before, text = text, os.pread(self._stack.fileno(), 2**20, 0)  # moves no shared offset
        return text.decode(errors="replace") or "(no stack: it had not begun, or it cannot run)"

    def end(self) -> None:
        """Ends the process; one that has reported may leave by itself."""
        if self.report is not None:
            self.process.join(_LEAVE_SECONDS + 1.0)
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.process.close()
        self._stack.close()


def _collect(ranks: Sequence[_Rank], deadline: float) -> None:
    """Waits for the reports until the deadline; after a failure only for the grace."""
    while pending := {r: (r.connection, r.process.sentinel) for r in ranks if r.report is None}:
        left = deadline - time.monotonic()
        ready = wait([end for ends in pending.values() for end in ends], left)
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


def _exit_words(code: int | None) -> str:
    return f"killed by {signal.Signals(-code).name}" if code and code < 0 else f"exit code {code}"


@functools.cache
def _fork_server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    # pytest only where the caller uses it: then its test modules import it on every rank.
    context.set_forkserver_preload([*_PRELOADED, *({"pytest"} & sys.modules.keys())])
    return context


@functools.cache
def _store_server() -> TCPStore:
    """Returns the one store of this process, on loopback only; worlds differ by prefix.

    A store's clients look up the names of both ends for torch's logs, and a DNS that loses a packet
    then stalls them for 5 s. So the server speaks IPv4, whose loopback has a name in /etc/hosts
    (the default socket sees ``::ffff:127.0.0.1``), and the ranks ask no DNS at all.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _environment(rank: int, num_ranks: int) -> dict[str, str]:
    settings = {"RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": 1}
    settings |= {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    own = {name: str(value) for name, value in settings.items()}
    return {"GLOO_SOCKET_IFNAME": "lo", **os.environ, **own}


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


def _serve(task: _Task, connection: Connection, *outputs: Connection) -> NoReturn:
    """Is the main function of a rank's process."""
    stdout, stderr, stacks = (output.fileno() for output in outputs)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller gets it too, and ends this process
    threading.Thread(target=_follow_caller, daemon=True).start()
    report = _report(task)
    with contextlib.suppress(OSError, EOFError):  # a caller that is gone
        connection.send(report)
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
        return _Report(task.rank, seconds, payload, summary, text)


def _call(task: _Task) -> object:
    os.environ.clear()
    os.environ.update(task.environment)
    torch.set_num_threads(1)
    _import_home(*task.module)
    function, args = pickle.loads(task.call)
    with contextlib.suppress(AttributeError):  # glibc only; the reason is with _store_server
        ctypes.CDLL(None).__nss_configure_lookup(b"hosts", b"files")
    port, prefix = task.store
    timeout = timedelta(seconds=task.timeout_seconds + _GRACE_SECONDS)
    store = PrefixStore(prefix, TCPStore("127.0.0.1", port, is_master=False, timeout=timeout))
    dist.init_process_group(
        "gloo", store=store, rank=task.rank, world_size=task.num_ranks, timeout=timeout
    )
    dist.barrier()  # a rank that fails at once would leave its peers half connected
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
