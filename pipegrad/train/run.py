"""Run: the steps of a run, what is written between them, what people see, and how it ends."""

from __future__ import annotations

import json
import platform
import signal
import statistics
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from pipegrad import run_files
from pipegrad.errors import DriftError, PipegradError, in_words
from pipegrad.plugins.registry import redacted
from pipegrad.simulation.explain.breakdown import break_down
from pipegrad.simulation.explain.lookup import Lookup
from pipegrad.simulation.timeline import Timeline
from pipegrad.train.config import Config
from pipegrad.train.job import Job
from pipegrad.train.process import exit_code
from pipegrad.train.rendering import rendered_breakdown, table
from pipegrad.train.reporters.reporter import StepMetrics
from pipegrad.train.run_folder import MANIFEST, with_launch
from pipegrad.train.trainer import Trainer

_KEPT_STEPS = 1000


def run(trainer: Trainer, report: Report) -> int:
    """Makes the steps of a run; every rank must call it. Returns the exit code of the process.

    It is 0, or that of the signal by which the run was ended.

    Raises:
        PipegradError: If a step fails, the last checkpoint cannot be written, or replicas differ.
    """
    is_first_rank = dist.get_rank() == 0
    folder = _make_folder(trainer, report)
    trainer.saving.begin_run(folder, report.note)
    with (
        trainer.signals,
        trainer.tracing,
        report.running() if is_first_rank else nullcontext(),
    ):
        last = _make_steps(trainer, report)
        saved = _save_last(trainer, last)
    if last < trainer.job.config.train.steps:
        if is_first_rank:
            report.note(_stopped(trainer, folder, last, saved))
        return exit_code(trainer.ended_by)
    _end(trainer, report, folder)
    return 0


def _make_folder(trainer: Trainer, report: Report) -> Path:
    """Returns the folder of the run, with its manifest and open reporters."""
    manifest = manifest_of(trainer.job.config, trainer.summary)

    def begin(folder: Path) -> None:
        noted = with_launch(
            folder,
            manifest,
            launch=trainer.launch,
            first_step=trainer.first_step,
            checkpoint=trainer.checkpoint,
        )
        report.begin(folder, noted, trainer.first_step)

    return trainer.make_folder(begin)


def _make_steps(trainer: Trainer, report: Report) -> int:
    """Makes steps until all are made, or until a signal has come; returns the last one's number."""
    train, is_first_rank = trainer.job.config.train, dist.get_rank() == 0
    for step in range(trainer.first_step, train.steps + 1):
        metrics = trainer.step(step)
        if is_first_rank:
            report.step(metrics)
        if step == train.steps or trainer.ended_by:
            return step
        if train.saves_after(step):
            trainer.saving.begin(step)
    return trainer.first_step - 1


def _save_last(trainer: Trainer, last: int) -> Path | None:
    """Writes the checkpoint of the last step; returns its folder, None if none is written."""
    trainer.tracing.stop()
    if not trainer.job.config.train.save:
        return None
    if last < trainer.first_step:  # no step was made, so there is nothing new
        return trainer.checkpoint
    return trainer.saving.finish(last)


def _stopped(trainer: Trainer, folder: Path, last: int, saved: Path | None) -> str:
    """Returns the line of a run that a signal has ended."""
    name = signal.Signals(trainer.ended_by).name
    if saved is None:
        return f"stopped by {name} after step {last}; nothing is saved, as train.save = false"
    return (
        f"stopped by {name} after step {last}; saved {saved}; go on with train.resume = '{folder}'"
    )


def _end(trainer: Trainer, report: Report, folder: Path) -> None:
    """Checks replicas, prints the summary, and writes what a whole run leaves."""
    config, is_first_rank = trainer.job.config, dist.get_rank() == 0
    if was_complete := trainer.first_step > config.train.steps:
        report.note(
            f"all {config.train.steps} steps are made already: {trainer.checkpoint}; for more, "
            f"set train.steps higher"
        )
    # The report is written first, even if copies differ. All ranks raise the same DriftError.
    drift = None
    try:
        trainer.sync.check_replicas()
    except DriftError as error:
        drift = error
    if is_first_rank and not was_complete:
        report.close(folder, trainer.summary["device"], "DIFFER" if drift else "bit-identical")
    if drift:
        raise drift
    if config.model.is_transformers:
        trainer.save_model(folder / "model")
    if was_complete:
        return
    # At last: a run that has made its steps and saved its model does not fail for its timeline.
    try:
        timeline = trainer.tracing.timeline()
        if is_first_rank and timeline is not None:
            path = folder / "timeline.json"
            timeline.save(path)
            report.break_down(timeline, path)
    except (PipegradError, OSError) as error:
        report.note(f"there is no timeline of this run: {in_words(error)}")


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
