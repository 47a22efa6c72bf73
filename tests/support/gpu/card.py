"""What the tests on a card share: when they run, its streams by name, sleeps of known length."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pytest
import torch

GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SLEEP_MS = 30.0  # one unit: far more than the host needs to enqueue a whole program


@cache
def cycles_per_ms() -> float:
    """Returns how fast `torch.cuda._sleep` counts, once the clock is up."""
    cycles = 50_000_000
    milliseconds(cycles)
    return cycles / milliseconds(cycles)


def milliseconds(cycles: int) -> float:
    """Returns how long a sleep of so many cycles takes, by the device's own events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def sleep(units: float) -> None:
    """Keeps the current stream busy; the host goes on."""
    torch.cuda._sleep(int(units * SLEEP_MS * cycles_per_ms()))


class Card:
    """A program's streams. Neighbours in torch's pool, so that no two share a hardware queue."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._streams: dict[str, torch.cuda.Stream] = {}

    @contextmanager
    def on(self, name: str) -> Iterator[None]:
        """Makes a stream current."""
        if name not in self._streams:
            self._streams[name] = torch.cuda.Stream(self.device)
        with torch.cuda.stream(self._streams[name]):
            yield

    def sleep(self, units: int) -> None:
        """Keeps the current stream busy."""
        sleep(units)

    def synchronize(self) -> None:
        """Waits until the device is at rest."""
        torch.cuda.synchronize(self.device)
