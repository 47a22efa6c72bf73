"""Run: the steps of a run, what is written between them, what people see, and how it ends."""

from __future__ import annotations

import json
import platform
import signal
import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from pipegrad import run_files
from pipegrad.errors import CheckpointError, DriftError, PipegradError, in_words
from pipegrad.plugins.registry import redacted
from pipegrad.simulation.explain.explanation import explain
from pipegrad.simulation.explain.sentence import sentence
from pipegrad.simulation.timeline import Timeline, in_time
from pipegrad.tables import table
from pipegrad.train.config import Config, path_of
from pipegrad.train.job import Job
from pipegrad.train.process import exit_code
from pipegrad.train.reporters.reporter import StepMetrics
from pipegrad.train.run_folder import MANIFEST
from pipegrad.train.trainer import Trainer

_KEPT_STEPS = 1000
_BETWEEN = ("eval.every", "eval.sample_every", "train.save_every")
_FUSED = ("Adagrad", "Adam", "AdamW", "SGD")  # classes of torch.optim that have it on CPU, too


def run(trainer: Trainer, report: Report) -> int:
    """Makes the steps of a run; every rank must call it. Returns the exit code of the process.

    It is 0, or that of the signal by which the run was ended.

    Raises:
        PipegradError: If a step fails, the last checkpoint cannot be written, or replicas differ.
    """
    is_first_rank = dist.get_rank() == 0
    manifest = manifest_of(trainer.job.config, trainer.summary)
    folder = trainer.make_folder(lambda new: report.begin(new, manifest, trainer.first_step))
    if is_first_rank:
        report.note(_begins(trainer, folder))
    trainer.saving.folder, trainer.saving.note = folder, report.note
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


def _begins(trainer: Trainer, folder: Path) -> str:
    """Returns where a run writes, and why not where the user said."""
    if trainer.first_step > 1:
        return f"writes into {folder}, from step {trainer.first_step} on"
    output = path_of(trainer.job.config.train.output)
    is_other = folder.name != output.resolve().name
    return f"writes into {folder}{f': {output} is there already' if is_other else ''}"


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
            trainer.saving.save(step)
    return trainer.first_step - 1


def _save_last(trainer: Trainer, last: int) -> Path | None:
    """Writes the checkpoint of the last step; returns its folder, None if none is written."""
    trainer.tracing.stop()
    if not trainer.job.config.train.save:
        return None
    if last < trainer.first_step:  # no step was made, so there is nothing new
        return trainer.checkpoint
    try:
        return trainer.saving.save(last, wait=True)
    except CheckpointError as error:
        trainer.job.config.refuse(
            "train.output",
            f"the last checkpoint of this run is lost: {error}. Go on with train.resume from the "
            f"last checkpoint that is whole",
            cause=error,
        )


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
    # All ranks raise the same DriftError. What people see of the run is printed before.
    try:
        trainer.sync.check_replicas()
    except DriftError:
        if is_first_rank and not was_complete:
            report.close(folder, trainer.summary, "DIFFER")
        raise
    if config.model.is_transformers:
        trainer.save_model(folder / "model")
    if was_complete:
        return
    # At last: a run that has made its steps and saved its model does not fail for its timeline.
    timeline = None
    try:
        timeline = trainer.tracing.timeline()
    except (PipegradError, OSError) as error:
        report.note(f"there is no timeline of this run: {in_words(error)}")
    if is_first_rank:
        replicas = "equal, bit by bit" if trainer.summary["replicas"] > 1 else None
        report.close(folder, trainer.summary, replicas, timeline)


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
            manifest: Of a new run; one that goes on has its own.
            first_step: Number of the first step.

        Raises:
            OSError: If a reporter cannot write there. No reporter is open then.
        """
        if not (folder / MANIFEST).exists():
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

    def close(
        self,
        folder: Path,
        summary: Mapping[str, Any],
        replicas: str | None,
        timeline: Timeline | None = None,
    ) -> None:
        """Prints the end of a run: a sentence on its steps, a table, and where the rest is.

        Args:
            folder: Folder of the run's files. It gets the timeline.
            summary: Of the job.
            replicas: Result of `check_replicas` at the end; None if there are none.
            timeline: Of the last steps; None if they were not recorded.
        """
        first, last = self._first, self._last[-1]
        assert first is not None
        # The first steps make communicators and fill caches. So times are taken from the second
        # half of the run, or from the last steps that are kept.
        later = list(self._last)[-(self._num_steps - self._num_steps // 2) :]
        seconds = statistics.median(m.step_seconds for m in later)
        if timeline is not None:
            self._explain(folder, _with_notes(timeline, self._config, summary, later))
        tokens = statistics.median(m.tokens_per_second for m in later)
        table_rows = {
            "loss": f"{first.loss:.4f} to {last.loss:.4f}, {self._num_steps} steps on "
            f"{summary['device']}",
            "a step": f"{in_time(seconds)}, {tokens:,.0f} tokens/s",
        }
        if replicas is not None:
            table_rows["replicas"] = replicas
        self._console.print(table(["run", ""], table_rows.items()))
        self.note(
            f"{folder} has {'metrics.jsonl, ' if 'jsonl' in self._reporters else ''}manifest.json"
            f"{f', checkpoint-{last.step}' if self._config.train.save else ''}"
            f"{', model' if self._config.model.is_transformers else ''}"
            f"{'' if timeline is None else f'; where a step went: pipegrad trace {folder}'}"
        )

    def _explain(self, folder: Path, timeline: Timeline) -> None:
        """Writes a timeline, and prints what makes a step long."""
        try:
            timeline.save(folder / "timeline.json")
            self.note(f"{sentence(explain(timeline))}")
        except (PipegradError, OSError) as error:
            self.note(f"there is no timeline of this run: {in_words(error)}")

    def note(self, text: str) -> None:
        """Prints a line."""
        self._console.print(text, soft_wrap=True)


def _with_notes(
    timeline: Timeline, config: Config, summary: Mapping[str, Any], steps: Sequence[StepMetrics]
) -> Timeline:
    """Returns a timeline with what its explanation needs to know of the run.

    Args:
        timeline: Of the last steps.
        config: The configuration.
        summary: Of the job.
        steps: More steps, which say how long they take, and how much that varies.
    """
    seconds = sorted(m.step_seconds for m in steps)
    middle, quarter = statistics.median(seconds), len(seconds) // 4
    elapsed = steps[-1].elapsed_seconds - steps[0].elapsed_seconds
    inside = sum(m.step_seconds for m in steps[1:])
    notes: dict[str, str | float] = {
        "step_seconds": middle,
        "noise": (seconds[-1 - quarter] - seconds[quarter]) / 2 / (middle or 1.0),
        "between_steps": max(0.0, 1 - inside / elapsed) if elapsed else 0.0,
        "value_bytes": 4 if config.train.precision == "fp32" else 2,
        "optimizer": _of_optimizer(config),
    }
    between = [key for key in _BETWEEN if config.flat().get(key) is not None]
    if between:
        notes["between"] = f"what {' and '.join(between)} take"
    if config.data.dataset is None:
        notes["rows"] = config.data.batch_size // summary["data"]
    else:
        notes["batch"] = "let data.dataset load in other processes, as a DataLoader's num_workers"
    if config.data.streaming:
        notes["batch"] = "set data.streaming = false"
    if config.gradients.reduce_dtype is not None:
        notes["reduce_dtype"] = config.gradients.reduce_dtype
    return replace(timeline, notes={**timeline.notes, **notes})


def _of_optimizer(config: Config) -> str:
    optimizer = config.optimizer
    if optimizer.name in _FUSED and not optimizer.options.get("fused"):
        return "try optimizer.fused = true"
    return "more rows a step need it less often"
