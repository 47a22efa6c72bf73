"""Runs a function on several ranks: new processes on this machine in one gloo process group.

`Ranks` is the caller's side, and `serve` the side of a rank. A pipe joins them: calls go to the
rank, and a `Report` of each call comes back.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import importlib.util
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import tempfile
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
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public

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
# The fork server imports this module first. A module that it imports later may check torch for a
# GPU. CUDA itself must not answer, because no rank that is forked then could use it.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

_GRACE_SECONDS = 5.0  # for ranks to end without a kill after another one failed
# Within this time, a dead rank and the errors that it causes on others may be seen in any order.
_SETTLE_SECONDS = 0.1
_END_SECONDS = 2.0  # for ranks to end when the caller closes
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


@dataclass(frozen=True)
class Report:
    """The end of a call: a pickled result, or a pickled exception with summary and traceback."""

    rank: int
    seconds: float  # on the monotonic clock, which all processes share
    payload: bytes
    summary: str = ""  # empty for a result
    traceback: str = ""


def run_ranks(
    function: Callable[..., ResultT], num_ranks: int, *args: object, timeout_seconds: float = 300.0
) -> list[ResultT]:
    """Returns the results of ``function(*args)`` on each rank, in rank order.

    Every rank is a new process with one thread. It has the caller's ``os.environ``, ``sys.path``
    and working directory. Its default process group is gloo over ``num_ranks`` ranks. Function,
    arguments and results are pickled, tensors by value. The function must be defined at the top
    level of a module. A rank that is done stays until all ranks are done, because its peers may
    still need it.

    The first call fixes settings that Python or torch read when they load, such as
    ``PYTHONHASHSEED``, because the processes come from multiprocessing's fork server, which imports
    torch once. Ranks look up host names only in files, never in the DNS.

    Args:
        function: Runs on every rank.
        num_ranks: Number of processes.
        *args: Arguments for the function, the same on every rank.
        timeout_seconds: Timeout for all ranks to finish. The timeout of the process group is a
            little longer, because one error must show where every rank is.

    Raises:
        TimeoutError: If ranks did not finish in time. Names them, and notes have their stacks.
        RuntimeError: If a rank ended without a result. Names rank and exit code.
        TypeError: If the function, an argument, a result or an exception does not pickle.
        BaseException: The exception of the first rank that failed. A note has rank and traceback.
            The other ranks get a few seconds to end and are then killed.
    """
    with Ranks(num_ranks, timeout_seconds=timeout_seconds) as ranks:
        return ranks.run(function, *args)


class Ranks(contextlib.AbstractContextManager["Ranks"]):
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
        self._store: TCPStore | None = loopback_store()  # outlives a rank that dies
        self._ranks: list[_Rank] = []
        launch = of_one_machine()
        environment = {**launch, **os.environ, STORE_KEY: launch[STORE_KEY], "OMP_NUM_THREADS": "1"}
        environment |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(num_ranks))
        try:
            for rank in range(num_ranks):
                environment |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
                self._ranks.append(_Rank(rank, environment, self._store.port, timeout_seconds))
        except BaseException:
            self.close()
            raise

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
            call = _home(function), _pickled((function, args), "the function or its arguments")
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
            rank.connection.close()
        for rank in self._ranks:
            rank.end()
        self._ranks, self._store = [], None


class _Rank:
    """One rank's process, seen from the caller."""

    def __init__(self, rank: int, *task: object) -> None:
        self.rank = rank
        self.report: Report | None = None
        context = _fork_server()
        self.connection, rank_end = context.Pipe()
        self._stack = tempfile.TemporaryFile()  # noqa: SIM115 - `end` closes it
        # The caller's current output streams are sent to the rank, because the fork server has the
        # streams of its first start.
        numbers = 1, 2, self._stack.fileno()
        outputs = [Connection(os.dup(number), readable=False) for number in numbers]
        self.process = context.Process(target=serve, args=(rank, *task, rank_end, *outputs))
        try:
            self.process.start()
        finally:
            for end in (rank_end, *outputs):
                end.close()

    def send(self, call: object) -> None:
        """Sends a call. A process that is gone is noticed in `receive`."""
        self.report = None
        with contextlib.suppress(OSError):
            self.connection.send(call)

    def stack(self) -> str:
        """Returns the stacks of a rank's threads at the moment when SIGABRT ended it."""
        self.process.join(_END_SECONDS)
        self._stack.seek(0)
        return self._stack.read().decode()

    def receive(self) -> Report:
        """Receives the report, or makes one for a process that ended without it."""
        try:
            if not self.connection.poll():
                raise EOFError
            self.report = self.connection.recv()
        except (EOFError, OSError):
            self.process.join(_GRACE_SECONDS)
            code = self.process.exitcode
            killed = f"killed by {signal.Signals(-code).name}" if code and code < 0 else ""
            text = f"rank {self.rank} ended without a result: {killed or f'exit code {code}'}"
            # Other ranks fail because this one is gone, and may report first. An earlier time makes
            # this report the first failure.
            seconds = time.monotonic() - _SETTLE_SECONDS
            self.report = Report(self.rank, seconds, pickle.dumps(RuntimeError(text)), text)
        return self.report

    def end(self) -> None:
        """Ends the process. A closed connection ends it if it can run; otherwise it is killed."""
        self.process.join(_END_SECONDS)
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
        for rank, ends in pending.items():
            if any(end in ready for end in ends) and rank.receive().summary:
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)


def _results(ranks: Sequence[_Rank], timeout_seconds: float) -> list[Any]:
    reports = [rank.report for rank in ranks if rank.report is not None]
    failures = sorted((r for r in reports if r.summary), key=lambda report: report.seconds)
    stuck = [rank for rank in ranks if rank.report is None]
    names = ", ".join(str(rank.rank) for rank in stuck)
    if not failures and not stuck:
        return [pickle.loads(report.payload) for report in reports]
    if not failures:
        raise _late_error(f"not finished after {timeout_seconds:g} s: rank {names}", stuck)
    first, *others = failures
    error = cast("BaseException", pickle.loads(first.payload))
    error.add_note(f"First failure on rank {first.rank}. {first.traceback}".rstrip())
    for other in others:
        error.add_note(f"Then on rank {other.rank}: {other.summary}")
    if stuck:
        error.add_note(f"Killed, having neither finished nor failed: rank {names}")
    raise error


def _late_error(text: str, stuck: Sequence[_Rank]) -> TimeoutError:
    error = TimeoutError(text)
    # Send all signals at once, because a rank whose peer is gone continues, with an error.
    for rank in stuck:
        assert rank.process.pid is not None  # it was started
        os.kill(rank.process.pid, signal.SIGABRT)
    for rank in stuck:
        error.add_note(f"Rank {rank.rank}, innermost call first:\n{rank.stack()}")
    return error


def share_one_card(rank: int) -> None:
    """Lets ranks on NCCL share GPU 0. Call it in each, before the process group is made.

    NCCL refuses two ranks on one device, unless they seem to be on two hosts. Then they use
    sockets: results are right, and times mean nothing.

    Args:
        rank: Rank of this process.
    """
    os.environ.update(_ONE_CARD, NCCL_HOSTID=f"pipegrad-rank-{rank}")


@functools.cache
def _fork_server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    # pytest is preloaded only if the caller uses it. Then its test modules import it on every rank.
    context.set_forkserver_preload([*_PRELOADED, *({"pytest"} & sys.modules.keys())])
    return context


def _home(function: Callable[..., Any]) -> tuple[str, str | None]:
    """Returns name and file of a function's module."""
    name = (function.func if isinstance(function, functools.partial) else function).__module__
    return name, getattr(sys.modules.get(name), "__file__", None)


def _pickled(value: object, subject: str) -> bytes:
    # Not by multiprocessing's pickler, because torch makes it send tensors as shared memory.
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise TypeError(f"{subject} cannot be pickled: {error}") from error


def serve(
    rank: int,
    environment: dict[str, str],
    port: int,
    timeout_seconds: float,
    connection: Connection,
    *outputs: Connection,
) -> NoReturn:
    """Runs a rank, the main function of its process: it receives calls and sends reports."""
    *streams, stack = outputs
    for number, output in enumerate(streams, 1):
        os.dup2(output.fileno(), number)
    # An interrupt of the terminal reaches the caller too. The caller then ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # SIGABRT shows where all threads are, also those that wait in torch; see `_late_error`.
    faulthandler.enable(stack.fileno())
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The fork server ends with the caller. A rank that is stuck ends with the fork server, by the
    # kernel, on Linux only.
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.clear()
    os.environ.update(environment)
    report = None
    # A failed rank ends at once, because its peers must not wait for it. A rank that is done waits
    # until the caller closes or dies, because its peers may still need it in the process group.
    with contextlib.suppress(OSError, EOFError):
        while report is None or not report.summary:
            report = _report((rank, port, timeout_seconds), *connection.recv())
            connection.send(report)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(0)  # threads may still wait in torch


def _report(place: tuple[int, int, float], home: tuple[str, str | None], call: bytes) -> Report:
    rank = place[0]
    try:
        _join(*place)
        _import_home(*home)
        function, args = pickle.loads(call)
        payload = _pickled(function(*args), f"the result of rank {rank}")
        return Report(rank, time.monotonic(), payload)
    except BaseException as error:  # noqa: BLE001 - SystemExit too
        seconds, text = time.monotonic(), "".join(traceback.format_exception(error))
        summary = f"{type(error).__qualname__}: {error}"
        subject = f"what rank {rank} raised, {summary},"
        try:
            payload = pickle.dumps(error)
            pickle.loads(payload)
        except Exception as unpicklable:  # noqa: BLE001 - of any class
            payload = pickle.dumps(
                TypeError(f"{subject} cannot be pickled and unpickled: {unpicklable}")
            )
        return Report(rank, seconds, payload, summary, text)


@functools.cache
def _join(rank: int, port: int, timeout_seconds: float) -> None:
    """Becomes a rank of the process group, once."""
    torch.set_num_threads(1)
    with contextlib.suppress(AttributeError):  # glibc only; the reason is in `loopback_store`
        ctypes.CDLL(None).__nss_configure_lookup(b"hosts", b"files")
    timeout = timedelta(seconds=timeout_seconds + _GRACE_SECONDS)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    num_ranks = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timeout)
    # Without a barrier, a rank that fails at once leaves peers that are only partly connected.
    dist.barrier()


def _import_home(name: str, path: str | None) -> None:
    """Imports the function's module, from its file if the name does not lead to it."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        # pytest imports test modules under names that are not on `sys.path`.
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
