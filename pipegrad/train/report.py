"""Report: progress, ``metrics.jsonl``, ``manifest.json`` and the summary of a run."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pipegrad.train.config import Config
from pipegrad.train.metrics import StepMetrics
from pipegrad.train.tables import table


def manifest_of(config: Config, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the description of a run: versions, configuration, handlers, and the plan."""
    return {
        "pipegrad": metadata.version("pipegrad"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "config": config.model_dump(mode="json"),
        **summary,
    }


class Report:
    """Shows and writes every step of a run at once, so nothing is lost if the run fails.

    Args:
        console: Shows progress: a bar if it is a terminal, else a line every few steps.
        config: Has the number of steps, and of steps between lines.
    """

    def __init__(self, console: Console, config: Config) -> None:
        self._console = console
        self._config = config
        self._metrics: list[StepMetrics] = []

    def begin(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        """Writes the manifest into a folder, and opens the file of metrics there."""
        (folder / "manifest.json").write_text(f"{json.dumps(manifest, indent=2)}\n")
        self._folder = folder
        # Without a buffer each line is in the file when its step ends.
        self._lines = (folder / "metrics.jsonl").open("xb", buffering=0)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Shows progress until the run ends or fails."""
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=16),
            TimeRemainingColumn(),
            TextColumn("{task.fields[line]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        with self._lines, self._progress:
            self._task = self._progress.add_task("", total=self._config.train.steps, line="")
            yield

    def step(self, metrics: StepMetrics) -> None:
        """Shows and writes the metrics of a step."""
        self._metrics.append(metrics)
        self._write(metrics)
        line = (
            f"loss {metrics.loss:.4f}  grad norm {metrics.grad_norm:.3f}  "
            f"{metrics.tokens_per_second:,.0f} tokens/s"
        )
        self._progress.update(self._task, completed=metrics.step, line=line)
        last = metrics.step == self._config.train.steps
        is_due = metrics.step == 1 or metrics.step % self._config.train.log_every == 0 or last
        if is_due and not self._console.is_terminal:
            self._console.print(f"step {metrics.step:5}  {line}", soft_wrap=True)

    def _write(self, metrics: StepMetrics) -> None:
        """Writes a line of metrics. If that fails, the run goes on and the file ends here."""
        if self._lines.closed:
            return
        line, begin = f"{json.dumps(asdict(metrics))}\n".encode(), self._lines.tell()
        try:
            if self._lines.write(line) == len(line):
                return
            reason = "no space left"
        except OSError as error:
            reason = error.strerror or str(error)
        # A half line would make the whole file unreadable as JSON lines, so it is cut off.
        with self._lines, suppress(OSError):
            self._lines.truncate(begin)
        self._console.print(
            f"step {metrics.step}: {self._folder}/metrics.jsonl cannot be written: {reason}; it "
            f"ends here, the run goes on",
            soft_wrap=True,
        )

    def close(self, folder: Path, device: str, replicas: str) -> None:
        """Prints the summary.

        Args:
            folder: Folder of the run's files.
            device: Kind of device that the ranks trained on.
            replicas: Result of `check_replicas` at the end.
        """
        first, last, half = self._metrics[0], self._metrics[-1], len(self._metrics) // 2
        # The first steps make communicators and fill caches. So times are taken from the second
        # half of the run.
        later = self._metrics[half:]
        seconds = statistics.median(m.step_seconds for m in later)
        exposed = statistics.median(m.exposed_seconds for m in later)
        table_rows = {
            "steps": f"{len(self._metrics)} on {device}",
            "loss": f"{first.loss:.4f} to {last.loss:.4f}",
            "step": f"{seconds * 1e3:.1f} ms (median), {exposed * 1e3:.1f} ms of it exposed",
            "tokens a second": f"{statistics.median(m.tokens_per_second for m in later):,.0f}",
            "a step reduces": f"{last.bytes_reduced / 2**20:.2f} MiB in {last.collectives} "
            f"collectives, all ranks counted",
            "replicas": replicas,
            "files": f"{folder}/metrics.jsonl, manifest.json",
        }
        self._console.print(table(["run", ""], table_rows.items()))
