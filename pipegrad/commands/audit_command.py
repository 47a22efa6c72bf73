"""`pipegrad audit`: compares the gradients of a pipeline with the gradients of one process."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from pipegrad import run_files
from pipegrad.commands.command_options import Number, explained, wants_traceback
from pipegrad.errors import PipegradError, in_words, reason
from pipegrad.printable import printable_lines

if TYPE_CHECKING:
    from pipegrad.audit.report import Report
    from pipegrad.audit.script import Run

_CANNOT_RUN = 2
_LIBRARY = re.compile(r"/torch/|/pipegrad/|<frozen|/importlib/")


@click.command()
@click.argument("target", metavar="FILE.py:FUNCTION")
@click.option(
    "-n",
    "--ranks",
    "num_ranks",
    type=click.IntRange(min=1, max=256),
    default=4,
    show_default=True,
    help="Ranks to start on this machine; torchrun starts its own.",
)
@click.option("--steps", type=click.IntRange(min=1), help="Steps to compare; by default all.")
@click.option(
    "--tolerance",
    type=Number(min=0.0, min_open=True),
    help="Relative error of a gradient that is allowed; by default it is derived.",
)
@click.option(
    "--variant",
    "variants",
    multiple=True,
    metavar="NAME",
    help="Compare this one of the audit's variants; repeat for several. By default all.",
)
@click.option(
    "--timeout",
    "timeout_seconds",
    type=Number(min=1.0),
    default=600.0,
    show_default=True,
    help="Seconds until ranks that did not end are killed, with their stacks.",
)
@click.option("--json", "json_file", type=Path, metavar="FILE", help="Save the report as JSON.")
def audit(
    *,
    target: str,
    num_ranks: int,
    steps: int | None,
    tolerance: float | None,
    variants: tuple[str, ...],
    timeout_seconds: float,
    json_file: Path | None,
) -> None:
    """Compare a pipeline's training step with one process, and report defects.

    The function runs on every rank and returns a pipegrad.Audit. The exit code is 0 if everything
    is right, 1 if something is wrong, and 2 if the audit could not be run.

    torchrun --nproc-per-node 4 -m pipegrad audit FILE.py:FUNCTION runs it in torchrun's ranks.
    """
    from pipegrad.audit.script import Run

    run = Run(target, steps, tolerance, variants)
    if {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        _in_torchrun(run, timeout_seconds, json_file)
    try:
        report = run.in_ranks(num_ranks, timeout_seconds)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - code of the user, too
        _refuse(error)
    _show(report, json_file)


def _in_torchrun(run: Run, timeout_seconds: float, json_file: Path | None) -> NoReturn:
    """Runs the audit in the ranks of torchrun. The first one prints."""
    import torch.distributed as dist

    from pipegrad.comm.agreement import once_a_machine
    from pipegrad.train.process import process_group

    with process_group(timeout_seconds):
        try:
            report = run.here()
        except Exception as error:
            explained(error)
            # Errors of pipegrad are equal on all ranks, or name their rank.
            rank = "" if isinstance(error, PipegradError) else f"rank {dist.get_rank()}: "
            message = printable_lines(f"Error: {rank}{in_words(error)}")
            once_a_machine(lambda: click.echo(message, err=True))
            raise SystemExit(_CANNOT_RUN) from error
        if dist.get_rank() == 0:
            _show(report, json_file)
        raise SystemExit(0 if report.is_right else 1)


def _show(report: Report, json_file: Path | None) -> NoReturn:
    """Prints and saves a report; ends with its exit code."""
    click.echo(str(report))
    if json_file is not None:
        try:
            run_files.replace(json_file, report.as_json().encode())
        except OSError as error:
            _refuse(OSError(f"--json {json_file}: {reason(error)}"))
    raise SystemExit(0 if report.is_right else 1)


def _refuse(error: BaseException) -> NoReturn:
    """Prints an error; ends with the exit code of an audit that could not be run."""
    notes = getattr(error, "__notes__", [])
    text = explained(error)
    if not isinstance(error, PipegradError | TimeoutError | OSError):
        # The user's code failed on a rank: its traceback is a note.
        text = printable_lines(f"{type(error).__name__}: {error}{_of_user(*notes[:1])}")
        text += "" if wants_traceback() else " (--traceback prints all)"
    click.echo(f"Error: {text}", err=True)
    if isinstance(error, TimeoutError):
        click.echo(printable_lines("\n".join(notes)), err=True)
    raise SystemExit(_CANNOT_RUN) from error


def _of_user(note: str = "") -> str:
    """Returns the rank and the last line outside of torch and pipegrad of a rank's traceback."""
    rank = re.match(r"First failure on (rank \d+)", note)
    lines = re.findall(r'File "([^"]+)", line (\d+)', note)
    own = [f"{Path(file).name}:{line}" for file, line in lines if not _LIBRARY.search(file)]
    parts = [*([rank[1]] if rank else []), *own[-1:]]
    return f" ({', '.join(parts)})" if parts else ""
