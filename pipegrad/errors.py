"""The whole error tree. A message says what was found, what was expected and what to do."""

from __future__ import annotations

import os
import traceback
from pathlib import Path


class PipegradError(Exception):
    """Anything pipegrad raises on purpose."""


class TopologyError(PipegradError, ValueError):
    """Ranks, stages and mesh dimensions do not fit together."""


class PlanError(PipegradError, ValueError):
    """These gradients cannot be reduced as asked: names parameter, handler and ranks."""


class ScheduleError(PipegradError, ValueError):
    """Actions of a schedule are missing, doubled or never possible; the message holds the grid."""


class ConfigError(PipegradError, ValueError):
    """A configuration cannot be used: names file, key and value, and says what would do."""


class StepError(PipegradError, RuntimeError):
    """The verbs of a step were called out of order, or a gradient changed after it was final."""


class AgreementError(PipegradError, RuntimeError):
    """Ranks disagree, or one of them failed or stayed away; raised alike on every rank."""


class ReduceError(PipegradError, RuntimeError):
    """A collective failed; carries bucket, process group ranks and, for a peer, its own words."""


class DriftError(ReduceError):
    """Copies of a parameter differ; names parameters and ranks, alike on every rank."""


class OrderError(PipegradError, RuntimeError):
    """Two accesses to one memory are left to luck; names both, their call sites, and the wait."""


class PluginError(PipegradError):
    """A plug-in could not be used: names plug-in, distribution and version."""


class PluginNotFoundError(PluginError, LookupError):
    """No plug-in has this name; lists the known names and the close ones."""


class PluginConflictError(PluginError, ValueError):
    """Two plug-ins claim one name; shows both and how to pick one."""


class PluginLoadError(PluginError, ImportError):
    """The plug-in's import failed; other plug-ins stay usable."""


class PluginContractError(PluginError, TypeError):
    """The loaded object is not what its entry-point group asks for."""


class PluginOptionError(PluginError, ValueError):
    """A plug-in was given an unknown option, or not given one it needs."""


def root_of(error: BaseException) -> BaseException:
    """Returns the error that the first ``raise ... from`` of a chain came from."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def ends_in_words(error: BaseException) -> bool:
    """Whether the rank concerned raises an error of pipegrad's own in the place of this one.

    A SystemExit would end the process without a word, and with code 0 where it says so. What the
    caller or the user asked for (KeyboardInterrupt, asyncio's CancelledError) is raised as it is.
    """
    return isinstance(error, (Exception, SystemExit))


def in_words(error: BaseException) -> str:
    """Returns what an error says; of somebody else's also where: innermost, outside of torch."""
    if isinstance(error, PipegradError):
        return str(error)
    ours = (
        f"{os.sep}torch{os.sep}",
        f"{Path(__file__).parent}{os.sep}",
        f"{os.sep}importlib{os.sep}",
    )
    places = [
        f" ({Path(frame.filename).name}:{frame.lineno})"
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<") and not any(part in frame.filename for part in ours)
    ]
    return f"{error!r}{places[-1] if places else ''}"
