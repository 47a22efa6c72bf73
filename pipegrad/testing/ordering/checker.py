"""OrderChecker: is every access to a gradient's bytes ordered? Decided by clocks, not by luck.

with OrderChecker() as checker:        # comm streams made inside are streams, on CPU virtual ones
    ...                                # whole training steps
assert not checker.violations
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self, cast
from unittest import mock

import torch
import torch.distributed as dist

from pipegrad.comm import sync_points
from pipegrad.comm.work import Work
from pipegrad.errors import OrderError
from pipegrad.testing.ordering import cuda_trace
from pipegrad.testing.ordering.clocks import Access, Clock, HappensBefore, Kind, Violation
from pipegrad.testing.ordering.trace import Memories, Operation, Trace, call_site, spans

COMPUTE = "compute"


@dataclass(frozen=True)
class VirtualStream:
    """A stream on CPU: its operations run at once, and count as if they ran at any legal time."""

    name: str


@dataclass(frozen=True)
class VirtualEvent:
    """What a virtual stream knew when the event was recorded."""

    clock: Clock


@dataclass(frozen=True)
class Entry:
    """One operation, with what its strand knew: it is behind operation t of s if clock[s] >= t."""

    strand: str
    tick: int
    what: str
    where: str
    clock: Clock
    accesses: tuple[Access, ...]

    def behind(self, other: Entry) -> bool:
        """Whether it is ordered behind `other`."""
        return self.clock.get(other.strand, 0) >= other.tick


class OrderChecker(sync_points.Backend):
    """Watches every operator, event, wait, collective and free, and finds accesses left to luck.

    Two accesses to the same bytes, one of which writes (or frees), must be ordered by waits. That
    is decided from what was waited for, not from when things happened to run: one run in any order
    finds what could go wrong in all of them.

    On CPU each comm stream is taken for a device's stream, with its events and waits, although
    operators run at once; threads order nothing but what they hand over. On CUDA streams are the
    real ones.

    Make what is to be checked inside, and end it there: comm streams keep the streams they were
    made with. It sees operators of torch, not code that bypasses its dispatcher (Triton kernels,
    replayed CUDA graphs). Transfers and collectives that are neither in comm streams nor started by
    pipegrad's pipeline are taken to end where they are called, and those of communication hooks;
    the others where somebody waits for the Work of each.

    Args:
        virtual_streams: Whether CPU tensors live on virtual streams. If False the order on CPU is
            the real one there, of threads: what a gloo job on CPU relies on. So it must be where
            a program has CUDA tensors too.
        raises: Raise at the second access, instead of collecting.
        log: Keep every operation, in ``log``.

    Attributes:
        violations: What was found, in the order in which it was found.
        log: All operations, if asked for.
    """

    def __init__(
        self, *, virtual_streams: bool = True, raises: bool = False, log: bool = False
    ) -> None:
        self.violations: list[Violation] = []
        self.log: list[Entry] = []
        self._virtual = virtual_streams
        self._raises = raises
        self._logs = log
        self._order = HappensBefore()
        self._memories = Memories(self._freed)
        self._homes: dict[str, str] = {}  # memory -> the strand that allocated it
        self._gone: deque[tuple[str, str]] = deque()  # strand that may use a freed memory again
        self._free: defaultdict[str, list[str]] = defaultdict(list)
        self._threads: set[str] = set()
        self._flights: dict[int, tuple[dist.Work, str | None, Clock]] = {}  # by their Work
        self._names = itertools.count(1)
        self._lock = threading.RLock()
        self._local = threading.local()
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._exit.enter_context(sync_points.using(self))
        waits = mock.patch.object(dist.Work, "wait", self._noticed(dist.Work.wait))
        self._exit.enter_context(waits)
        self._exit.enter_context(self._watching())
        if torch.cuda.is_available():
            self._exit.enter_context(cuda_trace.following(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    @contextlib.contextmanager
    def on(self, name: str) -> Iterator[None]:
        """Makes the virtual stream `name` current in this thread; ``compute`` is the default."""
        before = self.on_now
        self.switch(name)
        try:
            yield
        finally:
            self.switch(before)

    def switch(self, name: str) -> None:
        """Makes the virtual stream `name` current in this thread from now on."""
        self._local.stream = name

    @property
    def on_now(self) -> str:
        """Name of this thread's current virtual stream."""
        return str(getattr(self._local, "stream", COMPUTE))

    # What the library calls in the place of a device's streams.

    def stream(self, device: torch.device, name: str) -> torch.Stream | None:
        """Returns a virtual stream where the device has none."""
        if device.type == "cpu" and self._virtual:
            return cast("torch.Stream", VirtualStream(f"{name} #{next(self._names)}"))
        return super().stream(device, name)

    def current(self, device: torch.device) -> torch.Stream | None:
        """Returns the current stream, which may be a virtual one."""
        if device.type == "cpu" and self._virtual:
            return cast("torch.Stream", VirtualStream(self.on_now))
        return super().current(device)

    def record(self, device: torch.device, stream: object = None) -> torch.Event | None:
        """Returns an event that carries the clock of a stream."""
        name = self._virtual_name(device, stream)
        if name is None:
            return super().record(device, cast("torch.Stream | None", stream))
        with self._locked():
            return cast("torch.Event", VirtualEvent(self._order.clock(name)))

    def wait(self, event: object, device: torch.device, stream: object = None) -> None:
        """Orders a stream behind the event."""
        if isinstance(event, VirtualEvent):
            with self._locked():
                self._order.join(self._virtual_name(device, stream) or self.on_now, event.clock)
        else:
            super().wait(
                cast("torch.Event | None", event), device, cast("torch.Stream | None", stream)
            )

    def send(self, group: dist.ProcessGroup, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        """Sends on a strand of its own; a copy, so that it is seen when `tensor` is freed."""
        copy = tensor.clone()
        with self._transferring(tensor):
            return super().send(group, copy, peer, tag)

    def receive(self, group: dist.ProcessGroup, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        """Receives on a strand of its own."""
        with self._transferring():
            return super().receive(group, tensor, peer, tag)

    @contextlib.contextmanager
    def _transferring(self, *reads: torch.Tensor) -> Iterator[None]:
        """Takes the collective that is called inside for a transfer, which reads these tensors."""
        self._local.transfer = f"transfer {next(self._names)}", reads
        try:
            yield
        finally:
            self._local.transfer = None

    def _noticed(self, wait: Callable[..., bool]) -> Callable[..., bool]:
        """Returns `dist.Work.wait`, whoever calls it, with what comes behind it ordered so."""

        def noticed(work: dist.Work, *args: object, **kwargs: object) -> bool:
            done = wait(work, *args, **kwargs)
            with self._locked():
                _, home, clock = self._flights.pop(id(work), (work, None, {}))
                here = self.on_now if self._virtual else self._thread
                self._order.join(home or here, clock)
            return done

        return noticed

    @contextlib.contextmanager
    def trusting(self) -> Iterator[None]:
        """Takes the collectives that are started inside to end where they are called."""
        before, self._local.in_comm_stream = getattr(self._local, "in_comm_stream", False), False
        try:
            yield
        finally:
            self._local.in_comm_stream = before

    def hand_over(self) -> object:
        """Returns the clock of this thread."""
        with self._locked():
            return self._order.clock(self._thread)

    def take_over(self, handed: object) -> None:
        """Orders this thread behind the one that handed over."""
        with self._locked():
            self._order.join(self._thread, cast("Clock", handed or {}))

    @contextlib.contextmanager
    def running(self, stream: object) -> Iterator[None]:
        """Makes a comm stream's stream current, and watches its operators."""
        before, self._local.in_comm_stream = getattr(self._local, "in_comm_stream", False), True
        current: contextlib.AbstractContextManager[object]
        if isinstance(stream, VirtualStream):
            current = self.on(stream.name)
        else:
            current = super().running(cast("torch.Stream | None", stream))
        try:
            with self._watching(), current:
                yield
        finally:
            self._local.in_comm_stream = before

    # What a device's own events tell. See `pipegrad.testing.ordering.cuda_trace`.

    def recorded(self, strand: str) -> Clock:
        """Returns the clock of an event recorded on a strand."""
        with self._locked():
            self._order.join(strand, self._order.clock(self._thread))
            return self._order.clock(strand)

    def waited(self, strand: str | None, clock: Clock) -> None:
        """Orders a strand, or the host where it is None, behind an event."""
        with self._locked():
            self._order.join(strand or self._thread, clock)

    def everything(self) -> Clock:
        """Returns the clock of a device that has come to rest."""
        with self._locked():
            return self._order.latest()

    # What happens.

    def before(self, tensors: Sequence[torch.Tensor]) -> None:
        """Called ahead of each operator, with its tensors."""

    def after(self, operation: Operation) -> Entry:
        """Takes an operator that this thread has called."""
        with self._locked():
            home = self._home(operation)
            self._order.join(home, self._order.clock(self._thread))
            in_comm_stream = getattr(self._local, "in_comm_stream", False)
            transfer, sent = getattr(self._local, "transfer", None) or (None, ())
            strand = transfer or (self._in_comm_stream(operation, home) if in_comm_stream else home)
            self._order.join(strand, self._order.clock(home))
            tick, where = self._order.tick(strand), call_site()
            accesses = [
                # Outside of comm streams torch itself holds what one stream hands to another.
                Access(
                    strand,
                    tick,
                    kind,
                    operation.name,
                    where,
                    memory,
                    covered,
                    held=in_comm_stream or transfer is not None,
                )
                for kind, tensors in (
                    (Kind.READ, (*operation.reads, *sent)),
                    (Kind.WRITE, operation.writes),
                )
                for memory, covered in ((self._memory(t, home), spans(t)) for t in tensors)
                if covered
            ]
            clock = self._order.clock(strand)
            entry = Entry(strand, tick, operation.name, where, clock, tuple(accesses))
            if operation.work is not None and strand != home:
                # Kept alive, as on a device, where nothing ends it but its own end.
                waiting = None if transfer else home
                self._flights[id(operation.work)] = operation.work, waiting, clock
            if operation.syncs_host:
                self._order.join(self._thread, clock)
            if self._logs:
                self.log.append(entry)
            found = self._reuse(strand, where)
            self._report(found + [r for access in accesses for r in self._order.access(access)])
            return entry

    def _in_comm_stream(self, operation: Operation, home: str) -> str:
        """Returns where an operator of a comm stream runs: its collectives beside it, in order.

        Messages have no order: the end of one says nothing of those before it.
        """
        if operation.group is None:
            return home
        if operation.name.startswith(("c10d.send", "c10d.recv")):
            return f"message {next(self._names)} of {home}"
        return f"collectives of {home} in group {operation.group}"

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        """Traces this thread's operators, once."""
        if getattr(self._local, "watched", False):
            yield
            return
        self._local.watched = True
        try:
            with Trace(self):
                yield
        finally:
            self._local.watched = False

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Holds the lock, once it is known what each strand may use again."""
        with self._lock:
            while self._gone:
                home, memory = self._gone.popleft()
                self._free[home].append(memory)
            yield

    def _freed(self, memory: str) -> None:
        """Notes a free. Called by a finalizer, where nothing may lock or raise."""
        home = self._homes.pop(memory, None)
        if home is not None:
            self._gone.append((self._thread if home in self._threads else home, memory))

    def _reuse(self, home: str, where: str) -> list[Violation]:
        """Takes the next operation of a strand for the one that gets what was freed on it."""
        tick, everything = self._order.clock(home)[home], ((0, 2**63),)
        return [
            violation
            for memory in self._free.pop(home, ())
            for violation in self._order.access(
                Access(home, tick, Kind.FREE, "reuse of what was freed", where, memory, everything)
            )
        ]

    def _virtual_name(self, device: torch.device, stream: object) -> str | None:
        if device.type != "cpu" or not self._virtual:
            return None
        return stream.name if isinstance(stream, VirtualStream) else self.on_now

    def _memory(self, tensor: torch.Tensor, home: str) -> str:
        memory = self._memories.name(tensor)
        self._homes.setdefault(memory, home)
        return memory

    def _report(self, found: Sequence[Violation]) -> None:
        self.violations += found
        if found and self._raises:
            raise OrderError("\n".join(map(str, found)))

    @property
    def _thread(self) -> str:
        """Name of this thread's strand."""
        if not hasattr(self._local, "thread"):
            self._local.thread = f"{threading.current_thread().name} #{next(self._names)}"
            self._threads.add(self._local.thread)
        return str(self._local.thread)

    def _home(self, operation: Operation) -> str:
        """Returns the strand on which an operator runs, its collective's launch included."""
        for tensor in (*operation.writes, *operation.reads):
            if tensor.device.type != "cpu":
                return cuda_trace.strand(tensor.device)
        return self.on_now if self._virtual else self._thread


def watch_process() -> None:
    """Checks this thread and all comm streams from now on; raises at the first violation.

    What ``PIPEGRAD_CHECK_ORDER=1`` does when pipegrad is imported.
    """
    OrderChecker(virtual_streams=False, raises=True).__enter__()
