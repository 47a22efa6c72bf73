"""Tracing: records the last steps of a run, if its configuration or its environment asks for it."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

from pipegrad.comm.agreement import agree, same
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
    """

    def __init__(self, config: Config, scheduler: Scheduler) -> None:
        value = os.environ.get(VARIABLE, "")
        same(VARIABLE, dict(enumerate(agree(VARIABLE, lambda: value))))
        self._folder = None if value in ("", "0", "1") else Path(value)
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
        folder = self._folder or folder
        folder.mkdir(parents=True, exist_ok=True)
        timeline.save(folder / FILE)
        return folder / FILE
