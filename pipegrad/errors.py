"""All errors of pipegrad. A message names the problem, the expected value and the way out."""

from __future__ import annotations

import inspect
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from pipegrad.printable import shortened

_MOST_CHARACTERS = 4000  # of the words of an error
_PYTHON = f"{Path(os.__file__).parent}{os.sep}"
_NOT_THE_CALLER = {"pipegrad", "torch", *sys.stdlib_module_names}  # functools calls properties
_PACKAGES = ("torch", "click", "pipegrad_handlers", "pipegrad_codecs")
_SKIPPED = (f"{Path(__file__).parent}{os.sep}", *(f"{os.sep}{p}{os.sep}" for p in _PACKAGES), "<")


Raised = TypeVar("Raised", bound="PipegradError")


class PipegradError(Exception):
    """Base class of all errors that pipegrad raises on purpose.

    Attributes:
        follows: True if another rank failed or did not come. This error is then not the cause.
        has_lost: True if a rank lost the connection to another one. Then no step can follow.
        is_everyones: True if all ranks that came raise it. Then none of them waits for this one.
    """

    follows: bool = False
    has_lost: bool = False
    is_everyones: bool = False


class TopologyError(PipegradError, ValueError):
    """Ranks, stages and mesh dimensions do not fit together."""


class PlanError(PipegradError, ValueError):
    """Gradients cannot be reduced as configured. Names parameter, handler and ranks."""


class ScheduleError(PipegradError, ValueError):
    """Actions of a schedule are missing, doubled or never possible. The message has the grid."""


class ConfigError(PipegradError, ValueError):
    """A configuration cannot be used. Names file, key and value, and the accepted values."""


class WeightsError(PipegradError, ValueError):
    """Weights cannot be read, made or written. Names the path and the tensor."""


class CheckpointError(WeightsError):
    """A checkpoint cannot be written, read or resumed. Names the folder."""


class StepError(PipegradError, RuntimeError):
    """Methods of a step were called in a wrong order, or a gradient changed after it was final."""


class AgreementError(PipegradError, RuntimeError):
    """Ranks disagree, or a rank failed or did not come. All ranks raise the same message.

    Attributes:
        absent: The ranks that did not come.
        began: When this rank itself failed, in seconds since the epoch; None if others did.
    """

    absent: tuple[int, ...] = ()
    began: float | None = None


class MessageError(PipegradError, ValueError):
    """A message between ranks cannot be written or read, or another program has written it."""


class ReduceError(PipegradError, RuntimeError):
    """A collective failed. Names bucket and ranks; if a peer failed, it has the peer's message."""


class StallError(PipegradError, TimeoutError):
    """A rank failed for good, or did not go on in time. Names it, and the work of each rank."""


class DriftError(ReduceError):
    """Copies of a parameter differ. Names parameters and ranks, the same on every rank."""


class OrderError(PipegradError, RuntimeError):
    """Two accesses to one memory are not ordered. Names both, their call sites, and the wait."""


class PluginError(PipegradError):
    """A plug-in could not be used. Names plug-in, distribution and version."""


class PluginNotFoundError(PluginError, LookupError):
    """No plug-in has this name. Lists the known names, the closest first."""


class PluginOptionError(PluginError, ValueError):
    """A plug-in got an unknown option, or lacks a required one."""


def following(error: Raised) -> Raised:
    """Returns an error, marked as one that another rank has caused."""
    error.follows = True
    return error


def said(error: BaseException) -> str:
    """Returns the message of any error, not longer than a screen."""
    try:
        words = str(error)
    except Exception as broken:  # noqa: BLE001 - it is code of others
        words = f"its words cannot be made: {type(broken).__name__}"
    return shortened(words, _MOST_CHARACTERS)


def root_of(error: BaseException) -> BaseException:
    """Returns the first error of a chain of ``raise ... from``."""
    # Take the first error, because torch wraps an error in others and the first has the reason.
    return [*causes_of(error)][-1]


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yields an error, then each cause in its chain of ``raise ... from``."""
    # Stop at an error that was seen, because code of others may close a chain to a ring: by
    # `raise inner from outer` where inner was the cause of outer.
    seen = set[int]()
    behind: BaseException | None = error
    while behind is not None and id(behind) not in seen:
        yield behind
        seen.add(id(behind))
        behind = behind.__cause__


def ends_in_words(error: BaseException) -> bool:
    """True if a rank replaces this error by an error of pipegrad.

    A SystemExit would end the process without a message, perhaps even with code 0. Requests of the
    caller or the user (KeyboardInterrupt, asyncio's CancelledError) are raised unchanged.
    """
    return isinstance(error, (Exception, SystemExit))


def reason(error: BaseException) -> str:
    """Returns the message of an error of a file, without number and path. Callers name the path."""
    return getattr(error, "strerror", None) or str(error)


def in_words(error: BaseException) -> str:
    """Returns the message of an error; for other libraries' errors also the place of its origin.

    The place is the innermost line of the user.
    """
    if isinstance(error, PipegradError):
        return str(error)
    locations = [
        f" ({Path(frame.filename).name}:{frame.lineno})"
        for frame in traceback.extract_tb(error.__traceback__)
        if is_of_user(frame.filename)
    ]
    try:
        # The `repr` of this one has all that could not be decoded.
        words = repr(error) if not isinstance(error, UnicodeError) else named(error)
    except Exception:  # noqa: BLE001 - it is code of others
        words = named(error)
    return f"{shortened(words, _MOST_CHARACTERS)}{locations[-1] if locations else ''}"


def named(error: BaseException) -> str:
    """Returns the class and the message of any error."""
    return f"{type(error).__name__}: {said(error)}"


def refuse(error: type[PipegradError], reasons: Mapping[str, object]) -> None:
    """Raises an error with the first reason that holds.

    Args:
        error: The class of the error.
        reasons: Each with a value that is true if it holds.
    """
    for reason, holds in reasons.items():
        if holds:
            raise error(reason)


def is_of_user(file: str) -> bool:
    """True if a file is the user's.

    It is not pipegrad's, a built-in plug-in's, torch's, click's, nor of Python's standard library.
    Errors name a line of a user's file, because a user looks for a mistake there.
    """
    is_pythons = file.startswith(_PYTHON) and "-packages" not in file
    return not is_pythons and not any(part in file for part in _SKIPPED)


def level_of_caller() -> int:
    """Returns the number of calls between a warning here and the code that called pipegrad."""
    level, frame = 0, inspect.currentframe()
    while frame is not None and frame.f_globals["__name__"].partition(".")[0] in _NOT_THE_CALLER:
        level, frame = level + 1, frame.f_back
    return level
