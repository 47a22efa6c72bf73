"""Last words: what a rank of a job says when the job fails, and its exit code.

There is one report for all ranks: that of the watch (`pipegrad.comm.watch`). The rank that has made
it prints it. torchrun gets the cause on each machine, and prints it last.
"""

from __future__ import annotations

import sys
import time
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Protocol

import torch.distributed as dist

from pipegrad import run_files
from pipegrad.comm.activity import failure_of
from pipegrad.comm.agreement import once_a_machine
from pipegrad.comm.failures import FAILED, FailureReport
from pipegrad.comm.watch import watch
from pipegrad.errors import PipegradError
from pipegrad.printable import printable_lines

_LATER_SECONDS = 0.5  # for the rank that prints the report: who ends first makes torchrun end all


class Run(Protocol):
    """A run that may have a folder."""

    folder: Path | None


def show_in(folder: Path) -> None:
    """Lets the report of a failure stand in a run's folder, too."""
    if (watched := watch()) is not None:
        watched.show = partial(_show, folder)


def _show(folder: Path, text: str) -> None:
    _print(text)
    with suppress(OSError):
        _write_text(folder / "failure.txt", f"{text}\n")


def fail(error: BaseException, run: Run | None, *, shows_traceback: bool) -> int:
    """Prints what has failed, once for all ranks; returns the exit code.

    It takes some seconds at most, also if other ranks are gone.

    Args:
        error: What was raised on this rank.
        run: What has failed. Its folder takes the traceback.
        shows_traceback: Whether to print the traceback, too.
    """
    file = _write_traceback(error, run.folder if run else None, shows=shows_traceback)
    note = f" (traceback: {file})" if file else ""
    watched = watch()
    # In a process group of the caller, whose ranks go on, nobody may end the job.
    if watched is not None and watched.ends_process:
        return _end(watched.fail(error, note))
    words = str(error) if isinstance(error, PipegradError) else failure_of(error).error
    once_a_machine(partial(_print, f"{words}{note}"))
    FailureReport(words, words, 0, "common").tell_launcher()
    return FAILED


def _end(report: FailureReport) -> int:
    if report.kind == "common":
        once_a_machine(partial(_print, report.cause))
    if dist.get_rank() != report.reporter:
        time.sleep(_LATER_SECONDS)
    return report.exit_code


def _print(words: str) -> None:
    print(f"Error: {printable_lines(words)}", file=sys.stderr, flush=True)  # noqa: T201


def _write_traceback(error: BaseException, folder: Path | None, *, shows: bool) -> str:
    """Prints a traceback, writes it into a folder, or both; returns the file, "" without one."""
    text = "".join(traceback.format_exception(error))
    if shows:
        print(printable_lines(text), file=sys.stderr, flush=True)  # noqa: T201
    if folder is not None:
        with suppress(OSError):
            rank = dist.get_rank() if dist.is_initialized() else 0
            _write_text(file := folder / f"failure-rank{rank}.txt", text)
            return str(file)
    return ""


def _write_text(file: Path, text: str) -> None:
    run_files.replace(file, text.encode(errors="backslashreplace"))  # names of files may need it
