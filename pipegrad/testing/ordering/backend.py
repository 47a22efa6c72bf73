"""CheckedBackend: streams, events and threads of a program, as an OrderChecker sees them."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch

from pipegrad.comm import sync_points
from pipegrad.testing.ordering.clocks import Clock, HappensBefore

COMPUTE = "compute"


@dataclass(frozen=True)
class VirtualStream:
    """A stream on CPU. Its operations run at once, but count as if they ran at any legal time."""

    name: str


@dataclass(frozen=True)
class VirtualEvent:
    """The clock of a virtual stream when the event was recorded."""

    clock: Clock


class CheckedBackend(sync_points.Backend):
    """Replaces a device's streams where it has none, and keeps the clocks of all strands.

    On CPU it makes virtual streams. Their operators run at once, but only events order them, as on
    a device. Threads are strands too: what a thread hands over orders the thread that takes it.

    Args:
        virtual_streams: True if CPU tensors live on virtual streams.
    """

    def __init__(self, *, virtual_streams: bool) -> None:
        self._virtual = virtual_streams
        self._order = HappensBefore()
        self._threads: set[str] = set()
        self._names = itertools.count(1)
        # Operators of all threads go through one lock, so clocks and accesses change together. It
        # is reentrant, because a recording holds it around the check of an operator.
        self._lock = threading.RLock()
        self._local = threading.local()

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
        # trace, in `cuda_trace`.
        name = self._virtual_name(device, stream)
        if name is None:
            return super().record(device, cast("torch.Stream | None", stream))
        with self._locked():
            return cast("torch.Event", VirtualEvent(self._order.clock(name)))

    def wait(self, event: object, device: torch.device, stream: object = None) -> None:
        """Orders a stream after the event."""
        if isinstance(event, VirtualEvent):
            with self._locked():
                self._order.join(self._virtual_name(device, stream) or self.on_now, event.clock)
        else:
            super().wait(
                cast("torch.Event | None", event), device, cast("torch.Stream | None", stream)
            )

    def has_happened(self, event: object) -> bool:
        """Returns True for a virtual event: operators of virtual streams run at once."""
        return isinstance(event, VirtualEvent) or super().has_happened(
            cast("torch.Event | None", event)
        )

    def hand_over(self) -> object:
        """Returns the clock of this thread."""
        with self._locked():
            return self._order.clock(self._thread)

    def take_over(self, handed: object) -> None:
        """Orders this thread after the thread that handed over."""
        with self._locked():
            self._order.join(self._thread, cast("Clock", handed or {}))

    def _virtual_name(self, device: torch.device, stream: object) -> str | None:
        if device.type != "cpu" or not self._virtual:
            return None
        return stream.name if isinstance(stream, VirtualStream) else self.on_now

    @property
    def _thread(self) -> str:
        """Name of this thread's strand."""
        # Names of threads are not unique, and the system reuses their numbers. A number of our own
        # keeps the strands of two threads apart.
        if not hasattr(self._local, "thread"):
            self._local.thread = f"{threading.current_thread().name} #{next(self._names)}"
            self._threads.add(self._local.thread)
        return str(self._local.thread)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Holds the lock of the clocks."""
        with self._lock:
            yield
