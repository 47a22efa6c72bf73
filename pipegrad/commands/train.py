"""`pipegrad train`: trains what a configuration describes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from pipegrad.commands.options import configured, print_parts, usage_errors, wants_traceback
from pipegrad.errors import StepError, in_words

if TYPE_CHECKING:
    from pipegrad.train.config import Config

_INTERRUPTED = 130  # the exit code of a shell for SIGINT


@click.command()
@configured
@click.option("--dry-run", is_flag=True, help="Set everything up, print the plan, and exit.")
def train(loaded: Callable[[], Config], dry_run: bool) -> None:
    """Train what CONFIG describes: alone, or on the ranks of torchrun.

    torchrun --nproc-per-node 4 -m pipegrad train CONFIG
    """
    import torch.distributed as dist

    from pipegrad.train.process import process_group
    from pipegrad.train.process_end import fail
    from pipegrad.train.run import Report, run
    from pipegrad.train.tables import make_console
    from pipegrad.train.trainer import Trainer

    with usage_errors(), process_group():
        console = make_console(quiet=dist.get_rank() != 0)
        code, trainer = 0, None
        try:
            trainer = Trainer(loaded)
            print_parts(console, trainer.notes)
            if dry_run:
                print_parts(console, trainer.printed_summary())
            else:
                code = run(trainer, Report(console, trainer.job))
        except KeyboardInterrupt:
            has_folder = trainer is not None and trainer.folder is not None
            where = "the run's folder has what was saved" if has_folder else "before the first step"
            console.print(f"stopped; {where}")
            sys.exit(_INTERRUPTED)
        # A model or plug-in raises SystemExit; pipegrad's own are not in `try`.
        except (Exception, SystemExit) as error:  # noqa: BLE001 - code of the user, too
            failure = _in_place_of(error) if isinstance(error, SystemExit) else error
            folder = None if trainer is None else trainer.folder
            sys.exit(fail(failure, folder, shows_traceback=wants_traceback()))
        trainer.close()
        if code:  # of a signal
            sys.exit(code)


def _in_place_of(error: SystemExit) -> StepError:
    """Returns an error that stands for an exit, with its traceback."""
    instead = StepError(
        f"the run was ended by {in_words(error)}: no model, handler or plug-in may do that"
    )
    return instead.with_traceback(error.__traceback__)
