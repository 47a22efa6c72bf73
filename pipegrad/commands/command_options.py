"""Code of several commands: options, changed configurations, errors of use, printing, drawing."""

from __future__ import annotations

import functools
import math
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from pipegrad.errors import PipegradError, in_words, reason, root_of
from pipegrad.limits import LONG_CELLS
from pipegrad.printable import printable, printable_lines

if TYPE_CHECKING:
    from pipegrad.simulation.timeline import Timeline

# torch takes seconds to import. Therefore a command imports modules when it runs.


class Number(click.FloatRange):
    """A finite number in a range."""

    def convert(
        self,
        value: Any,  # noqa: ANN401 - a text, or a default
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_CHANGES = (
    click.argument("config", type=Path),
    click.option(
        "--handler",
        "handlers",
        multiple=True,
        metavar="NAME",
        help="A gradient handler, by name or as module:attr. All of them replace the file's list.",
    ),
    click.option(
        "--schedule", metavar="NAME", help="A schedule, by name or as module:attr; for the file's."
    ),
    click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="KEY=VALUE",
        help="Changes a key, as in --set train.steps=10. TOML; repeat for several.",
    ),
)


_SIZED = (
    click.option("--ranks", type=click.IntRange(min=1), required=True, help="Of the pipeline."),
    click.option("--microbatches", type=click.IntRange(min=1), required=True, help="Of a step."),
    click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="KEY=VALUE",
        help="An option of the schedule, as in --set stages_per_rank=3. TOML; repeat for several.",
    ),
)


def sized(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the size and the options of a schedule."""
    return functools.reduce(lambda decorated, add: add(decorated), reversed(_SIZED), command)


def configured(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command a function that loads its configuration, from the file and the options."""

    @functools.wraps(command)
    def with_changes(
        config: Path,
        handlers: Sequence[str],
        schedule: str | None,
        settings: Sequence[str],
        **other_options: object,
    ) -> None:
        from pipegrad.train.config import load

        command(
            partial(load, config, settings, handlers=handlers, schedule=schedule), **other_options
        )

    return functools.reduce(lambda decorated, add: add(decorated), reversed(_CHANGES), with_changes)


def add_traceback(command: click.Command) -> click.Command:
    """Gives a command the option --traceback, for `wants_traceback`."""
    words = "Print the whole traceback of an error, too."
    option = click.Option(["--traceback"], is_flag=True, expose_value=False, help=words)
    command.params.append(option)
    return command


def wants_traceback() -> bool:
    """True if the running command was given --traceback."""
    context = click.get_current_context(silent=True)
    source = None if context is None else context.get_parameter_source("traceback")
    return source is ParameterSource.COMMANDLINE


def explained(error: BaseException) -> str:
    """Returns the message of an error for the command line, and prints its traceback if wanted.

    If the user's code failed, the message names the option that prints more.
    """
    text = printable_lines(str(error))
    if wants_traceback():
        click.echo(printable_lines("".join(traceback.format_exception(error))), err=True)
        return text
    root = root_of(error)
    is_of_user = not isinstance(root, PipegradError) and in_words(root) in str(error)
    return f"{text} (--traceback prints where)" if is_of_user else text


@contextmanager
def usage_errors() -> Iterator[None]:
    """Turns errors before and outside of a run into one line; a run prints its own errors."""
    try:
        yield
    except PipegradError as error:
        raise click.ClickException(explained(error)) from error


def tell_if_long(num_cells: int, part: str) -> None:
    """Prints a command's next part on standard error, if it has many actions each way."""
    if num_cells > LONG_CELLS:
        seconds = time.process_time()
        click.echo(f"{seconds:4.0f} s: {part}, {num_cells:,} actions each way", err=True)


def saving(option: str, path: Path, save: Callable[[Path], object]) -> None:
    """Saves into the file of an option.

    Raises:
        click.ClickException: If that fails. The message names the option and the file.
    """
    try:
        save(path)
    except (OSError, ValueError) as error:  # the path may be invalid
        raise click.ClickException(f"{option} {path}: {reason(error)}") from error


_FORMATS = {
    "html": "a page for the browser: zoom, filters, the reason of each wait",
    "svg": "a figure",
}


def draw(pictures: Mapping[str, Path], timelines: Sequence[Timeline]) -> None:
    """Writes one or two timelines into the requested files, and prints the names of these files.

    Raises:
        click.ClickException: If a timeline cannot be drawn, or a file cannot be written.
    """
    from pipegrad.picture import write_figure, write_html

    write = {"html": write_html, "svg": write_figure}
    for name, path in pictures.items():
        saving(f"--{name}", path, partial(write[name], timelines))
        click.echo(printable(f"wrote {path}"), err=True)


def draws(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options of pictures; its first argument gets the files of used options.

    For example::

        @click.command()
        @draws
        def simulate(pictures: Mapping[str, Path]) -> None:
            draw(pictures, [timeline])
    """

    @functools.wraps(command)
    def drawing(*arguments: object, **options: object) -> None:
        paths = {name: path for name in _FORMATS if (path := options.pop(name)) is not None}
        command(paths, *arguments, **options)

    for name, text in reversed(_FORMATS.items()):
        add = click.option(f"--{name}", type=Path, metavar="FILE", help=f"Write {text}.")
        drawing = add(drawing)
    return drawing
