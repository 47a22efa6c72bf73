"""Tracing: records the last steps of a run, unless its configuration or environment says no."""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Self

import torch.distributed as dist

from pipegrad.comm.agreement import agree, same
from pipegrad.errors import ConfigError, reason
from pipegrad.observe.recording import Recording, record
from pipegrad.pipeline.scheduler import Scheduler
from pipegrad.simulation.timeline import Timeline
from pipegrad.train.config import Config

VARIABLE = "PIPEGRAD_TRACE"
FILE = "timeline.json"


class Tracing:
    """Records the steps that a run makes inside of ``with tracing``. All ranks make and enter it.

    ``train.trace`` decides, unless the variable ``PIPEGRAD_TRACE`` is set: 0 records nothing, 1
    records into the run's own folder, and all else is another folder. All ranks must have the same.

    Raises:
        AgreementError: If the variable differs between ranks.
        ConfigError: If its folder cannot be made; on all ranks.
    """

    def __init__(self, config: Config, scheduler: Scheduler) -> None:
        value = os.environ.get(VARIABLE, "")
        self._folder = None if value in ("", "0", "1") else Path(value)
        same(VARIABLE, dict(enumerate(agree(VARIABLE, partial(_checked, value, self._folder)))))
        self._is_wanted = value != "0" if value else config.train.trace
        self._scheduler = scheduler
        self._open = ExitStack()
        self._recording: Recording | None = None

    def __enter__(self) -> Self:
        if self._is_wanted:
            self._recording = self._open.enter_context(record(self._scheduler))
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends the recording on this rank, after the last step."""
        self._open.close()

    def timeline(self) -> Timeline | None:
        """Returns what the first pipeline recorded; None on other ranks, or if nothing was.

        All ranks of the first pipeline must call it.

        Raises:
            PipegradError: If clocks or recordings cannot be read; on all its ranks.
        """
        topology = self._scheduler.topology
        if topology.rank not in topology.one_replica:
            return None
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
                f"{VARIABLE} is {value!r}, a folder that cannot be made: {reason(error)}"
            ) from error
    return value
