"""Sync points: each wait, record and hold of a stream has a name and a reason. And `Work`.

Order can be checked, because nothing else in the library touches streams, events or the ends of
collectives: `pipegrad.testing.OrderChecker` replaces the device's streams. The tests can be checked
too, because a sync point can be switched off by name, and then a test must fail
(``pytest tests/mutation``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from pipegrad.comm.waits import ended


class Work(Protocol):
    """A running collective, such as `torch.distributed.Work`."""

    def wait(self) -> object:
        """Waits for the result: blocks the thread (CPU), or makes the current stream wait."""


class HostWork:
    """Work that blocks the host until it has ended; see [Note: waits] in `waits`.

    Attributes:
        work: The work object of torch.
        has_arrived: True if it is a send whose message has arrived. Its wait is short then.
    """

    work: dist.Work  # no __init__: a call less for each transfer
    has_arrived = False

    def wait(self) -> None:
        """Waits for the result."""
        ended(self.work.wait)

    def is_completed(self) -> bool:
        """True if it has ended; for a transfer of gloo, True only after a wait for it."""
        return self.work.is_completed()


Started = HostWork | dist.Work


def on_host(work: dist.Work | None, tensor: torch.Tensor) -> Started:
    """Returns work whose wait Python can end, if it blocks the host; work of a device does not."""
    assert work is not None  # torch returns None only on ranks that are not in the group
    if not tensor.is_cpu:
        return work
    host = HostWork()
    host.work = work
    return host


class Done:
    """Work that has ended."""

    def wait(self) -> None:
        """Returns at once."""


@dataclass(frozen=True)
class LateWork:
    """Work whose wait is at the end of the step, not right after its launch.

    Return it if the next collectives of the comm stream do not need the result. They are launched
    before the wait.

    Attributes:
        wait: Waits for the result. It may block the host, and compute.
        in_threads: Whether to wait late on a comm stream with a thread, too. False if the only
            reason to wait late is that `wait` blocks the host: a thread may block.
    """

    wait: Callable[[], object]
    in_threads: bool = True


T = TypeVar("T")


class Backend:
    """The streams and events of torch. On CPU there are none; threads alone decide the order."""

    def stream(self, device: torch.device, name: str) -> torch.Stream | None:
        """Returns a new side stream, or None where there are no streams."""
        # With priority, because a collective must not wait for the kernels of a whole backward.
        return None if device.type == "cpu" else torch.Stream(device, priority=-1)

    def current(self, device: torch.device) -> torch.Stream | None:
        """Returns the current stream, or None where there are no streams."""
        return None if device.type == "cpu" else torch.accelerator.current_stream(device)

    def record(
        self, device: torch.device, stream: torch.Stream | None = None
    ) -> torch.Event | None:
        """Returns an event recorded on a stream, the current one if None; None without streams."""
        on = stream or self.current(device)
        return None if on is None else on.record_event()

    def wait(
        self,
        event: torch.Event | None,
        device: torch.device,
        stream: torch.Stream | None = None,
    ) -> None:
        """Makes a stream, the current one if None, wait for `event`."""
        if event is not None and (on := stream or self.current(device)) is not None:
            on.wait_event(event)

    def send(self, group: dist.ProcessGroup, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        """Starts to send. Do not write into `tensor` before you have waited for the work."""
        host = HostWork()
        host.work = group.send([tensor], peer, tag)
        return host if tensor.is_cpu else host.work

    def receive(self, group: dist.ProcessGroup, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        """Starts to receive. Do not touch `tensor` before you have waited for the work."""
        host = HostWork()
        host.work = group.recv([tensor], peer, tag)
        return host if tensor.is_cpu else host.work

    def wait_work(self, work: Work) -> None:
        """Waits for `work`: blocks the host, or makes the current stream wait."""
        if type(work) is not HostWork:
            work.wait()
        elif work.has_arrived:
            work.work.wait()
        else:
            ended(work.work.wait)

    # The next two are for a checker, because a queue or a future orders two threads, and the
    # checker must record that order. torch itself needs nothing there.
    def hand_over(self) -> object:
        """Returns the order of events that this thread has seen, for the thread that continues."""
        return None

    def take_over(self, order: object) -> None:
        """Adds the result of `hand_over` to the order that this thread has seen."""

    def running(self, stream: torch.Stream | None) -> contextlib.AbstractContextManager[object]:
        """Makes `stream` current in this thread."""
        return stream or contextlib.nullcontext()


# Functions that measure time. They are no sync points, because they order nothing.


def timing_event(device: torch.device) -> torch.Event:
    """Returns an event that measures time."""
    return torch.Event(device, enable_timing=True)


def record_time(event: torch.Event, device: torch.device) -> None:
    """Records a timing event on the current stream."""
    event.record(torch.accelerator.current_stream(device))


def finish_device(device: torch.device) -> None:
    """Blocks the host until the device has nothing to do."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


in_use = Backend()  # look it up at each use, sync_points.in_use, because `using` changes it
sites: dict[str, Site] = {}


@contextlib.contextmanager
def using(other: Backend) -> Iterator[None]:
    """Takes streams and events from `other`, in all threads."""
    global in_use  # noqa: PLW0603 - comm streams run in threads of their own and must see it too
    before, in_use = in_use, other
    try:
        yield
    finally:
        in_use = before


class Site:
    """A sync point: a line of code that orders one access after another."""

    def __init__(self, name: str, reason: str) -> None:
        assert name not in sites
        self.name = name
        self.reason = reason
        self.enabled = True
        sites[name] = self

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Switches the sync point off, for tests. Nothing orders the two accesses then."""
        self.enabled = False
        try:
            yield
        finally:
            self.enabled = True


class Record(Site):
    """Records an event on the current stream, or on another stream."""

    def __call__(
        self, device: torch.device, stream: torch.Stream | None = None
    ) -> torch.Event | None:
        return in_use.record(device, stream) if self.enabled else None


class Wait(Site):
    """Makes the current stream, or another stream, wait for an event."""

    def __call__(
        self,
        event: torch.Event | None,
        device: torch.device,
        stream: torch.Stream | None = None,
    ) -> None:
        if self.enabled:
            in_use.wait(event, device, stream)


class WaitWork(Site):
    """Waits for a collective: blocks the host, or makes the current stream wait."""

    def __call__(self, work: Work) -> None:
        if self.enabled:
            in_use.wait_work(work)


class WaitHost(Site):
    """Blocks the calling thread until another thread is done; returns whether it is."""

    def __call__(self, future: Future[T], timeout_seconds: float) -> bool | None:
        """Returns True if the future is done; None if the sync point is switched off."""
        # The caller may not use the state of the future, because it proves no order without a wait.
        if not self.enabled:
            return None
        with contextlib.suppress(TimeoutError):
            future.exception(timeout_seconds)
        return future.done()


class Hold(Site):
    """Keeps an object alive: returns it, because the caller then keeps a reference."""

    def __call__(self, held: T) -> T | None:
        return held if self.enabled else None
