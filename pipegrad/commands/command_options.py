"""What commands share: options, configurations with changes, errors of use, printing, drawing."""

from __future__ import annotations

import functools
import math
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from pipegrad.errors import ConfigError, PipegradError, in_words, reason, root_of
from pipegrad.limits import LONG_CELLS
from pipegrad.printable import printable, printable_lines

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from pipegrad.simulation.timeline import Timeline

# torch takes seconds to import: a command imports what it needs when it runs.


class _InWords(click.ParamType):  # type: ignore[type-arg, unused-ignore] # click 8.3 made it generic
    """A finite number in a range; anything else is refused in a sentence."""

    expected: str

    def convert(
        self,
        value: Any,  # noqa: ANN401 - a text, or a default
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Any:  # noqa: ANN401 - an int or a float
        number: Any = None
        kind = cast(click.FloatRange, self)
        with suppress(click.BadParameter):
            number = super().convert(value, param, ctx)
        if number is None or not abs(number) < math.inf:
            bounds = f" above {kind.min}" if kind.min_open else f" of at least {kind.min}"
            if kind.max is not None:
                bounds = f" from {kind.min:,} to {kind.max:,}"
            self.fail(f"{str(value)!r:.80}: expected {self.expected}{bounds}", param, ctx)
        return number


class Whole(_InWords, click.IntRange):
    """A whole number in a range."""

    expected = "a whole number"


class Number(_InWords, click.FloatRange):
    """A number in a range."""

    expected = "a number"


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
    click.option("--ranks", type=Whole(min=1), required=True, help="Of the pipeline."),
    click.option("--microbatches", type=Whole(min=1), required=True, help="Of a step."),
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


_TRACEBACK = "pipegrad.traceback"  # in the context of the command


def add_traceback(command: click.Command) -> click.Command:
    """Gives a command the option --traceback, for `wants_traceback`."""

    def remember(context: click.Context, _option: click.Parameter, wanted: bool) -> None:
        context.meta[_TRACEBACK] = wanted

    option = click.Option(
        ["--traceback"],
        is_flag=True,
        expose_value=False,
        callback=remember,
        help="Print the whole traceback of an error, too.",
    )
    command.params.append(option)
    return command


def wants_traceback() -> bool:
    """Whether the running command was given --traceback."""
    context = click.get_current_context(silent=True)
    return bool(context and context.meta.get(_TRACEBACK))


def explained(error: BaseException) -> str:
    """Returns the message of an error for the command line, and prints its traceback if wanted.

    The message says how to see more if code of the user failed.
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
    """Says on the standard error what a command begins, if it has so many actions each way."""
    if num_cells > LONG_CELLS:
        seconds = time.process_time()
        click.echo(f"{seconds:4.0f} s: {part}, {num_cells:,} actions each way", err=True)


def saving(path: Path, save: Callable[[Path], None]) -> None:
    """Saves into the file of the option --save.

    Raises:
        ConfigError: If that fails. The message names the option and the file.
    """
    try:
        save(path)
    except (OSError, ValueError) as error:  # a path may be none
        raise ConfigError(f"--save {path}: {reason(error)}") from error


def print_parts(console: Console, parts: Iterable[RenderableType]) -> None:
    """Prints parts. A part that is text is one line, and is not wrapped."""
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str))


_FORMATS = {
    "html": "a page for the browser: zoom, filters, the reason of each wait",
    "svg": "a figure",
    "perfetto": "JSON for ui.perfetto.dev",
}


@dataclass(frozen=True)
class Drawing:
    """The files that a command is asked to write.

    Attributes:
        paths: For each format that was asked for, the file.
    """

    paths: Mapping[str, Path]

    @property
    def is_wanted(self) -> bool:
        """False if there is nothing to write, so that no timeline is needed."""
        return bool(self.paths)

    def write(self, timelines: Sequence[Timeline]) -> None:
        """Writes all files from one or two timelines, and says which.

        Raises:
            click.ClickException: If a file cannot be written.
            ScheduleError: If a timeline cannot be drawn.
        """
        from pipegrad.picture import write_figure, write_html, write_perfetto

        write = {"html": write_html, "svg": write_figure, "perfetto": write_perfetto}
        for name, path in self.paths.items():
            try:
                write[name](timelines, path)
            except (OSError, ValueError) as error:
                raise click.ClickException(f"--{name} {path}: {reason(error)}") from error
            click.echo(printable(f"wrote {path}"), err=True)


def draws(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options, and a `Drawing` as its first argument.

    For example::

        @click.command()
        @draws
        def simulate(drawing: Drawing) -> None:
            if drawing.is_wanted:
                drawing.write([timeline])
    """

    @functools.wraps(command)
    def drawing(*arguments: object, **options: object) -> None:
        paths = {name: path for name in _FORMATS if isinstance(path := options.pop(name), Path)}
        command(Drawing(paths), *arguments, **options)

    for name, text in reversed(_FORMATS.items()):
        add = click.option(f"--{name}", type=Path, metavar="FILE", help=f"Write {text}.")
        drawing = add(drawing)
    return drawing
