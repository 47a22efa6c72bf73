"""The console of commands, and tables on it."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table

from pipegrad.printable import printable

_PLAIN_WIDTH = 160  # columns without a terminal


def make_console(*, quiet: bool = False) -> Console:
    """Returns a console on the standard output that prints text as it is."""
    console = Console(highlight=False, markup=False, emoji=False, quiet=quiet)
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
