"""Uncaught errors of a script under a launcher: one mistake, one message.

[Note: an uncaught error] An error that nobody catches ends its process, and a launcher ends the
others. Without this hook each rank would print a traceback, most of them about the same error.

1. Each rank that has an uncaught error passes it to the watch. The watch finds the cause in the
   records of all ranks. The rank that is the cause prints it, with the lines of the user's code
   that led to it. If the cause is not the error of a rank, for example because one has ended, the
   rank of the first alarm prints.
2. Only that rank ends at once, with the exit code of an error. The others wait until the launcher
   ends them. A rank that the launcher ends has the exit code 0, because torchrun then lists one
   failure instead of all. A rank that the launcher does not end has the exit code of an error,
   some seconds later.

An excepthook that a user has set, before or after this one, is called on every rank.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch.distributed as dist

from pipegrad.comm.activity import failure_of, verb_thread
from pipegrad.comm.ending import set_all_in_vain
from pipegrad.comm.failures import FAILED
from pipegrad.comm.watch import Watch, watch
from pipegrad.errors import PipegradError, causes_of, is_of_user
from pipegrad.printable import printable, say

TRACEBACK = "PIPEGRAD_TRACEBACK"  # a variable; 1 leaves every traceback as Python prints it
_FIRST_SECONDS = 2.0  # for all ranks to be ready for their end
_LATER_SECONDS = 5.0  # for the launcher to end a rank that is not the cause
_TICK_SECONDS = 0.05
_NO_GRAPH = "does not require grad and does not have a grad_fn"  # torch, of a backward
_MOST_FRAMES, _MOST_CHARACTERS = 4, 100  # of the user's lines
_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def report_uncaught() -> None:
    """Sets up the hooks of this process, once, and its watch; every rank must call it.

    It does nothing in one process, in a process that no launcher has started, in notebooks, at a
    prompt and under pytest.
    """
    if not _is_launched_script():
        return
    watched = watch()
    if watched is None or watched.ends_process:  # `pipegrad train` prints its errors itself
        return
    if not isinstance(sys.excepthook, partial) or sys.excepthook.func is not _uncaught:
        sys.excepthook = partial(_uncaught, sys.excepthook)
        threading.excepthook = partial(_uncaught_in_thread, threading.excepthook)


def _is_launched_script() -> bool:
    is_of_launcher = "RANK" in os.environ and dist.is_initialized() and dist.get_world_size() > 1
    is_prompt = sys.flags.interactive or hasattr(sys, "ps1") or "ipykernel" in sys.modules
    is_wanted = os.environ.get(TRACEBACK, "0") in ("", "0")
    is_test = bool(os.environ.get("PYTEST_CURRENT_TEST"))
    return is_of_launcher and is_wanted and not is_prompt and not is_test


def _uncaught(
    before: _Hook, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Replaces `sys.excepthook`."""
    watched = watch()
    # An interrupt; or the process group has ended, and no rank can answer.
    if watched is None or not isinstance(error, Exception):
        before(kind, error, trace)
        return
    asked = _take_requests()
    is_first = _tell(watched, error)
    if _is_of_user(before):
        before(kind, error, trace)
    set_all_in_vain()
    sys.stderr.flush()
    watched.come_to_end()
    if is_first:
        # Wait for the others, because the launcher ends them when the first rank has ended.
        watched.wait_for_end(_FIRST_SECONDS)
    else:
        deadline = time.monotonic() + _LATER_SECONDS
        while not asked and time.monotonic() < deadline:
            time.sleep(_TICK_SECONDS)
    _end_without_finalization(lambda: FAILED if is_first or not asked else 0)


def _uncaught_in_thread(before: Callable[[Any], object], raised: threading.ExceptHookArgs) -> None:
    """Replaces `threading.excepthook`."""
    error, watched = raised.exc_value, watch()
    if not isinstance(error, Exception) or watched is None:
        before(raised)
    elif threading.get_ident() == verb_thread():
        _tell(watched, error)
    elif not watched.has_alarm:
        name = raised.thread.name if raised.thread else "?"
        words = f"{failure_of(error).error}{user_lines(error)}"
        say(f"Error: rank {watched.rank}, thread {name!r}: {words}")


def _tell(watched: Watch, error: Exception) -> bool:
    """Sends an error to the other ranks; returns True if this rank prints the cause."""
    lines, failure = f"{user_lines(error)}{_hint(error)}", failure_of(error)
    if failure.follows:
        watched.has_alarm_soon()  # the rank that is the cause comes first, with its lines
    report = watched.fail(error, lines)
    is_first = watched.rank == report.reporter
    if is_first and report.kind == "common":
        say(f"Error: {report.cause}{lines}")
    # Two ranks may have two mistakes. The mistake of this rank must not be lost.
    is_own = not failure.follows and not isinstance(error, PipegradError)
    if is_own and not is_first and report.kind != "common":
        say(f"Error: rank {watched.rank}, too: {failure.error}")
    return is_first


def _hint(error: Exception) -> str:
    """Returns a line with advice that torch cannot give; "" if there is none."""
    if _NO_GRAPH not in str(error):
        return ""
    return (
        "\n  The loss of a StepResult has no graph: scheduler.step() has run backward: leave it out"
    )


def user_lines(error: BaseException) -> str:
    """Returns the lines of the user's code that led to an error, the innermost last; "" if none.

    For an error of pipegrad the innermost line is enough, because its text describes the mistake.
    """
    frames = [
        frame
        for one in causes_of(error)
        for frame in traceback.extract_tb(one.__traceback__)
        if is_of_user(frame.filename)
    ]
    lines = list[str]()
    for frame in {(frame.filename, frame.lineno): frame for frame in frames}.values():
        code = (frame.line or "")[:_MOST_CHARACTERS]
        where = f"{_short(frame.filename)}:{frame.lineno} in {frame.name}"
        lines.append(f"\n  {printable(f'{where}: {code}' if code else where)}")
    most = 1 if isinstance(error, PipegradError) and error.__cause__ is None else _MOST_FRAMES
    return "".join(lines[-most:])


def _short(file: str) -> str:
    """Returns the path of a file, from the working directory if it is in there."""
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except (ValueError, OSError):
        return file


def _is_of_user(hook: object) -> bool:
    """True if a hook is neither Python's nor torch's around Python's."""
    if isinstance(hook, partial):
        return True
    cells = getattr(hook, "__closure__", None) or ()
    if getattr(hook, "__module__", "") == "torch.distributed.distributed_c10d":
        return any(_is_of_user(c.cell_contents) for c in cells if callable(c.cell_contents))
    return hook is not sys.__excepthook__


def _end_without_finalization(code: Callable[[], int]) -> None:
    """Ends this process after its exit functions, with a code, and without finalization.

    Finalizing groups of gloo with lost connections took 7 s, and a thread in torch may abort the
    process then. An excepthook after this one still runs.
    """

    def end() -> None:
        atexit.unregister(end)
        atexit._run_exitfuncs()  # Python calls them in reverse order of registration
        for each in gc.get_objects():  # finalization would write what files of the user still hold
            if type(each) in (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom):
                with suppress(OSError, ValueError):  # it is closed, or its disk is full
                    each.flush()
        os._exit(code())

    atexit.register(end)


def _take_requests() -> list[int]:
    """Returns a list that gets an item when the launcher sends SIGTERM to this process."""
    asked = list[int]()

    def obey(number: int, _frame: FrameType | None) -> None:
        asked.append(number)

    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # else the user's
        signal.signal(signal.SIGTERM, obey)
    return asked
