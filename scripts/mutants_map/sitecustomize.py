"""Writes which lines of the product run under which test, in each process that Python starts.

`scripts/mutants map` puts this folder on PYTHONPATH. A process appends to a file of its own in
PIPEGRAD_MUTANTS_MAP, line by line, so that one that is killed loses nothing: ``test TAB file TAB
line``. The test is pytest's PYTEST_CURRENT_TEST, which ranks and other processes inherit.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

OUT = os.environ.get("PIPEGRAD_MUTANTS_MAP", "")
ROOT = os.environ.get("PIPEGRAD_MUTANTS_ROOT", "")
_PRODUCT = (f"{ROOT}/pipegrad/", f"{ROOT}/handlers/")

_tracers: dict[str, Callable[..., Any] | None] = {}  # of each file; None if it is not the product
_seen = set[tuple[str, int]]()
_file = [-1]


def reset() -> None:
    """Forgets what has run: another test begins."""
    _seen.clear()


def _tracer(path: str) -> Callable[..., Any] | None:
    if not path.startswith(_PRODUCT):
        return None
    name = path.removeprefix(f"{ROOT}/")

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any]:
        if event == "line" and (here := (name, frame.f_lineno)) not in _seen:
            _seen.add(here)
            test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
            os.write(_file[0], f"{test}\t{name}\t{here[1]}\n".encode())
        return trace

    return trace


def _enter(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
    path = frame.f_code.co_filename
    if path not in _tracers:
        _tracers[path] = _tracer(path)
    return _tracers[path]


def _start() -> None:
    _seen.clear()
    path = f"{OUT}/{os.getpid()}-{time.time_ns()}"
    _file[0] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    threading.settrace(_enter)
    sys.settrace(_enter)


if OUT:
    os.register_at_fork(after_in_child=_start)
    _start()
