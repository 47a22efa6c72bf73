"""Tables for people."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.table import Table


def table(columns: Iterable[str], rows: Iterable[Iterable[object]]) -> Table:
    """Returns a table without lines but that below its head."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        made.add_column(column, overflow="fold")
    for row in rows:
        made.add_row(*map(str, row))
    return made
