"""Report: runs the reporters of a run; writes ``manifest.json`` and prints the summary."""

from __future__ import annotations

import json
import platform
import statistics
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from pipegrad import run_files
from pipegrad.errors import in_words
from pipegrad.plugins.secrets import redacted
from pipegrad.simulation.explain.breakdown import break_down
from pipegrad.simulation.explain.lookup import Lookup
from pipegrad.simulation.timeline import Timeline
from pipegrad.train.config import Config
from pipegrad.train.job import Job
from pipegrad.train.metrics import StepMetrics
from pipegrad.train.rendering import rendered_breakdown
from pipegrad.train.run_folder import MANIFEST
from pipegrad.train.tables import table

_KEPT_STEPS = 1000


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
    """Gives every step of a run to the reporters at once, so nothing is lost if the run fails.

    Args:
        console: Where the summary is printed, and which reporter has failed.
        job: Has the configuration and the reporters.
    """

    def __init__(self, console: Console, job: Job) -> None:
        self._console = console
        self._config = job.config
        self._reporters = {name: resolved.plugin for name, resolved in job.reporters.items()}
        # A run may have millions of steps. So the summary is of the last ones.
        self._first: StepMetrics | None = None
        self._last = deque[StepMetrics](maxlen=_KEPT_STEPS)
        self._num_steps = 0

    def begin(self, folder: Path, manifest: Mapping[str, Any], first_step: int = 1) -> None:
        """Writes the manifest into a folder, and opens the reporters there.

        Args:
            folder: The run's folder.
            manifest: Is written whole, or not at all.
            first_step: Number of the first step.

        Raises:
            OSError: If a reporter cannot write there. No reporter is open then.
        """
        # What redaction does not know as a secret is for nobody else either.
        content = f"{json.dumps(manifest, indent=2)}\n".encode()
        run_files.replace(folder / MANIFEST, content, permissions=0o600)
        with ExitStack() as opened:
            for reporter in self._reporters.values():
                reporter.first_step = first_step
                reporter.open(folder, self._config)
                opened.callback(reporter.close)
            self._open = opened.pop_all()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Closes the reporters when the run ends or fails."""
        with self._open:
            yield

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

    def close(self, folder: Path, device: str, replicas: str) -> None:
        """Prints the summary.

        Args:
            folder: Folder of the run's files.
            device: Kind of device that the ranks trained on.
            replicas: Result of `check_replicas` at the end.
        """
        first, last = self._first, self._last[-1]
        assert first is not None
        # The first steps make communicators and fill caches. So times are taken from the second
        # half of the run, or from the last steps that are kept.
        later = list(self._last)[-(self._num_steps - self._num_steps // 2) :]
        seconds = statistics.median(m.step_seconds for m in later)
        exposed = statistics.median(m.exposed_seconds for m in later)
        table_rows = {
            "steps": f"{self._num_steps} on {device}",
            "loss": f"{first.loss:.4f} to {last.loss:.4f}",
            "step": f"{seconds * 1e3:.1f} ms (median), {exposed * 1e3:.1f} ms of it exposed",
            "tokens a second": f"{statistics.median(m.tokens_per_second for m in later):,.0f}",
            "a step reduces": f"{last.bytes_reduced / 2**20:.2f} MiB in {last.collectives} "
            f"collectives, all ranks counted",
            "replicas": replicas,
            "files": f"{folder}/{'metrics.jsonl, ' if 'jsonl' in self._reporters else ''}"
            f"manifest.json{f', checkpoint-{last.step}' if self._config.train.save else ''}"
            f"{', model' if self._config.model.is_transformers else ''}",
        }
        self._console.print(table(["run", ""], table_rows.items()))

    def note(self, text: str) -> None:
        """Prints a line."""
        self._console.print(text, soft_wrap=True)

    def break_down(self, timeline: Timeline, path: Path) -> None:
        """Prints where the shortest of the recorded steps went.

        Others may have an evaluation or a checkpoint behind them.

        Args:
            timeline: What was recorded.
            path: The file that has it.
        """
        lookup = Lookup(timeline)
        steps = range(len(timeline.step_ends))
        seconds = [end - begin for begin, end in map(lookup.step, steps)]
        breakdown = break_down(lookup, seconds.index(min(seconds)))
        title = f"the shortest of the last {len(steps)} steps"
        for part in rendered_breakdown(breakdown, title):
            self._console.print(part, soft_wrap=isinstance(part, str))
        self._console.print(f"why, and what would help: pipegrad trace {path}", soft_wrap=True)
