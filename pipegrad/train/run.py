"""Run: the steps of a run, what is written between them, and how it ends."""

from __future__ import annotations

import signal
from contextlib import nullcontext
from pathlib import Path

import torch.distributed as dist

from pipegrad.errors import DriftError, PipegradError, in_words
from pipegrad.train.process_end import exit_code
from pipegrad.train.reporters.report import Report, manifest_of
from pipegrad.train.run_folder import with_launch
from pipegrad.train.trainer import Trainer


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
            report.break_down(timeline, trainer.tracing.save(timeline, folder))
    except (PipegradError, OSError) as error:
        report.note(f"there is no timeline of this run: {in_words(error)}")
