"""The process of a rank that `Ranks` starts: it takes a Task, then Calls, and sends Reports."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib.util
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # public

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
