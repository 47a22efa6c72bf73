"""Order: each wait, record and hold of the gradient layer is a site with a name and a reason.

Nothing else in the library touches streams, events or the ends of collectives. So order can be
checked, by putting `pipegrad.testing.OrderChecker` in the place of the device's own streams, and
doubted: a site can be switched off by name, and then a test must fail (``pytest -m mutation``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from typing import TypeVar

import torch
import torch.distributed as dist

from pipegrad.comm.work import Work

T = TypeVar("T")


class Backend:
    """Streams and events as torch has them. On CPU there are none: order is that of threads."""

    def stream(self, device: torch.device, name: str) -> torch.Stream | None:
        """Returns a new side stream, or None where there are no streams."""
        return None if device.type == "cpu" else torch.Stream(device)

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
        on = stream or self.current(device)
        if event is not None and on is not None:
            on.wait_event(event)

    def send(self, group: dist.ProcessGroup, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        """Starts to send; `tensor` is read until the work is waited for."""
        return group.send([tensor], peer, tag)

    def receive(self, group: dist.ProcessGroup, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        """Starts to receive; `tensor` is written until the work is waited for."""
        return group.recv([tensor], peer, tag)

    def wait_work(self, work: Work) -> None:
        """Waits for what was started: the host, or the current stream, as its backend does."""
        work.wait()

    def trusting(self) -> contextlib.AbstractContextManager[object]:
        """Runs code whose collectives are waited for through its own future: torch's hooks."""
        return contextlib.nullcontext()

    def hand_over(self) -> object:
        """Returns what this thread knows to be done, for the thread that goes on from here."""
        return None

    def take_over(self, handed: object) -> None:
        """Goes on from what another thread handed over."""

    def running(self, stream: torch.Stream | None) -> contextlib.AbstractContextManager[object]:
        """Makes `stream` current in this thread."""
        return stream or contextlib.nullcontext()


in_use = Backend()  # to be looked up each time, as order.in_use: `using` changes it
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
    """A place in the code that orders one thing behind another.

    Args:
        name: Unique; ``file.what``.
        reason: What goes wrong without it.
    """

    def __init__(self, name: str, reason: str) -> None:
        assert name not in sites
        self.name = name
        self.reason = reason
        self.enabled = True
        sites[name] = self

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Switches the site off. For tests: what it orders is then unordered."""
        self.enabled = False
        try:
            yield
        finally:
            self.enabled = True


class Record(Site):
    """Records an event on the current stream, or on another one."""

    def __call__(
        self, device: torch.device, stream: torch.Stream | None = None
    ) -> torch.Event | None:
        return in_use.record(device, stream) if self.enabled else None


class Wait(Site):
    """Makes the current stream, or another one, wait for an event."""

    def __call__(
        self,
        event: torch.Event | None,
        device: torch.device,
        stream: torch.Stream | None = None,
    ) -> None:
        if self.enabled:
            in_use.wait(event, device, stream)


class WaitWork(Site):
    """Waits for a collective: the host where its backend blocks it, else the current stream."""

    def __call__(self, work: Work) -> None:
        if self.enabled:
            in_use.wait_work(work)


class WaitHost(Site):
    """Blocks the calling thread until another thread is done; returns whether it is."""

    def __call__(self, future: Future[T], timeout_seconds: float) -> bool | None:
        """Returns None where nobody waited: then nothing is known, whatever has happened."""
        if not self.enabled:
            return None
        return bool(wait_for_futures([future], timeout_seconds).done)


class Hold(Site):
    """Keeps what it is given alive, by returning it to who keeps it."""

    def __call__(self, held: T) -> T | None:
        return held if self.enabled else None
