"""draws: the options --html, --svg, --png and --perfetto of every command that has timelines."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipegrad.errors import reason
from pipegrad.printable import printable

if TYPE_CHECKING:
    from pipegrad.simulation.timeline import Timeline

_FORMATS = {
    "html": "a page for the browser: zoom, filters, the reason of each wait",
    "svg": "a figure; needs pipegrad[picture]",
    "png": "a figure; needs pipegrad[picture]",
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
            click.ClickException: If a file cannot be written, or a library is missing.
            ScheduleError: If a timeline cannot be drawn.
        """
        from pipegrad.picture import write_figure, write_html, write_perfetto

        for name, path in self.paths.items():
            write = {"html": write_html, "perfetto": write_perfetto}.get(name, write_figure)
            try:
                write(timelines, path)
            except (ImportError, OSError, ValueError) as error:
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
        found = {name: options.pop(name) for name in _FORMATS}
        paths = {name: path for name, path in found.items() if isinstance(path, Path)}
        command(Drawing(paths), *arguments, **options)

    for name, text in reversed(_FORMATS.items()):
        drawing = click.option(f"--{name}", type=Path, metavar="FILE", help=f"Write {text}.")(
            drawing
        )
    return drawing
