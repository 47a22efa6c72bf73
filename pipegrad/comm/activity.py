"""Activities: what each thread of this rank does now, for the report of a failure.

An activity costs about a microsecond, so all parts of pipegrad note what they wait for, always. The
memory is fixed: an activity is gone when it has ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from threading import get_ident
from typing import Any, NamedTuple

from pipegrad.comm.store import SignedStore

Drawing = Callable[[int, Mapping[int, str]], str]
_FAILED = "pipegrad_failed"  # the attribute of an error
_stacks: dict[int, list[Activity]] = {}  # by thread, outermost first
_verb_thread = 0


class Details(NamedTuple):
    """What an activity is at, right now.

    Attributes:
        item: In words.
        waits_for: The global ranks that it waits for.
        row: The pipeline, and the row of its grid that is this rank; None if there is no grid.
        mark: The cell of that row, as ``2F0``; "" before the first.
    """

    item: str = ""
    waits_for: tuple[int, ...] = ()
    row: tuple[int, int] | None = None
    mark: str = ""


class Activity:
    """Something that a thread does, from ``with`` to its end.

    Args:
        what: In words. Of a collective they are the same on all its ranks.
        ranks: The global ranks that take part, or for which it waits.
        within_seconds: If it takes longer, the job ends with a report; see `comm.watch`.
        details: Returns more, when a report is made; any thread may call it.
        drawing: Returns the grid of a pipeline, by its number, with marked cells, by row.
        position: Returns a number that changes when it goes on.
        absent: Returns which of the ranks have not come yet, as a key-value store knows.

    Attributes:
        since: When it began, on the monotonic clock.
    """

    __slots__ = (
        "absent",
        "details",
        "drawing",
        "position",
        "ranks",
        "since",
        "what",
        "within_seconds",
    )

    def __init__(
        self,
        what: str,
        ranks: Sequence[int] = (),
        *,
        within_seconds: float | None = None,
        details: Callable[[], Details] | None = None,
        drawing: Drawing | None = None,
        position: Callable[[], int] | None = None,
        absent: Callable[[SignedStore], list[int]] | None = None,
    ) -> None:
        self.what = what
        self.ranks = ranks
        self.within_seconds = within_seconds
        self.details = details
        self.drawing = drawing
        self.position = position
        self.absent = absent

    def __enter__(self) -> Activity:
        global _verb_thread  # noqa: PLW0603 - reports are made by another thread
        thread = get_ident()
        self.since = time.monotonic()
        _stacks.setdefault(thread, []).append(self)
        if self.within_seconds is not None:
            _verb_thread = thread
        return self

    def __exit__(self, *raised: object) -> None:
        thread = get_ident()
        stack = _stacks[thread]
        if raised[1] is not None:
            _note_failed(stack, raised[1])
        stack.pop()
        if not stack:
            del _stacks[thread]  # a later thread may have the same number


class Failed(NamedTuple):
    """What a thread was at when an error left its activities. The error has it as an attribute.

    Attributes:
        doing: The activities in words, outermost first.
        details: Of the innermost that has some.
        drawing: Of the innermost that has one.
    """

    doing: tuple[str, ...]
    details: Details
    drawing: Drawing | None

    def __reduce__(self) -> tuple[Any, ...]:
        # An error goes to other processes, for example from a rank of a test. Its drawing is a
        # function of objects that stay here.
        return Failed, (self.doing, self.details, None)


def _note_failed(stack: list[Activity], error: object) -> None:
    """Notes an error where it leaves the innermost activity; the outer ones know less of it."""
    if getattr(error, _FAILED, None) is not None:
        return
    details = [activity.details for activity in stack if activity.details is not None]
    drawings = [activity.drawing for activity in stack if activity.drawing is not None]
    doing = tuple(activity.what for activity in stack)
    failed = Failed(
        doing, details[-1]() if details else Details(), drawings[-1] if drawings else None
    )
    with suppress(AttributeError, TypeError):  # an error may refuse attributes
        setattr(error, _FAILED, failed)


def failed_at(error: BaseException | None) -> Failed | None:
    """Returns what a thread was at when an error, or the one that it follows from, was raised."""
    found: Failed | None = None
    while error is not None:
        found = getattr(error, _FAILED, None) or found
        error = error.__cause__
    return found


def verb_thread() -> int:
    """Returns the thread that calls the verbs: the last one of a bounded activity, or the main."""
    return _verb_thread if _verb_thread in _alive() else threading.main_thread().ident or 0


def _alive() -> set[int | None]:
    return {thread.ident for thread in threading.enumerate()}


def give_back(seconds: float, before: float) -> None:
    """Moves the begin of all activities that began before a time, by the time of a suspension."""
    for stack in activities().values():
        for activity in stack:
            if activity.since < before:
                activity.since += seconds


def activities() -> dict[int, list[Activity]]:
    """Returns the activities of all threads, by thread, outermost first."""
    return {thread: list(stack) for thread, stack in list(_stacks.items())}
