"""Tables in the output of commands."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.table import Table


def table(columns: Iterable[str], rows: Iterable[Iterable[object]]) -> Table:
    """Returns a table whose only line is below its head."""
    text_table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        text_table.add_column(column, overflow="fold")
    for row in rows:
        text_table.add_row(*map(str, row))
    return text_table
