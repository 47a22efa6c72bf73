"""Plain data: how costs and timelines are read from JSON that a person may have written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from pipegrad.errors import ScheduleError

T = TypeVar("T")


def validated(adapter: TypeAdapter[T], data: object, what: str) -> T:
    """Returns what plain data describes.

    Raises:
        ScheduleError: If a name is unknown, or a value is not what it should be.
    """
    try:
        return adapter.validate_python(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or what
        raise ScheduleError(f"{where}: {first['msg']}, found {first['input']!r:.80}") from error


def loaded(path: Path, what: str, read: Callable[[Any], T]) -> T:
    """Returns what `read` makes of the data of a JSON file.

    Raises:
        ScheduleError: If the file is missing or no JSON, or as `read` does. It names the file.
    """
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ScheduleError(f"{path} holds no {what}: {error}") from error
    try:
        return read(data)
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from error
