"""The console of commands, and tables on it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from pipegrad.printable import printable

_PLAIN_WIDTH = 160  # columns without a terminal


class _Console(Console):
    """A console whose texts are lines, without control characters: names in them may have some."""

    def print(self, *objects: Any, **options: Any) -> None:  # noqa: ANN401 - as rich has them
        texts = [printable(each) if isinstance(each, str) else each for each in objects]
        super().print(*texts, **options)


def make_console(*, quiet: bool = False) -> Console:
    """Returns a console on the standard output. A text is one line, and has no markup."""
    console = _Console(highlight=False, markup=False, emoji=False, quiet=quiet)
    if not console.is_terminal:
        console.width = _PLAIN_WIDTH
    return console


def table(columns: Iterable[str], rows: Iterable[Iterable[object]]) -> Table:
    """Returns a table whose only line is below its head."""
    text_table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        text_table.add_column(printable(column), overflow="fold")
    for row in rows:
        text_table.add_row(*(printable(str(cell)) for cell in row))
    return text_table
