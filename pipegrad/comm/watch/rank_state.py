"""RankState: what a rank is at when the job fails, as it tells the other ranks."""

from __future__ import annotations

import os
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from pipegrad.comm.activity import Activity, Details, Drawing, activities, verb_thread
from pipegrad.comm.failures import Failure

_OWN = f"{Path(__file__).parents[2]}{os.sep}"
_TORCH = f"{os.sep}torch{os.sep}"
# Lines of these do not help: pipegrad's own, torch's, and those of Python's standard library.
_SKIPPED = (_OWN, _TORCH, f"{os.sep}click{os.sep}", "<")
_PYTHON = f"{Path(os.__file__).parent}{os.sep}"


class Wait(NamedTuple):
    """Something that a rank waits for.

    Attributes:
        what: In words.
        ranks: The global ranks that it waits for.
        is_shared: Whether these ranks take part in it, and have it in the same words.
        seconds: For how long.
    """

    what: str
    ranks: tuple[int, ...]
    is_shared: bool
    seconds: float


@dataclass(frozen=True)
class RankState:
    """What a rank is at. All of it is plain data.

    Attributes:
        rank: The global rank.
        host: Name of its machine.
        pid: Of its process there.
        doing: What its main thread does, outermost first.
        seconds: For how long it has been at the innermost of these.
        item: The item of the Program, if it is in a step.
        waits: What its threads wait for.
        row: Its pipeline, and its row of the grid; None outside of a step.
        mark: The cell of that row.
        where: The user's line that runs, or the line of torch.
        is_in_torch: Whether the main thread is inside of a collective of torch.
        is_busy: Whether the main thread computes, or runs code of the user. Then others may wait
            for this rank, whatever its other threads wait for.
        error: What it has raised, in words; "" if nothing.
        follows: Whether that error follows from another rank's failure.
        error_time: When it was raised, in seconds since the epoch.
        absent: The ranks for which it has waited in vain.
        note: Follows the error, if it is the cause.
    """

    rank: int
    host: str
    pid: int
    doing: tuple[str, ...] = ()
    seconds: float = 0.0
    item: str = ""
    waits: tuple[Wait, ...] = ()
    row: tuple[int, int] | None = None
    mark: str = ""
    where: str = ""
    is_in_torch: bool = False
    is_busy: bool = False
    error: str = ""
    follows: bool = False
    error_time: float = 0.0
    absent: tuple[int, ...] = ()
    note: str = ""


class LastProgress:
    """When the main thread has last gone on to another item, as seen from time to time."""

    def __init__(self) -> None:
        self._seen: tuple[object, int] | None = None
        self._since = 0.0

    def look(self) -> float:
        """Looks where the main thread is; returns when it was first seen there, or came there."""
        stack = activities().get(verb_thread(), [])
        placed = next((a for a in reversed(stack) if a.position is not None), None)
        if placed is None or placed.position is None:
            return 0.0
        seen = placed, placed.position()
        if seen != self._seen:
            # The first look of a new item may come late, but never before its activity began.
            is_first = self._seen is None
            self._seen, self._since = seen, placed.since if is_first else time.monotonic()
        return self._since


def state_of_this_rank(rank: int, failure: Failure | None, progress: LastProgress) -> RankState:
    """Returns what this rank is at; any thread may call it."""
    stacks, now = activities(), time.monotonic()
    main = stacks.pop(verb_thread(), [])
    details, since = _details(main), progress.look()
    seconds = max(0.0, now - max(since, main[-1].since)) if main else 0.0
    doing = tuple(activity.what for activity in main)
    line, is_in_torch = _line_of_main_thread()
    if failure is not None and failure.failed is not None:
        doing, details = failure.failed.doing, failure.failed.details._replace(waits_for=())
        line, is_in_torch, seconds = "", False, time.time() - failure.time
    waits_itself = bool(details.waits_for) or _wait(main, now) is not None
    is_computing = details.item.startswith("compute") and not is_in_torch
    waits = [wait for stack in [main, *stacks.values()] if (wait := _wait(stack, now)) is not None]
    # A thread in code of the user does not wait for ranks, whatever it does.
    for thread, stack in stacks.items():
        if stack and stack[-1].ranks and (busy := _line_of(thread)):
            waits = [wait for wait in waits if wait.what != stack[-1].what]
            line = f"{stack[-1].what} at {busy}"
    if details.waits_for:
        waits.insert(0, Wait(details.item, details.waits_for, False, seconds))
    return RankState(
        rank,
        socket.gethostname(),
        os.getpid(),
        doing=doing,
        seconds=seconds,
        item=details.item,
        waits=tuple(waits),
        row=details.row,
        mark=details.mark,
        where=line,
        is_in_torch=is_in_torch,
        is_busy=not waits_itself and (is_computing or bool(_line_of(verb_thread()))),
        error=failure.error if failure else "",
        follows=failure is not None and failure.follows,
        error_time=failure.time if failure else 0.0,
        absent=failure.absent if failure else (),
        note=failure.note if failure else "",
    )


def drawing_of(failure: Failure | None) -> Drawing | None:
    """Returns what draws the grid that the main thread is in, or has failed in."""
    if failure is not None and failure.failed is not None:
        return failure.failed.drawing
    stack = activities().get(verb_thread(), [])
    return next((a.drawing for a in reversed(stack) if a.drawing is not None), None)


def late_agreement() -> tuple[Activity, float] | None:
    """Returns the agreement that the main thread is in, and for how long; None if in none."""
    stack = activities().get(verb_thread(), [])
    if not stack or stack[-1].absent is None:
        return None
    return stack[-1], time.monotonic() - stack[-1].since


def _details(stack: list[Activity]) -> Details:
    """Returns the details of the innermost activity that has some."""
    for activity in reversed(stack):
        if activity.details is not None:
            return activity.details()
    return Details()


def _wait(stack: list[Activity], now: float) -> Wait | None:
    """Returns what a thread waits for with other ranks."""
    if not stack or not stack[-1].ranks:
        return None
    innermost = stack[-1]
    return Wait(innermost.what, tuple(innermost.ranks), True, now - innermost.since)


def _line_of_main_thread() -> tuple[str, bool]:
    """Returns the innermost line of the user, and whether torch communicates below it."""
    frame, is_in_torch = sys._current_frames().get(verb_thread()), False
    while frame is not None and not _is_of_user(frame):
        is_in_torch = is_in_torch or f"{_TORCH}distributed{os.sep}" in frame.f_code.co_filename
        frame = frame.f_back
    return "" if frame is None else _line(frame), is_in_torch


def _line_of(thread: int) -> str:
    """Returns the line that a thread runs, if it is one of the user; else ""."""
    frame = sys._current_frames().get(thread)
    return _line(frame) if frame is not None and _is_of_user(frame) else ""


def _is_of_user(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    is_pythons = name.startswith(_PYTHON) and "-packages" not in name
    return not is_pythons and not any(part in name for part in _SKIPPED)


def _line(frame: FrameType) -> str:
    code = frame.f_code
    return f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"
