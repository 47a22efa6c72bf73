"""What people see of a run: progress, ``metrics.jsonl``, ``manifest.json``, and a summary."""

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
from pipegrad.train.tables import table
from pipegrad.train.trainer import StepMetrics


def manifest_of(config: Config, outline: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a run was: versions, configuration, handlers with their versions, the plan."""
    return {
        "pipegrad": metadata.version("pipegrad"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "config": config.model_dump(mode="json"),
        **outline,
    }


class Report:
    """Shows and writes every step of a run, as it comes: nothing is lost if the run fails.

    Args:
        console: Where to; a bar if it is a terminal, else a line now and then.
        config: For the number of steps, and of steps between lines.
    """

    def __init__(self, console: Console, config: Config) -> None:
        self._console = console
        self._config = config
        self._metrics: list[StepMetrics] = []

    def begin(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        """Writes the manifest into a folder, and opens the file of metrics there."""
        (folder / "manifest.json").write_text(f"{json.dumps(manifest, indent=2)}\n")
        self._folder = folder
        self._lines = (folder / "metrics.jsonl").open("xb", buffering=0)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Takes steps until the run ends or fails."""
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
        """Takes a step."""
        self._metrics.append(metrics)
        self._write(metrics)
        line = (
            f"loss {metrics.loss:.4f}  grad norm {metrics.grad_norm:.3f}  "
            f"{metrics.tokens_per_second:,.0f} tokens/s"
        )
        self._progress.update(self._task, completed=metrics.step, line=line)
        last = metrics.step == self._config.train.steps
        due = metrics.step == 1 or metrics.step % self._config.train.log_every == 0 or last
        if due and not self._console.is_terminal:
            self._console.print(f"step {metrics.step:5}  {line}", soft_wrap=True)

    def _write(self, metrics: StepMetrics) -> None:
        """Writes a line of metrics, or none: the run goes on without, if they cannot be written."""
        if self._lines.closed:
            return
        line, begin = f"{json.dumps(asdict(metrics))}\n".encode(), self._lines.tell()
        try:
            if self._lines.write(line) == len(line):
                return
            why = "no space left"
        except OSError as error:
            why = error.strerror or str(error)
        with self._lines, suppress(OSError):
            self._lines.truncate(begin)  # no half lines
        self._console.print(
            f"step {metrics.step}: {self._folder}/metrics.jsonl cannot be written: {why}; it ends "
            f"here, the run goes on",
            soft_wrap=True,
        )

    def close(self, folder: Path, device: str, replicas: str) -> None:
        """Prints the summary.

        Args:
            folder: Where the files are.
            device: Kind of device that the ranks trained on.
            replicas: What `check_replicas` said at the end.
        """
        first, last, half = self._metrics[0], self._metrics[-1], len(self._metrics) // 2
        later = self._metrics[half:]  # the first steps make communicators and caches
        seconds = statistics.median(m.step_seconds for m in later)
        exposed = statistics.median(m.exposed_seconds for m in later)
        rows = {
            "steps": f"{len(self._metrics)} on {device}",
            "loss": f"{first.loss:.4f} to {last.loss:.4f}",
            "step": f"{seconds * 1e3:.1f} ms (median), {exposed * 1e3:.1f} ms of it exposed",
            "tokens a second": f"{statistics.median(m.tokens_per_second for m in later):,.0f}",
            "a step reduces": f"{last.bytes_reduced / 2**20:.2f} MiB in {last.collectives} "
            f"collectives, all ranks counted",
            "replicas": replicas,
            "files": f"{folder}/metrics.jsonl, manifest.json",
        }
        self._console.print(table(["run", ""], rows.items()))
