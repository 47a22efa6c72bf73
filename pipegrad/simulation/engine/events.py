"""Events: what happens next in a simulation."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

Event = tuple[str, int, int]  # what ranks wait for: a word, a step, and a number


class Events:
    """Calls methods in order of time; what is asked for first comes first at one time.

    Ranks that wait for an event sleep here.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._sequence = 0
        self._sleepers = dict[Event, list[Callable[[float], None]]]()

    def at(self, seconds: float, method: Callable[..., None], *arguments: object) -> None:
        """Asks for the call ``method(seconds, *arguments)`` at that time."""
        self._sequence += 1
        heappush(self._heap, (seconds, self._sequence, method, arguments))

    def run(self) -> None:
        """Goes on until nothing happens any more."""
        heap = self._heap
        while heap:
            now, _, method, arguments = heappop(heap)
            method(now, *arguments)

    def sleep(self, event: Event, wake: Callable[[float], None]) -> None:
        """Asks for the call ``wake(seconds)`` when the event happens."""
        self._sleepers.setdefault(event, []).append(wake)

    def wake(self, now: float, event: Event) -> None:
        """Wakes all that wait for an event, in the order in which they began to wait."""
        for wake in self._sleepers.pop(event, ()):
            wake(now)
