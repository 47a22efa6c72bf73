"""A device for tests of stamps: it reaches its events only when somebody waits for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Device:
    """Each event is half a second behind the one before it."""

    clock: float = 1000.0  # seconds
    waits: int = 0
    made: int = 0
    queue: list[Event] = field(default_factory=list)

    def make(self) -> Event:
        self.made += 1
        return Event()

    def record(self, event: Event) -> None:
        event.seconds = None
        self.queue.append(event)

    def synchronize(self) -> None:
        self.waits += 1
        for event in self.queue:
            self.clock += 0.5
            event.seconds = self.clock
        self.queue.clear()


@dataclass(eq=False)
class Event:
    seconds: float | None = None

    def elapsed_time(self, other: Any) -> float:
        if self.seconds is None or other.seconds is None:
            raise RuntimeError("an event that was not reached")
        return float(other.seconds - self.seconds) * 1e3
