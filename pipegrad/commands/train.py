"""`pipegrad train`: trains what a configuration describes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import click

from pipegrad.commands.options import configured, print_parts, usage_errors
from pipegrad.errors import DriftError, PipegradError, ReduceError, in_words

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

    from pipegrad.comm.agreement import once_a_machine
    from pipegrad.train.process import process_group
    from pipegrad.train.reporters.report import Report
    from pipegrad.train.run import run
    from pipegrad.train.tables import make_console
    from pipegrad.train.trainer import Trainer

    with usage_errors(), process_group():
        console = make_console(quiet=dist.get_rank() != 0)
        code = 0
        try:
            trainer = Trainer(loaded)
            print_parts(console, trainer.notes)
            if dry_run:
                print_parts(console, trainer.printed_summary())
            else:
                code = run(trainer, Report(console, trainer.job))
        except KeyboardInterrupt:
            console.print("stopped; the run's folder holds what was done")
            sys.exit(_INTERRUPTED)
        except PipegradError as error:
            # A failed reduction has another message on each rank, so each rank prints its own.
            # Other errors are alike on all ranks, so one rank of each machine prints them.
            if isinstance(error, ReduceError) and not isinstance(error, DriftError):
                click.echo(f"Error on rank {dist.get_rank()}: {error}", err=True)
            else:
                once_a_machine(partial(click.echo, f"Error: {error}", err=True))
            sys.exit(1)
        except SystemExit as error:  # raised by a model or plug-in; pipegrad's own are not in `try`
            click.echo(f"Error on rank {dist.get_rank()}: {_exit_message(error)}", err=True)
            sys.exit(1)
        trainer.close()
        if code:  # of a signal
            sys.exit(code)


def _exit_message(error: SystemExit) -> str:
    return f"the run was ended by {in_words(error)}: no model, handler or plug-in may do that"
