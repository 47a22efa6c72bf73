"""Activities: the current work of each thread of this rank, and its error, for a report.

All parts of pipegrad enter an activity for each wait, because one costs only about a microsecond.
The memory is fixed, because an activity is dropped when it has ended. A `Record` is the status that
this rank sends to the others when the job fails. A `Tape` forwards times to a recorder.
"""

from __future__ import annotations

import faulthandler
import os
import re
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from threading import get_ident
from typing import Any, Literal, NamedTuple, Protocol

import torch.distributed as dist

from pipegrad.errors import (
    AgreementError,
    PipegradError,
    causes_of,
    in_words,
    is_of_user,
    root_of,
)

Drawing = Callable[[int, Mapping[int, str]], str]
_FAILED = "pipegrad_failed"  # the attribute of an error
# Words in errors of torch's backends after another rank is gone. Other errors are not searched.
_CONNECTION = re.compile(r"gloo|NCCL|[Cc]onnection|Broken pipe|pair closure")
_COMM = f"{Path(__file__).parent}{os.sep}"
_PIPEGRAD = f"{Path(__file__).parents[1]}{os.sep}"
_TORCH = f"{os.sep}torch{os.sep}distributed{os.sep}"
# Functions in which a debugger waits, and their files: pdb, debuggers that are built on it, and
# pydevd, which VS Code and PyCharm use.
_PROMPTS = {"interaction": "/pdb.py", "do_wait_suspend": "pydevd"}
_stacks: dict[int, list[Activity]] = {}  # by thread, outermost first
_numbers = count()
_verb_thread = _num_left = 0  # and how many outermost activities have ended
_STILL_SECONDS = 10.0  # at one place: frames are looked at from then on
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


class Details(NamedTuple):
    """The present state of an activity. An error that leaves an activity has it as an attribute.

    Attributes:
        item: Text for reports.
        waits_for: The global ranks that it waits for.
        row: The pipeline, and the row of its grid that is this rank; None if there is no grid.
        mark: The cell of that row, as ``2F0``; "" before the first.
        drawing: Returns the grid of a pipeline, by its number, with marked cells, by row.
        doing: Texts of the activities of its thread, outermost first.
    """

    item: str = ""
    waits_for: tuple[int, ...] = ()
    row: tuple[int, int] | None = None
    mark: str = ""
    drawing: Drawing | None = None
    doing: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        # An error goes to other processes, for example from a rank of a test. Its drawing is a
        # function of objects that stay here.
        return Details, (*self[:4], None, self.doing)


class Activity:
    """Something that a thread does, from ``with`` to its end.

    Args:
        what: Text for reports, equal on all ranks of a collective. "" without details while this
            thread waits for other threads of this rank.
        ranks: The global ranks that take part, or for which it waits.
        within_seconds: If it takes longer, the job ends with a report; see `comm.watch`.
        details: Returns the present state when a report is made; any thread may call it.
        position: Returns a number that changes when it goes on.

    Attributes:
        since: Start time, on the monotonic clock.
        number: Unique within this process.
    """

    __slots__ = (
        "details",
        "number",
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
        position: Callable[[], int] | None = None,
    ) -> None:
        self.what = what
        self.ranks = ranks
        self.within_seconds = within_seconds
        self.details = details
        self.position = position

    def __enter__(self) -> Activity:
        global _verb_thread  # noqa: PLW0603 - reports are made by another thread
        thread = get_ident()
        self.since = time.monotonic()
        self.number = next(_numbers)
        _stacks.setdefault(thread, []).append(self)
        if self.within_seconds is not None:
            _verb_thread = thread
        return self

    def __exit__(self, *raised: object) -> None:
        thread = get_ident()
        stack = _stacks[thread]
        # Keep the details of the innermost activity, which an error leaves first, because they are
        # the most exact ones.
        if raised[1] is not None and getattr(raised[1], _FAILED, None) is None:
            with suppress(AttributeError, TypeError):  # an error may refuse attributes
                setattr(raised[1], _FAILED, _details_of(stack))
        stack.pop()
        if not stack:
            global _num_left  # noqa: PLW0603 - read by another thread
            _num_left += 1
            del _stacks[thread]  # a later thread may have the same number


def _details_of(stack: Sequence[Activity]) -> Details:
    """Returns the details of the innermost activity that has some."""
    details = [activity.details for activity in stack if activity.details is not None]
    found = details[-1]() if details else Details()
    return found._replace(doing=tuple(activity.what for activity in stack))


def failed_at(error: BaseException) -> Details | None:
    """Returns the state of the thread when an error, or the error's cause, was raised."""
    found = [getattr(one, _FAILED, None) for one in causes_of(error)]
    return next((details for details in reversed(found) if details is not None), None)


def verb_thread() -> int:
    """Returns the thread that calls the verbs: the last one of a bounded activity, or the main."""
    alive = {thread.ident for thread in threading.enumerate()}
    return _verb_thread if _verb_thread in alive else threading.main_thread().ident or 0


def frames_of(thread: int) -> list[traceback.FrameSummary]:
    """Returns the frames of a thread, innermost first, a hundred at most; none if it has ended."""
    # Read running frames in C, because Python makes an object of each. Making one may collect
    # garbage, and a finalizer may let the other thread go on. Then the frame is gone: SIGSEGV in
    # Python 3.11.
    with tempfile.TemporaryFile("w+b") as stream:
        faulthandler.dump_traceback(stream)
        stream.seek(0)
        frames, is_it = list[traceback.FrameSummary](), False
        for line in stream.read().decode(errors="replace").splitlines():
            if found := _THREAD.match(line):
                is_it = int(found[1], 16) == thread
            elif is_it and (found := _FRAME.match(line)):
                frames.append(
                    traceback.FrameSummary(found[1], int(found[2]), found[3], lookup_line=False)
                )
    return frames


def give_back(seconds: float, before: float) -> None:
    """Moves the begin of all activities that began before a time, by time that does not count."""
    for stack in activities().values():
        for activity in stack:
            if activity.since < before:
                activity.since += seconds


def activities() -> dict[int, list[Activity]]:
    """Returns the activities of all threads, by thread, outermost first."""
    # Copy before reading, because each thread changes its list without a lock: an activity must
    # cost nearly nothing.
    return {thread: list(stack) for thread, stack in list(_stacks.items())}


# The error of this rank.


@dataclass(frozen=True)
class Failure:
    """The error that a rank has raised; plain data.

    Attributes:
        error: Its text; "" if there is no error.
        follows: Whether it follows from another rank's failure.
        time: Seconds since the epoch.
        absent: The ranks for which it has waited in vain.
        note: Follows the error in a report, if it is the cause.
    """

    error: str = ""
    follows: bool = False
    time: float = 0.0
    absent: tuple[int, ...] = ()
    note: str = ""


def failure_of(error: BaseException, note: str = "") -> Failure:
    """Returns the failure that other ranks receive for an error of this rank."""
    root = root_of(error)
    follows = has_lost_connection(error) or any(getattr(x, "follows", 0) for x in causes_of(error))
    agreement = error if isinstance(error, AgreementError) else AgreementError()
    # pipegrad's text names bucket or batch. The text of other errors needs the line of the root,
    # which `in_words` adds.
    words = in_words(error) if isinstance(error, PipegradError) else in_words(root)
    notes = [note for note in getattr(root, "__notes__", ()) if note.startswith("In ")]
    began = agreement.began or time.time()
    return Failure(" ".join([words, *notes]), follows, began, agreement.absent, note)


def has_lost_connection(error: BaseException) -> bool:
    """Returns True if a backend, or the store, cannot reach a rank, here or on another rank.

    Only an error that torch raised inside its own code or inside `comm` counts. An error of the
    user's code never does, whatever its text. An error of pipegrad counts if it has `has_lost`.
    """
    root, ours = root_of(error), [x for x in causes_of(error) if isinstance(x, PipegradError)]
    if any(one.has_lost for one in ours):
        return True
    if any(one.follows for one in ours) or not isinstance(root, dist.DistError | RuntimeError):
        return False
    frames = traceback.extract_tb(root.__traceback__)
    is_torchs = not frames or any(part in frames[-1].filename for part in (_TORCH, _COMM))
    is_lost = isinstance(root, dist.DistNetworkError) or _CONNECTION.search(str(root)) is not None
    return is_torchs and is_lost and not isinstance(root, PipegradError)


# The present status of the rank.


@dataclass(frozen=True)
class Record:
    """The status of a rank when the job fails, as the others receive it; plain data.

    Attributes:
        rank: The global rank.
        process: Number of the process, and name of its machine.
        at: Activities of the training thread, outermost first, then the item of a step; "" if none.
        seconds: Time since the innermost activity began or went on.
        line: The line of the user's code that runs; "" if none does.
        waits: A text for each wait of its threads, with the awaited global ranks.
        is_busy: Whether it computes or runs code of the user, while other threads may wait.
        is_in_torch: Whether it is inside of a collective of torch, whose awaited rank is unknown.
        row: Its pipeline, and its row of the grid; None outside of a step.
        mark: The cell of that row.
        failure: The error that it has raised.
    """

    rank: int
    process: str
    at: str = ""
    seconds: float = 0.0
    line: str = ""
    waits: tuple[tuple[str, tuple[int, ...]], ...] = ()
    is_busy: bool = False
    is_in_torch: bool = False
    row: tuple[int, int] | None = None
    mark: str = ""
    failure: Failure = Failure()

    @property
    def verb(self) -> str:
        """The outermost activity; "" outside of pipegrad."""
        return self.at.partition(", ")[0]

    @property
    def awaited(self) -> set[int]:
        """The global ranks for which its threads wait."""
        return {rank for _, ranks in self.waits for rank in ranks}

    @property
    def words(self) -> str:
        """Its status, in words."""
        line = f" ({self.line})" if self.line else ""
        if not self.at:
            return f"was outside of pipegrad{line}"
        seconds = "" if self.failure.error else f", for {self.seconds:.1f} s"
        return f"was in {self.at}{seconds}{line}"


class Account:
    """Collects the status of this rank for reports: its place, the time there, and its error."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._failure = Failure()
        self._failed: Details | None = None
        self._place: tuple[list[int] | int, list[int]] = 0, []
        self._moved = 0.0  # when the position within an activity has changed
        self.since = self._looked = time.monotonic()
        self.is_debugged = False

    def fail(self, error: BaseException, note: str = "") -> None:
        """Stores the error of this rank, and a note that follows its text if it is the cause."""
        self._failure, self._failed = failure_of(error, note), failed_at(error)

    def look(self, *, counts: bool = True) -> None:
        """Checks if the thread of verbs has gone on; call it often."""
        before, self._looked = self._looked, time.monotonic()
        if (place := _place()) != self._place:
            if place[1] != self._place[1]:
                self._moved = self._looked if place[1] else 0.0
            self._place, self.since, self.is_debugged = place, self._looked, False
        elif self._looked - self.since >= _STILL_SECONDS or self.late(share=0.5) is not None:
            frames = frames_of(verb_thread())
            self.is_debugged = any(_PROMPTS.get(x.name, "\0") in x.filename for x in frames)
        if self.is_debugged or not counts:
            give_back(self._looked - before, before)

    def stand(self) -> Record | None:
        """Returns the status of a rank that waits for ranks, or is outside of pipegrad."""
        thread = verb_thread()
        if not (stack := activities().get(thread)):
            # A call without an activity, such as a cut that loads weights, is not outside.
            is_inside = any(frame.filename.startswith(_PIPEGRAD) for frame in frames_of(thread))
            return None if is_inside else self.record()
        is_for_threads = not stack[-1].what and stack[-1].details is None
        record = self.record() if is_for_threads or self.awaited(0) else None
        return record if record is not None and record.awaited else None

    def late(self, share: float = 1.0) -> str | None:
        """Returns words about an activity that has taken longer than a share of what it may."""
        now = time.monotonic()
        for stack in activities().values():
            for activity in stack:
                limit = activity.within_seconds
                if limit is not None and now - activity.since > share * limit:
                    return f"{activity.what} took longer than {limit:g} s on rank {self._rank}"
        return None

    def awaited(self, seconds: float) -> Sequence[int]:
        """Returns the ranks for which the thread of verbs has waited for so long."""
        for activity in activities().get(verb_thread(), [])[-1:]:
            since = max(activity.since, 0.0 if activity.position is None else self._moved)
            if time.monotonic() - since <= seconds:
                return ()
            return activity.ranks or (activity.details().waits_for if activity.details else ())
        return ()

    @property
    def doing(self) -> list[str]:
        """Texts of the activities of the thread of verbs, outermost first."""
        return [activity.what for activity in activities().get(verb_thread(), [])]

    def record(self) -> Record:
        """Returns the status of this rank, or of its failure; any thread may call it."""
        # Look again, because the watch looks twice a second, and the thread may have gone on.
        self.look()
        stacks, now, verbs = activities(), time.monotonic(), verb_thread()
        main = stacks.pop(verbs, [])
        line, runs, is_in_torch = _line_of(verbs)
        details = self._failed or _details_of(main)
        if self._failed is not None:
            details, line, is_in_torch = details._replace(waits_for=()), "", False
        waits = [(details.item, details.waits_for)] if details.waits_for else []
        is_waiting = bool(waits) or bool(main and main[-1].ranks)
        for thread, stack in {verbs: main, **stacks}.items():
            if stack and stack[-1].ranks:
                what, (busy, is_user, _) = stack[-1].what, _line_of(thread)
                # A thread in code of the user does not wait for ranks.
                if is_user and thread != verbs:
                    line = f"{what} at {busy}"
                else:
                    waits.append((what, tuple(stack[-1].ranks)))
        is_computing = details.item.startswith("compute") and not is_in_torch
        return Record(
            rank=self._rank,
            process=f"pid {os.getpid()} on {socket.gethostname()}",
            at=", ".join(dict.fromkeys(text for text in (*details.doing, details.item) if text)),
            seconds=max(0.0, now - max(self._moved, main[-1].since)) if main else 0.0,
            line=line,
            waits=tuple(waits),
            is_busy=not is_waiting and (runs or is_computing),
            is_in_torch=is_in_torch,
            row=details.row,
            mark=details.mark,
            failure=self._failure,
        )

    def draw(self, pipeline: int, marks: Mapping[int, str]) -> str:
        """Returns the grid that the thread of verbs is in, or has failed in; "" if in none."""
        drawing = (self._failed or _details_of(activities().get(verb_thread(), []))).drawing
        return "" if drawing is None else drawing(pipeline, marks)


def _place() -> tuple[list[int] | int, list[int]]:
    """Returns a value that changes when the thread of verbs goes on, and its positions."""
    stack = activities().get(verb_thread(), [])
    positions = [activity.position() for activity in stack if activity.position is not None]
    return [activity.number for activity in stack] or _num_left, positions


def _line_of(thread: int) -> tuple[str, bool, bool]:
    """Returns the user's innermost line, if it runs itself, and if torch communicates below it."""
    runs, is_in_torch = True, False
    for frame in frames_of(thread):
        if is_of_user(frame.filename):
            return f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}", runs, is_in_torch
        runs, is_in_torch = False, is_in_torch or _TORCH in frame.filename
    return "", False, is_in_torch


# Kinds of times that are recorded. A timeline shows these words.
Noted = Literal["wait for reduction", "wait for ranks", "reduction", "parameter sync", "host"]
Key = tuple[int, int] | str  # a bucket and a step of its route, or the text of a wait


class Recorder(Protocol):
    """Who records. `pipegrad.observe` has one."""

    def now(self) -> object:
        """Returns a point in time, on the current stream if there are streams."""

    def note(self, kind: Noted, key: Key, began: object) -> None:
        """Records an interval that ends now; any thread may call it."""

    def begin_step(self, number: int, program: object) -> None:
        """Records the start of a training step, and the Program that it runs."""

    def item_times(self) -> Callable[[object], object]:
        """Returns the function that records a time of the step.

        It is called with the time of the start, and then with the time of the end of each item.
        """


class Tape:
    """Forwards times to `recorder`; without one, it does nothing."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None

    def now(self) -> object:
        """Returns a point in time for `note`; None if nobody records."""
        recorder = self.recorder  # another thread may end the recording
        return None if recorder is None else recorder.now()

    def note(self, kind: Noted, key: Key, began: object) -> None:
        """Passes on an interval that began at `began`, a result of `now`; nothing if it is None."""
        if began is not None and (recorder := self.recorder) is not None:
            recorder.note(kind, key, began)
