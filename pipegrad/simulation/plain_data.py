"""Plain data: how costs and timelines are read from JSON that a person may have written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from pipegrad import run_files
from pipegrad.errors import ScheduleError, reason
from pipegrad.printable import printable, shortened

T = TypeVar("T")
_MOST_MISTAKES = 8  # in one message
# The first word of what pydantic calls a mistake -> ours, where its own are of Python.
_COMPLAINTS = {
    "missing": "is missing",
    "dataclass": "should be an object",
    "unexpected": "is unknown",
}


def validated(adapter: TypeAdapter[T], data: object, what: str) -> T:
    """Returns what plain data describes.

    Raises:
        ScheduleError: If a name is unknown, or a value is not what it should be.
    """
    try:
        return adapter.validate_python(data)
    except ValidationError as error:
        mistakes = error.errors()
        words = [_in_words(each, what) for each in mistakes[:_MOST_MISTAKES]]
        more = len(mistakes) - len(words)
        words += [f"and {more} more"] if more else []
        raise ScheduleError("; ".join(words)) from error


def _in_words(mistake: ErrorDetails, what: str) -> str:
    where = printable(shortened(".".join(map(str, mistake["loc"])) or what))
    kind = mistake["type"].partition("_")[0]
    complaint = _COMPLAINTS.get(kind, mistake["msg"].removeprefix("Value error, "))
    shown = "" if kind == "missing" else f", found {_shown(mistake['input'])}"
    colon = "" if kind in _COMPLAINTS else ":"
    return f"{where}{colon} {complaint.removeprefix('Input ')}{shown}"


def _shown(value: object) -> str:
    try:
        return f"{value!r:.80}"
    except (RecursionError, ValueError):  # too deep, or a number of too many digits
        return f"a {type(value).__name__}"


def loaded(path: Path, what: str, read: Callable[[Any], T]) -> T:
    """Returns what `read` makes of the data of a JSON file.

    Raises:
        ScheduleError: If the file is missing or no JSON, or as `read` does. It names the file.
    """
    try:
        content = run_files.read(path)
    except FileNotFoundError as error:
        raise ScheduleError(f"there is no file {path}") from error
    except (OSError, ValueError) as error:
        raise ScheduleError(f"{str(path)!r} cannot be read: {reason(error)}") from error
    try:
        return read(run_files.parsed_json(content))
    except json.JSONDecodeError as error:
        complaint = f"line {error.lineno}, column {error.colno} is no JSON"
    except ValueError as error:  # a ScheduleError, too
        complaint = str(error)
    raise ScheduleError(
        f"{path} holds no {what}: {complaint if content.strip() else 'it is empty'}"
    )
