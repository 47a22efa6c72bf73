"""Stamps: points in time on a rank, taken inside of a step and read after it.

On a CPU a stamp is the host's clock. On a device the host runs ahead, so a stamp is an event on the
current stream. Nothing in a step waits for an event: their times are read when the device is idle.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from pipegrad.comm import sync_points


class Stamps(Protocol):
    """Takes points in time, and reads them later."""

    def now(self) -> Any:  # noqa: ANN401 - a number, or an event
        """Returns a point in time, on the current stream if there are streams."""

    def settle(self) -> None:
        """Waits until all points in time have passed; call it outside of steps."""

    def seconds(self, stamps: Sequence[Any]) -> list[float]:
        """Returns the host's `time.perf_counter` at these points; call `settle` before."""

    def recycle(self, stamps: Iterable[Any]) -> None:
        """Takes back stamps that nobody will read."""


class HostStamps:
    """Stamps where the host computes."""

    def __init__(self) -> None:
        self.now = time.perf_counter

    def settle(self) -> None:
        """Does nothing: the host has passed them all."""

    def seconds(self, stamps: Sequence[float]) -> list[float]:
        return list(stamps)

    def recycle(self, stamps: Iterable[float]) -> None:
        """Does nothing: numbers are free."""


class DeviceStamps:
    """Stamps where a device computes: events on the current stream.

    Args:
        make_event: Returns a new event that measures time.
        record: Records an event on the current stream.
        synchronize: Waits for the device.
    """

    def __init__(
        self,
        make_event: Callable[[], Any],
        record: Callable[[Any], object],
        synchronize: Callable[[], object],
    ) -> None:
        self._make_event = make_event
        self._record = record
        self._synchronize = synchronize
        self._free: list[Any] = []
        self._last: tuple[Any, float] | None = None  # an event, and the host's clock at it

    @classmethod
    def on(cls, device: torch.device) -> DeviceStamps:
        """Returns those of a device."""
        return cls(
            partial(sync_points.timing_event, device),
            partial(sync_points.record_time, device=device),
            partial(sync_points.finish_device, device),
        )

    def now(self) -> Any:  # noqa: ANN401 - an event
        try:
            event = self._free.pop()
        except IndexError:  # comm streams take from it, too
            event = self._make_event()
        self._record(event)
        return event

    def settle(self) -> None:
        # The device is idle twice: before the event, so it is reached at once, and after it, so the
        # host's clock is right to some microseconds.
        self._synchronize()
        event = self.now()
        self._synchronize()
        self._last = event, time.perf_counter()

    def seconds(self, stamps: Sequence[Any]) -> list[float]:
        assert self._last is not None
        last, at = self._last
        # An elapsed time is a float32 of milliseconds. So a stamp is read relative to one of its
        # own step, and only that one relative to the end.
        first = stamps[0] if stamps else last
        base = at - first.elapsed_time(last) / 1e3
        return [base + first.elapsed_time(stamp) / 1e3 for stamp in stamps]

    def recycle(self, stamps: Iterable[Any]) -> None:
        self._free += stamps


def stamps_of(device: torch.device) -> Stamps:
    """Returns what takes stamps where a rank computes."""
    return HostStamps() if device.type == "cpu" else DeviceStamps.on(device)
