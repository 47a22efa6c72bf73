"""Worlds: the ranks of one run as processes, and how each of them ends.

Nobody ends a rank because another one has failed: each rank must end by itself. That is more than
torchrun asks for. torchrun sends SIGTERM to all ranks as soon as one of them has failed.
"""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from uuid import uuid4

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public

from tests.faults.network import Network, enter
from tests.support.train.launched import Launched, torchrun

HIT, CUT = "hit", "cut"  # as in `inject`, which only ranks import
LAUNCHER = -1
ERRORS = "stderr"  # the file with the stderr of all ranks
STACKS = "{rank}.stack"  # where a rank that hangs is
MARK = "PIPEGRAD_TEST_WORLD"  # of the environment; what a rank starts has it too
_PRELOADED = (
    "torch",
    "torch.distributed",
    "torch.distributed.device_mesh",
    "torch.distributed.pipelining",
    "torch.export",
    "pipegrad",
    "pipegrad.cli",
    "pipegrad.train.loop",
    "pipegrad_handlers.pipeline_shared",
    "tests.faults.world",
)
_START_SECONDS = 90.0  # until the fault strikes, or a run without one ends
_STACK_SECONDS = 0.5
_COMMAND = ("train", "job.toml")


@dataclass(frozen=True)
class Ended:
    """How the ranks of a world ended."""

    # Exit codes: negative for a signal, None for a rank that did not end. Under torchrun only that
    # of torchrun itself, as `LAUNCHER`.
    codes: dict[int, int | None]
    seconds: float | None  # from the fault to the end of the last rank; None if some did not end
    has_struck: bool
    stderr: str  # of all ranks
    leftover: tuple[int, ...]  # processes


@dataclass(frozen=True)
class World:
    """The ranks of a run, before it begins."""

    folder: Path  # has the job; files of the ranks are written there
    num_ranks: int
    variables: Mapping[str, str]  # further environment of the ranks
    bound_seconds: float  # after the fault, all ranks must end in this time; then they are killed
    stopped: Sequence[int] = ()  # ranks that cannot end, because they stop themselves
    network: Network | None = None  # None for the loopback of this machine
    cut: int | None = None  # the rank whose link is cut when its fault strikes
    # Whether rank 0 keeps the store, as under Slurm; else this process does, as torchrun does. In a
    # network it is always rank 0.
    keeps_store: bool = False

    @property
    def errors(self) -> Path:
        """The file with the stderr of all ranks."""
        return self.folder / ERRORS

    def run(self) -> Ended:
        """Runs the job; returns how the ranks ended."""
        mark = uuid4().hex
        self.errors.touch()
        with self._store() as rendezvous:
            shared = {MARK: mark, **rendezvous, **self.variables}
            ranks = [_Rank(self, rank, shared) for rank in range(self.num_ranks)]
            try:
                struck, seconds = self._follow(ranks)
                codes = {rank.rank: rank.process.exitcode for rank in ranks}
                # Read now: ranks that are killed below make others fail.
                text = self.errors.read_text()
            finally:
                for rank in ranks:
                    rank.process.kill()
                    rank.process.join()
            leftover = _end(_processes(mark, {rank.process.pid for rank in ranks}))
        return Ended(codes, seconds, struck, text, leftover)

    @contextmanager
    def _store(self) -> Iterator[dict[str, str]]:
        """Yields the variables of a rendezvous."""
        if self.network is not None:
            yield {"GLOO_SOCKET_IFNAME": self.network.device, **self.network.rendezvous}
            return
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        variables = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
        variables["MASTER_PORT"] = str(store.port)
        if self.keeps_store:
            del store  # its port is free now
        else:
            variables["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        yield variables

    def _follow(self, ranks: Sequence[_Rank]) -> tuple[bool, float | None]:
        """Waits for the ranks; returns whether the fault struck, and how long they then took."""
        deadline, struck = time.time() + _START_SECONDS, None
        waiting = {r.process.sentinel: r.rank for r in ranks if r.rank not in self.stopped}
        while waiting and time.time() < deadline:
            for sentinel in wait(list(waiting), 0.02):
                del waiting[sentinel]  # type: ignore[arg-type]
            if struck is None and (struck := struck_at(self.folder)) is not None:
                deadline = struck + self.bound_seconds
                if self.network is not None and self.cut is not None:
                    self.network.cut(self.cut)
                    (self.folder / CUT).touch()
        seconds = None if waiting or struck is None else time.time() - struck
        if waiting:
            for rank in ranks:
                rank.write_stack()
            time.sleep(_STACK_SECONDS)
        return struck is not None, seconds


class _Rank:
    """The process of a rank. It comes from a server that has imported torch."""

    def __init__(self, world: World, rank: int, shared: Mapping[str, str]) -> None:
        network, num_ranks = world.network, world.num_ranks
        place = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0}
        if network is not None:
            place = {"RANK": rank, "LOCAL_RANK": 0, "GROUP_RANK": rank}
        place |= {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks if network is None else 1}
        environment = {**shared, **{name: str(value) for name, value in place.items()}}
        space = None if network is None else network.space_of(rank)
        self.rank = rank
        self.process: ForkServerProcess = _server().Process(
            target=_be_rank, args=(world.folder, rank, environment, space)
        )
        self.process.start()

    def write_stack(self) -> None:
        """Lets a rank that hangs write where it is."""
        if self.process.is_alive():
            os.kill(self.process.pid or 0, signal.SIGUSR2)


def _be_rank(folder: Path, rank: int, environment: Mapping[str, str], space: str | None) -> None:
    """Is one rank, as ``python -m pipegrad train`` would be."""
    import torch

    from pipegrad.cli import main

    os.setsid()
    os.chdir(folder)
    if space is not None:
        enter(space)
    os.environ.update(environment)
    # All ranks have one file, as they have one terminal: its lines are in the order of time.
    for number, name in ((1, f"{rank}.out"), (2, ERRORS)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), number)
    with suppress(AttributeError):  # no names of hosts are looked up in a network
        ctypes.CDLL(None).__nss_configure_lookup(b"hosts", b"files")
    stacks = os.open(STACKS.format(rank=rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
    torch.set_num_threads(1)
    # multiprocessing prints tracebacks itself; a Python of its own would do so, too.
    main(_COMMAND, prog_name="pipegrad")


def struck_at(folder: Path) -> float | None:
    """Returns when the fault of a run struck; None if it did not yet."""
    hit = folder / HIT
    return float(hit.read_text().split()[0]) if hit.exists() else None


def had_checkpoint(folder: Path) -> bool:
    """Returns whether a whole checkpoint was there when the fault struck."""
    hit = folder / HIT
    return hit.exists() and hit.read_text().endswith("1")


def _end(processes: Iterable[int]) -> tuple[int, ...]:
    """Kills processes; returns them."""
    numbers = tuple(processes)
    for number in numbers:
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    return numbers


def _processes(mark: str, sessions: set[int | None]) -> Iterator[int]:
    """Yields processes of a world: by their environment, or the session of a rank."""
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError, IndexError):
            number = int(entry.name)
            session = int((entry / "stat").read_text().rpartition(")")[2].split()[3])
            if session in sessions or mark.encode() in (entry / "environ").read_bytes():
                yield number


@cache
def _server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    return context


def run_torchrun(
    folder: Path, num_ranks: int, *, variables: Mapping[str, str], limit_seconds: float
) -> Ended:
    """Runs the job of a folder by torchrun, until the limit; returns how torchrun ended."""
    mark, deadline = uuid4().hex, time.time() + limit_seconds
    words = ["--standalone", "--nproc-per-node", str(num_ranks), "-m", "pipegrad", *_COMMAND]
    launched = Launched(folder, torchrun, *words, variables={MARK: mark, **variables})
    sessions = set[int | None]()
    while (code := launched.ended(0.02)) is None and time.time() < deadline:
        sessions |= set(launched.ranks())
    ended, struck = time.time(), struck_at(folder)
    leftover = _end(number for number in _processes(mark, sessions) if number != launched.pid)
    launched.kill()
    seconds = None if code is None or struck is None else ended - struck
    return Ended({LAUNCHER: code}, seconds, struck is not None, launched.errors, leftover)
