"""Activities: what each thread of this rank does now, for the report of a failure.

An activity costs about a microsecond, so all parts of pipegrad note what they wait for, always. The
memory is fixed: an activity is gone when it has ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from threading import get_ident
from typing import NamedTuple

from torch.distributed.distributed_c10d import Store

_stacks: dict[int, list[Activity]] = {}  # by thread, outermost first


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
        drawing: Returns the grid of a pipeline with marked cells, by row.
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
        drawing: Callable[[Mapping[int, str]], str] | None = None,
        position: Callable[[], int] | None = None,
        absent: Callable[[Store], list[int]] | None = None,
    ) -> None:
        self.what = what
        self.ranks = ranks
        self.within_seconds = within_seconds
        self.details = details
        self.drawing = drawing
        self.position = position
        self.absent = absent

    def __enter__(self) -> Activity:
        self.since = time.monotonic()
        _stacks.setdefault(get_ident(), []).append(self)
        return self

    def __exit__(self, *raised: object) -> None:
        thread = get_ident()
        stack = _stacks[thread]
        if raised[1] is not None:
            _note_failed(thread, stack, id(raised[1]))
        stack.pop()
        if not stack:
            del _stacks[thread]  # a later thread may have the same number


class Failed(NamedTuple):
    """What a thread was at when an error left its activities.

    Attributes:
        error: The id of the error.
        doing: Its activities in words, outermost first.
        details: Of the innermost that has some.
        drawing: Of the innermost that has one.
    """

    error: int
    doing: tuple[str, ...]
    details: Details
    drawing: Callable[[Mapping[int, str]], str] | None


_failed: dict[int, Failed] = {}  # the last one of each thread


def _note_failed(thread: int, stack: list[Activity], error: int) -> None:
    """Notes an error where it leaves the innermost activity; the outer ones know less of it."""
    if thread in _failed and _failed[thread].error == error:
        return
    details = [activity.details for activity in stack if activity.details is not None]
    drawings = [activity.drawing for activity in stack if activity.drawing is not None]
    _failed[thread] = Failed(
        error,
        tuple(activity.what for activity in stack),
        details[-1]() if details else Details(),
        drawings[-1] if drawings else None,
    )


def last_failed(thread: int) -> Failed | None:
    """Returns what a thread was at when the last error left its activities."""
    return _failed.get(thread)


def activities() -> dict[int, list[Activity]]:
    """Returns the activities of all threads, by thread, outermost first."""
    return {thread: list(stack) for thread, stack in list(_stacks.items())}
