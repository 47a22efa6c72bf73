"""`pipegrad train`: trains what a configuration describes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING

import click

from pipegrad.commands.options import configured, print_parts, usage_errors
from pipegrad.errors import DriftError, PipegradError, StepError, in_words

if TYPE_CHECKING:
    from pipegrad.train.config import Config
    from pipegrad.train.reporters.report import Report
    from pipegrad.train.trainer import Trainer

_INTERRUPTED = 130  # the exit code of a shell for SIGINT


@click.command()
@configured
@click.option("--dry-run", is_flag=True, help="Set everything up, print the plan, and exit.")
def train(loaded: Callable[[], Config], dry_run: bool) -> None:
    """Train what CONFIG describes: alone, or on the ranks of torchrun.

    torchrun --nproc-per-node 4 -m pipegrad train CONFIG
    """
    import torch.distributed as dist

    from pipegrad.train.last_words import fail
    from pipegrad.train.process import process_group
    from pipegrad.train.reporters.report import Report
    from pipegrad.train.tables import make_console
    from pipegrad.train.trainer import Trainer

    with usage_errors(), process_group():
        console = make_console(quiet=dist.get_rank() != 0)
        try:
            trainer = Trainer(loaded)
            print_parts(console, trainer.notes)
            if dry_run:
                print_parts(console, trainer.printed_summary())
            else:
                _run(trainer, Report(console, trainer.job))
        except KeyboardInterrupt:
            console.print("stopped; the run's folder holds what was done")
            sys.exit(_INTERRUPTED)
        except SystemExit as error:  # raised by a model or plug-in; pipegrad's own are not in `try`
            sys.exit(fail(_in_place_of(error), folder=None, shows_traceback=False))
        except Exception as error:  # noqa: BLE001 - code of the user, too
            sys.exit(fail(error, folder=None, shows_traceback=False))
        trainer.close()


def _in_place_of(error: SystemExit) -> StepError:
    return StepError(
        f"the run was ended by {in_words(error)}: no model, handler or plug-in may do that"
    )


def _run(trainer: Trainer, report: Report) -> None:
    import torch.distributed as dist

    from pipegrad.train.reporters.report import manifest_of

    config, is_first_rank = trainer.job.config, dist.get_rank() == 0
    folder = trainer.make_folder(
        lambda folder: report.begin(folder, manifest_of(config, trainer.summary))
    )
    with trainer.tracing, report.running() if is_first_rank else nullcontext():
        for step in range(trainer.first_step, config.train.steps + 1):
            metrics = trainer.step(step)
            if is_first_rank:
                report.step(metrics)
            if config.train.saves_after(step):
                trainer.save(folder / f"checkpoint-{step}", step)
    # The report is written first, even if copies differ. All ranks raise the same DriftError.
    drift = None
    try:
        trainer.sync.check_replicas()
    except DriftError as error:
        drift = error
    if is_first_rank:
        report.close(folder, trainer.summary["device"], "DIFFER" if drift else "bit-identical")
    if drift:
        raise drift
    if config.model.is_transformers:
        trainer.save_model(folder / "model")
    # At last: a run that has made its steps and saved its model does not fail for its timeline.
    try:
        timeline = trainer.tracing.timeline()
        if is_first_rank and timeline is not None:
            report.break_down(timeline, trainer.tracing.save(timeline, folder))
    except (PipegradError, OSError) as error:
        report.note(f"there is no timeline of this run: {in_words(error)}")
