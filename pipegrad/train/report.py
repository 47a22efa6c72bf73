"""Report: gives the steps of a run to its reporters, and prints its end."""

from __future__ import annotations

import json
import platform
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from pipegrad import run_files
from pipegrad.errors import PipegradError, in_words
from pipegrad.plugins.registry import redacted
from pipegrad.simulation.explain.explanation import explain
from pipegrad.simulation.explain.sentence import sentence
from pipegrad.simulation.timeline import Timeline, in_time
from pipegrad.tables import table
from pipegrad.train.config import Config
from pipegrad.train.job import Job
from pipegrad.train.reporters.reporter import StepMetrics
from pipegrad.train.run_folder import MANIFEST

_KEPT_STEPS = 1000
_BETWEEN = ("eval.every", "eval.sample_every", "train.save_every")
_FUSED = ("Adagrad", "Adam", "AdamW", "SGD")  # classes of torch.optim that have it on CPU, too


def manifest_of(config: Config, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the description of a run: versions, configuration, handlers, and the plan.

    It has no secrets; see `redacted`.
    """
    return {
        "pipegrad": metadata.version("pipegrad"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "config": redacted(config.model_dump(mode="json")),
        **summary,
    }


class Report:
    """Gives every step of a run to the reporters at once. Nothing is lost if the run fails.

    Attributes:
        running: Closes the reporters when the run ends or fails. `begin` makes it.
    """

    running: ExitStack

    def __init__(self, console: Console, job: Job) -> None:
        self._console = console
        self._config = job.config
        self._reporters = {name: resolved.plugin for name, resolved in job.reporters.items()}
        # The summary is of the last steps, because a run may have millions.
        self._first: StepMetrics | None = None
        self._last = deque[StepMetrics](maxlen=_KEPT_STEPS)
        self._num_steps = 0

    def begin(self, folder: Path, manifest: Mapping[str, Any], first_step: int = 1) -> None:
        """Writes the manifest into a folder, and opens the reporters there.

        Raises:
            OSError: If a reporter cannot write there. No reporter is open then.
        """
        if first_step == 1 or not (folder / MANIFEST).exists():
            # Only this user may read the file, because redaction may miss a secret.
            content = f"{json.dumps(manifest, indent=2)}\n".encode()
            run_files.replace(folder / MANIFEST, content, permissions=0o600)
        with ExitStack() as opened:
            for reporter in self._reporters.values():
                reporter.first_step = first_step
                reporter.open(folder, self._config)
                opened.callback(reporter.close)
            self.running = opened.pop_all()

    def step(self, metrics: StepMetrics) -> None:
        """Gives the metrics of a step to the reporters. The run goes on without one that fails."""
        self._first = self._first or metrics
        self._last.append(metrics)
        self._num_steps += 1
        for name, reporter in list(self._reporters.items()):
            try:
                reporter.report(metrics)
            except Exception as error:  # noqa: BLE001 - code of a plug-in, and a full disk
                del self._reporters[name]
                self._console.print(
                    f"step {metrics.step}: the reporter {name!r} ends here, the run goes on: "
                    f"{in_words(error)}",
                    soft_wrap=True,
                )

    def close(
        self,
        folder: Path,
        summary: Mapping[str, Any],
        replicas: str | None,
        timeline: Timeline | None = None,
    ) -> None:
        """Prints the end of a run: a sentence on its steps, a table, and where the rest is."""
        first, last = self._first, self._last[-1]
        assert first is not None
        # Take times from the second half of the run, or from the last steps that are kept, because
        # the first steps make communicators and fill caches.
        later = list(self._last)[-(self._num_steps - self._num_steps // 2) :]
        if timeline is not None:
            noted = _with_notes(timeline, self._config, summary, later)
            try:
                noted.save(folder / "timeline.json")
                self.note(f"{sentence(explain(noted))}")
            except (PipegradError, OSError) as error:
                self.note(f"there is no timeline of this run: {in_words(error)}")
        seconds = statistics.median(m.step_seconds for m in later)
        tokens = statistics.median(m.tokens_per_second for m in later)
        rows = {
            "loss": f"{first.loss:.4f} to {last.loss:.4f}, {self._num_steps} steps on "
            f"{summary['device']}",
            "a step": f"{in_time(seconds)}, {tokens:,.0f} tokens/s",
            "replicas": replicas,
        }
        self._console.print(table(["run", ""], [row for row in rows.items() if row[1]]))
        self.note(
            f"{folder} has {'metrics.jsonl, ' if 'jsonl' in self._reporters else ''}manifest.json"
            f"{f', checkpoint-{last.step}' if self._config.train.save else ''}"
            f"{', model' if self._config.model.is_transformers else ''}"
            f"{'' if timeline is None else f'; where a step went: pipegrad trace {folder}'}"
        )

    def note(self, text: str) -> None:
        """Prints a line."""
        self._console.print(text, soft_wrap=True)


def _with_notes(
    timeline: Timeline, config: Config, summary: Mapping[str, Any], steps: Sequence[StepMetrics]
) -> Timeline:
    """Returns a timeline with the facts of the run that its explanation needs."""
    seconds = sorted(m.step_seconds for m in steps)
    middle, quarter = statistics.median(seconds), len(seconds) // 4
    elapsed = steps[-1].elapsed_seconds - steps[0].elapsed_seconds
    inside = sum(m.step_seconds for m in steps[1:])
    is_fused = config.optimizer.name not in _FUSED or config.optimizer.options.get("fused")
    between = [key for key in _BETWEEN if config.flat()[key] is not None]
    notes: dict[str, str | float | None] = {
        "step_seconds": middle,
        "noise": (seconds[-1 - quarter] - seconds[quarter]) / 2 / (middle or 1.0),
        "between_steps": max(0.0, 1 - inside / elapsed) if elapsed else 0.0,
        "value_bytes": 4 if config.train.precision == "fp32" else 2,
        "optimizer": "more rows a step need it less often"
        if is_fused
        else "try optimizer.fused = true",
        "between": f"what {' and '.join(between)} take" if between else None,
        "rows": None if config.data.dataset else config.data.batch_size // summary["data"],
        "batch": "let data.dataset load in other processes, as a DataLoader's num_workers"
        if config.data.dataset
        else None,
        "reduce_dtype": config.gradients.reduce_dtype,
    }
    known = {name: value for name, value in notes.items() if value is not None}
    return replace(timeline, notes={**timeline.notes, **known})
