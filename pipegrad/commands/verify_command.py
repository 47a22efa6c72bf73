"""`pipegrad verify`: do anybody's orders end, and does each value arrive?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from pipegrad.commands.command_options import AS_JSON, explained
from pipegrad.errors import PipegradError, reason
from pipegrad.printable import printable, printable_lines

if TYPE_CHECKING:
    from pipegrad.orders.verification import Communicators, Sends

_UNREADABLE = 2  # as of `pipegrad audit`


@click.command()
@click.argument("file", type=Path)
@click.option(
    "--sends",
    type=click.Choice(["rendezvous", "eager"]),
    default="rendezvous",
    show_default=True,
    help="When a send ends: when its receive has started, or at once.",
)
@click.option(
    "--communicators",
    type=click.Choice(["one", "pair", "edge"]),
    default="one",
    show_default=True,
    help="One for all transfers, for each two ranks, or for each direction between two ranks.",
)
@click.option(
    "--batched", is_flag=True, help="Transfers side by side start together, as in one group."
)
@AS_JSON
@click.option(
    "--html", "html_file", type=Path, metavar="FILE", help="Write the grid with the circle in it."
)
def verify(
    *,
    file: Path,
    sends: Sends,
    communicators: Communicators,
    batched: bool,
    as_json: bool,
    html_file: Path | None,
) -> None:
    """Prove that the orders in FILE end, or show which ranks wait for each other.

    FILE is a CSV with a line for each rank. Its cells are actions of torch, with transfers or
    without, instructions of DeepSpeed, or functions of Megatron's schedule. Nothing in it is run.
    The exit code is 0 if everything is right, 1 if something is wrong, and 2 if FILE cannot be
    read.
    """
    from pipegrad.orders import verify as verified

    try:
        verdict = verified(file, sends=sends, communicators=communicators, batched=batched)
    except PipegradError as error:
        _refuse(explained(error))
    click.echo(verdict.as_json() if as_json else printable_lines(str(verdict)))
    if html_file is not None:
        try:
            verdict.write_html(html_file)
        except (OSError, ValueError) as error:  # a path may be none
            _refuse(f"--html {html_file}: {reason(error)}")
        click.echo(printable(f"wrote {html_file}"), err=True)
    raise SystemExit(0 if verdict.is_right else 1)


def _refuse(message: str) -> NoReturn:
    click.echo(printable_lines(f"Error: {message}"), err=True)
    raise SystemExit(_UNREADABLE)
