"""The reporter ``jsonl``: a line of JSON for each step."""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from pathlib import Path

from pipegrad import run_files
from pipegrad.train.config import Config
from pipegrad.train.reporters.reporter import Reporter, StepMetrics


class JsonLines(Reporter):
    """Writes ``metrics.jsonl`` into the run's folder, a line for each step; null is inf or nan."""

    def open(self, folder: Path, config: Config) -> None:
        # Without a buffer each line is in the file when its step ends. The file of a run that goes
        # on has the rows of the steps before.
        self._lines = os.fdopen(
            run_files.open_to_change(
                folder / "metrics.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT
            ),
            "ab",
            buffering=0,
        )

    def report(self, metrics: StepMetrics) -> None:
        row = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in metrics.known().items()
        }
        line, begin = f"{json.dumps(row, allow_nan=False)}\n".encode(), self._lines.tell()
        try:
            if self._lines.write(line) == len(line):
                return
            raise OSError("no space left")
        except OSError:
            # Cut a half line off, because it would make the whole file unreadable as JSON lines.
            with suppress(OSError):
                self._lines.truncate(begin)
            raise

    def close(self) -> None:
        self._lines.close()
