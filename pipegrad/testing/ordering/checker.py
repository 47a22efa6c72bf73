"""OrderChecker: finds accesses to the same bytes that nothing orders. Vector clocks decide it.

with OrderChecker() as checker:        # comm streams made inside are streams, on CPU virtual ones
    ...                                # whole training steps
assert not checker.violations
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Self, TypeVar, cast
from unittest import mock

import torch
import torch.distributed as dist

from pipegrad.comm import sync_points, waits
from pipegrad.comm.sync_points import Work
from pipegrad.errors import OrderError
from pipegrad.testing.ordering.clocks import Access, Clock, HappensBefore, Kind, Violation
from pipegrad.testing.ordering.trace import (
    Memories,
    Operation,
    Trace,
    call_site,
    called_by_python,
    current_strand,
    following,
    spans,
)

T = TypeVar("T")


_COMPUTE = "compute"


@dataclass(frozen=True)
class VirtualStream:
    """A stream on CPU. Its operations run at once, but count as if they ran at any legal time."""

    name: str


@dataclass(frozen=True)
class VirtualEvent:
    """The clock of a virtual stream when the event was recorded."""

    clock: Clock


class _OfThread(threading.local):
    """The state of a thread."""

    name = ""  # of its strand
    stream = _COMPUTE
    is_watched = False
    in_comm_stream = False
    transfer: tuple[str, tuple[torch.Tensor, ...]] = ("", ())  # strand, and the sent tensors


@dataclass(frozen=True)
class Entry:
    """An operation, with the clock of its strand: it is after operation t of s if clock[s] >= t."""

    strand: str
    tick: int
    what: str
    where: str
    clock: Clock
    accesses: tuple[Access, ...]


class OrderChecker(sync_points.Backend):
    """Watches every operator, event, wait, collective and free, and finds unordered accesses.

    Two accesses to the same bytes must be ordered by waits, if one of them writes or frees. One run
    in any order finds the errors of all runs, because the checker looks at waits, not at the times
    of one run.

    On CPU each comm stream counts as a stream of a device, with its events and waits, although its
    operators run at once. Threads are ordered only by a hand-over. On CUDA streams are real.

    Make and end the objects to check inside of the ``with`` block, because comm streams keep the
    streams that they were made with. The checker sees operators of torch. It does not see code that
    bypasses torch's dispatcher (Triton kernels, replayed CUDA graphs). A collective ends when its
    Work is waited for. In a comm stream it is also assumed to end when the future of its Work is
    taken. Collectives that neither run in comm streams nor belong to pipegrad's pipeline are
    assumed to end when they are called. With `foreign` they end when they are waited for, too, if
    Python code has called them.

    Args:
        virtual_streams: True if CPU tensors live on virtual streams. With False the order on CPU is
            the real order of threads, on which a gloo job on CPU relies. It must be False if a
            program has CUDA tensors too.
        foreign: True to watch asynchronous collectives of any code. Their Work must be waited for
            by ``Work.wait``: a future, or a loop over ``is_completed``, is not seen.
        raises: Raise at the second access, instead of collecting.

    Attributes:
        violations: All violations, in the order in which they were found.
    """

    def __init__(
        self,
        *,
        virtual_streams: bool = True,
        foreign: bool = False,
        raises: bool = False,
    ) -> None:
        self._virtual = virtual_streams
        self._order = HappensBefore()
        self._threads: set[str] = set()
        self._names = itertools.count(1)
        # Operators of all threads take one lock, because clocks and accesses must change together.
        # It is reentrant, because a recording holds it around the check of an operator.
        self._lock = threading.RLock()
        self._local = _OfThread()
        self.violations: list[Violation] = []
        self._foreign = foreign
        self._raises = raises
        self._memories = Memories(self._freed)
        self._homes: dict[str, str] = {}  # memory -> the strand that allocated it
        # Finalizers only append here, because they must not lock: the strand that may use a freed
        # memory again, and the memory. The next holder of the lock moves it to `_reusable`.
        self._newly_freed: deque[tuple[str, str]] = deque()
        self._reusable: defaultdict[str, list[str]] = defaultdict(list)
        self._flights: dict[int, tuple[dist.Work, str | None, Clock]] = {}  # by their Work
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._exit.enter_context(sync_points.using(self))
        # Waits run in the calling thread, not in a helper, because they order the calling thread.
        self._exit.enter_context(mock.patch.object(waits.PerThread, "may_block", True))
        # They are replaced on the class, because torch itself and hooks call them too.
        for name in ("wait", "get_future"):
            recorded = self._noting(getattr(dist.Work, name), foreign=name == "wait")
            self._exit.enter_context(mock.patch.object(dist.Work, name, recorded))
        self._exit.enter_context(self._watching())
        if torch.cuda.is_available():
            self._exit.enter_context(following(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    # Methods that the library calls instead of a device's streams.

    def on(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Makes the virtual stream `name` current in this thread; ``compute`` is the default."""
        return self._setting("stream", name)

    def switch(self, name: str) -> None:
        """Makes the virtual stream `name` current in this thread from now on."""
        self._local.stream = name

    @property
    def on_now(self) -> str:
        """Name of this thread's current virtual stream."""
        return self._local.stream

    def stream(self, device: torch.device, name: str) -> torch.Stream | None:
        """Returns a virtual stream if the device has no streams."""
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
        # Only events of virtual streams carry a clock. The clock of a CUDA event comes from torch's
        # own trace: see `following`.
        name = self._virtual_name(device, stream)
        if name is None:
            return super().record(device, cast("torch.Stream | None", stream))
        return cast("torch.Event", VirtualEvent(self.recorded(name)))

    def wait(self, event: object, device: torch.device, stream: object = None) -> None:
        """Orders a stream after the event."""
        if isinstance(event, VirtualEvent):
            self.waited(self._virtual_name(device, stream) or self.on_now, event.clock)
        else:
            super().wait(
                cast("torch.Event | None", event), device, cast("torch.Stream | None", stream)
            )

    def hand_over(self) -> object:
        """Returns the clock of this thread."""
        return self.recorded(self._thread)

    def take_over(self, handed: object) -> None:
        """Orders this thread after the thread that handed over."""
        self.waited(None, cast("Clock", handed or {}))

    def send(self, group: dist.ProcessGroup, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        """Sends on a separate strand."""
        # The backend gets a copy, because it keeps its tensor alive, which would hide a free of
        # `tensor` during the send.
        copy = tensor.clone()
        with self._setting("transfer", (f"transfer {next(self._names)}", (tensor,))):
            return super().send(group, copy, peer, tag)

    def receive(self, group: dist.ProcessGroup, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        """Receives on a separate strand."""
        with self._setting("transfer", (f"transfer {next(self._names)}", ())):
            return super().receive(group, tensor, peer, tag)

    @contextlib.contextmanager
    def _setting(self, name: str, value: object) -> Iterator[None]:
        """Sets an attribute of this thread for a while."""
        before = getattr(self._local, name)
        setattr(self._local, name, value)
        try:
            yield
        finally:
            setattr(self._local, name, before)

    def _noting(self, method: Callable[..., T], *, foreign: bool) -> Callable[..., T]:
        """Returns a method of `dist.Work` that records: the calling strand is after the collective.

        Args:
            method: The method.
            foreign: True if it also ends collectives outside of comm streams.
        """

        def recorded(work: dist.Work, *args: object, **kwargs: object) -> T:
            result = method(work, *args, **kwargs)
            with self._locked():
                # A Work of a comm stream ends on that stream, others on the strand that waits. An
                # unknown Work orders nothing.
                _, home, clock = self._flights.get(id(work), (work, None, {}))
                if home is not None or foreign:
                    self._flights.pop(id(work), None)
                    strand = self.on_now if self._virtual else self._thread
                    self._order.join(home or strand, clock)
            return result

        return recorded

    @contextlib.contextmanager
    def running(self, stream: object) -> Iterator[None]:
        """Makes a comm stream's stream current, and watches its operators."""
        # Trace the comm stream's own thread, too, because a trace of torch's dispatcher sees only
        # the thread that entered it.
        current: contextlib.AbstractContextManager[object]
        if isinstance(stream, VirtualStream):
            current = self.on(stream.name)
        else:
            current = super().running(cast("torch.Stream | None", stream))
        with self._setting("in_comm_stream", True), self._watching(), current:
            yield

    # Events. `pipegrad.testing.ordering.trace` calls these for a CUDA device.

    def recorded(self, strand: str) -> Clock:
        """Returns the clock of an event recorded on a strand."""
        with self._locked():
            self._order.join(strand, self._order.clock(self._thread))
            return self._order.clock(strand)

    def waited(self, strand: str | None, clock: Clock) -> None:
        """Orders a strand after an event; None is the host."""
        with self._locked():
            self._order.join(strand or self._thread, clock)

    def everything(self) -> Clock:
        """Returns the clock of a device after it was synchronised."""
        with self._locked():
            return self._order.latest()

    # Operators.

    def after(self, operation: Operation) -> Entry:
        """Called after each operator of this thread; checks its accesses."""
        # The launch of an operator is ordered after all earlier work of its thread. A collective
        # runs on a strand of its own, which starts after the launch.
        with self._locked():
            home = self._home(operation)
            self._order.join(home, self._order.clock(self._thread))
            in_comm_stream = self._local.in_comm_stream
            transfer, sent = self._local.transfer
            # A collective of other code, whose Work that code waits for in Python.
            is_foreign = (
                self._foreign
                and not in_comm_stream
                and operation.work is not None
                and called_by_python()
            )
            strand = transfer or home
            if not transfer and operation.group is not None and (in_comm_stream or is_foreign):
                strand = self._strand_beside(operation, home)
            self._order.join(strand, self._order.clock(home))
            tick, where = self._order.tick(strand), call_site()
            accesses = [
                # In comm streams pipegrad must keep tensors alive that one stream hands to another.
                # Elsewhere torch itself does it.
                Access(
                    strand,
                    tick,
                    kind,
                    operation.name,
                    where,
                    memory,
                    covered,
                    held=in_comm_stream or transfer != "",
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
                # The Work is kept alive. On a device a collective goes on when its Work is freed.
                waiting = None if transfer or is_foreign else home
                self._flights[id(operation.work)] = operation.work, waiting, clock
            if operation.syncs_host:
                self._order.join(self._thread, clock)
            violations = self._reuse(strand, where)
            violations += [r for access in accesses for r in self._order.access(access)]
            self.violations += violations
            if violations and self._raises:
                raise OrderError("\n".join(map(str, violations)))
            return entry

    def _strand_beside(self, operation: Operation, home: str) -> str:
        """Returns the strand of a collective that runs in parallel with its comm stream.

        Collectives of a group run in order. Messages have no order, because the end of a message
        does not show that earlier messages have ended.
        """
        if operation.name.startswith(("c10d.send", "c10d.recv")):
            return f"message {next(self._names)} of {home}"
        return f"collectives of {home} in group {operation.group}"

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        """Traces this thread's operators, unless they are traced already."""
        if self._local.is_watched:
            yield
            return
        with self._setting("is_watched", True), Trace(self.after):
            yield

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Holds the lock, after it has moved newly freed memories to their strands."""
        with self._lock:
            while self._newly_freed:
                home, memory = self._newly_freed.popleft()
                self._reusable[home].append(memory)
            yield

    def _virtual_name(self, device: torch.device, stream: object) -> str | None:
        if device.type != "cpu" or not self._virtual:
            return None
        return stream.name if isinstance(stream, VirtualStream) else self.on_now

    @property
    def _thread(self) -> str:
        """Name of this thread's strand."""
        # Names of threads are not unique, and the system reuses their numbers. A number of our own
        # keeps the strands of two threads apart.
        if not self._local.name:
            self._local.name = f"{threading.current_thread().name} #{next(self._names)}"
            self._threads.add(self._local.name)
        return self._local.name

    def _freed(self, memory: str) -> None:
        """Records a freed memory. It must not lock or raise, because a finalizer calls it."""
        home = self._homes.pop(memory, None)
        if home is not None:
            self._newly_freed.append((self._thread if home in self._threads else home, memory))

    def _reuse(self, home: str, where: str) -> list[Violation]:
        """Frees memories at the next operation of a strand, which may get that memory."""
        # From the next operation of the strand that allocated it, any other strand that still uses
        # the memory is a violation, because the allocator gives it to that strand at once.
        tick, whole_memory = self._order.clock(home)[home], ((0, 2**63),)
        return [
            violation
            for memory in self._reusable.pop(home, ())
            for violation in self._order.access(
                Access(
                    home, tick, Kind.FREE, "reuse of what was freed", where, memory, whole_memory
                )
            )
        ]

    def _memory(self, tensor: torch.Tensor, home: str) -> str:
        memory = self._memories.name(tensor)
        self._homes.setdefault(memory, home)
        return memory

    def _home(self, operation: Operation) -> str:
        """Returns the strand on which an operator runs, or from which a collective is launched."""
        for tensor in (*operation.writes, *operation.reads):
            if tensor.device.type != "cpu":
                return current_strand(tensor.device)
        return self.on_now if self._virtual else self._thread


def watch_process() -> None:
    """Checks this thread and all comm streams from now on; raises at the first violation.

    ``PIPEGRAD_CHECK_ORDER=1`` calls it when pipegrad is imported.
    """
    OrderChecker(virtual_streams=False, raises=True).__enter__()
