"""Runs a function on several ranks: new processes on this machine in one gloo process group.

`Ranks` is the caller's side, and `serve` the side of a rank. A `Task` goes to each rank, then
`Call`s, and a `Report` of each comes back.
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
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from typing import Any, NoReturn, Self, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # public

from pipegrad.comm.store import STORE_KEY, loopback_store, of_one_machine

ResultT = TypeVar("ResultT")

_PRELOADED = (
    "pipegrad.testing.ranks",
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
    variables = {name: str(value) for name, value in settings.items()}
    return {**launch, **os.environ, STORE_KEY: launch[STORE_KEY], **variables}


def _home(function: Callable[..., Any]) -> tuple[str, str | None]:
    name = (function.func if isinstance(function, functools.partial) else function).__module__
    return name, getattr(sys.modules.get(name), "__file__", None)


def _unpickled(report: Report) -> object:
    try:
        return pickle.loads(report.payload)
    except Exception as error:
        subject = report.summary or "the result"
        raise TypeError(f"rank {report.rank} sent what cannot be unpickled: {subject}") from error


# The fork server imports this module first. A module that it imports later may ask torch whether
# there is a card: CUDA itself would answer, and no rank that is forked then could use it.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

GRACE_SECONDS = 5.0  # for ranks to end by themselves after another one failed
LEAVE_SECONDS = 2.0  # for a rank that is done to leave its process groups


@dataclass(frozen=True)
class Task:
    """What a rank is, as plain data."""

    rank: int
    num_ranks: int
    store: tuple[int, str]  # port, and prefix of the keys of this process group
    timeout_seconds: float
    environment: dict[str, str]


@dataclass(frozen=True)
class Call:
    """What a rank runs, as plain data."""

    module: tuple[str, str | None]  # module of the function: name and file
    pickled: bytes  # (function, args)


@dataclass(frozen=True)
class Report:
    """The end of a call: a pickled result, or a pickled exception with summary and traceback."""

    rank: int
    seconds: float  # on the monotonic clock, which all processes share
    payload: bytes
    summary: str = ""  # empty for a result
    traceback: str = ""


def pickled(value: object, subject: str) -> bytes:
    """Returns a value as bytes.

    Raises:
        TypeError: If it cannot be pickled. The message begins with `subject`.
    """
    # multiprocessing's pickler is not used: torch makes it send tensors as shared memory.
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise TypeError(f"{subject} cannot be pickled: {error}") from error


def serve(task: Task, connection: Connection, *outputs: Connection) -> NoReturn:
    """Runs a rank, the main function of its process: calls come, and reports go."""
    stdout, stderr, stacks = (output.fileno() for output in outputs)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    # An interrupt of the terminal reaches the caller too. The caller then ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_follow_caller, daemon=True).start()
    report = None
    # A rank that is done waits until the caller closes the connection: its peers may still need
    # its side of the process group. A failed rank ends at once, so its peers do not wait for it.
    with contextlib.suppress(OSError, EOFError):  # the caller may be gone
        while report is None or not report.summary:
            call = connection.recv()
            report = _report(task, call, has_joined=report is not None)
            connection.send(report)
    if report is not None and not report.summary:
        _leave()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(0)  # threads may still wait in torch


def _follow_caller() -> None:
    caller = multiprocessing.parent_process()
    assert caller is not None
    caller.join()
    os._exit(1)


def _report(task: Task, call: Call, *, has_joined: bool) -> Report:
    try:
        if not has_joined:
            _join(task)
        _import_home(*call.module)
        function, args = pickle.loads(call.pickled)
        payload = pickled(function(*args), f"the result of rank {task.rank}")
        return Report(task.rank, time.monotonic(), payload)
    except BaseException as error:  # noqa: BLE001 - SystemExit too
        seconds, text = time.monotonic(), "".join(traceback.format_exception(error))
        summary = f"{type(error).__qualname__}: {error}"
        try:
            payload = pickled(error, f"what rank {task.rank} raised, {summary},")
        except TypeError as unpicklable:
            payload = pickle.dumps(unpicklable)
        return Report(task.rank, seconds, payload, summary, text)


def _join(task: Task) -> None:
    """Becomes a rank of the process group."""
    os.environ.clear()
    os.environ.update(task.environment)
    torch.set_num_threads(1)
    with contextlib.suppress(AttributeError):  # glibc only; the reason is in `loopback_store`
        ctypes.CDLL(None).__nss_configure_lookup(b"hosts", b"files")
    port, prefix = task.store
    timeout = timedelta(seconds=task.timeout_seconds + GRACE_SECONDS)
    store = PrefixStore(prefix, TCPStore("127.0.0.1", port, is_master=False, timeout=timeout))
    dist.init_process_group(
        "gloo", store=store, rank=task.rank, world_size=task.num_ranks, timeout=timeout
    )
    # Without a barrier, a rank that fails at once leaves peers that are only partly connected.
    dist.barrier()


def _import_home(name: str, path: str | None) -> None:
    """Imports the function's module, from its file if the name does not lead to it."""
    # pytest imports test modules under names that are not on `sys.path`.
    if name in sys.modules or path is None:
        return
    with contextlib.suppress(ModuleNotFoundError):
        known_spec = importlib.util.find_spec(name)
        if known_spec is not None and known_spec.origin == path:
            return
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])


def _leave() -> None:
    """Destroys the process groups. It waits a short time only: a thread may be in a collective."""
    if dist.is_initialized():
        leaving = threading.Thread(target=dist.destroy_process_group, daemon=True)
        leaving.start()
        leaving.join(LEAVE_SECONDS)
