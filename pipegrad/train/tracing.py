"""Tracing: records the last steps of a run, if its configuration or its environment asks for it."""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch.distributed as dist

from pipegrad.comm.agreement import agree, same
from pipegrad.errors import ConfigError
from pipegrad.observe.recording import record
from pipegrad.pipeline.scheduler import Scheduler
from pipegrad.simulation.timeline import Timeline
from pipegrad.train.config import Config

VARIABLE = "PIPEGRAD_TRACE"
FILE = "timeline.json"


class Tracing:
    """Records the steps of a run. All ranks make it together.

    The variable ``PIPEGRAD_TRACE`` is a folder for the file, or 1 for the run's own folder; 0 or
    nothing leaves it to ``train.trace``. All ranks must have the same.

    Raises:
        AgreementError: If the variable differs between ranks.
        ConfigError: If its folder cannot be made; on all ranks.
    """

    def __init__(self, config: Config, scheduler: Scheduler) -> None:
        value = os.environ.get(VARIABLE, "")
        self._folder = None if value in ("", "0", "1") else Path(value)
        same(VARIABLE, dict(enumerate(agree(VARIABLE, partial(_checked, value, self._folder)))))
        self._open = ExitStack()
        is_wanted = config.train.trace or value not in ("", "0")
        self._recording = self._open.enter_context(record(scheduler)) if is_wanted else None

    def timeline(self) -> Timeline | None:
        """Ends the recording; returns its timeline, None if nothing was recorded.

        Every rank must call it.
        """
        self._open.close()
        return None if self._recording is None else self._recording.timeline()

    def save(self, timeline: Timeline, folder: Path) -> Path:
        """Writes a timeline into a folder, or into that of the variable; returns the file."""
        path = (self._folder or folder) / FILE
        timeline.save(path)
        return path


def _checked(value: str, folder: Path | None) -> str:
    """Returns the variable. Rank 0 makes its folder, before a run of hours and not after it."""
    if folder is not None and dist.get_rank() == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{VARIABLE} is {value!r}, a folder that cannot be made: {error}"
            ) from error
    return value
