"""Tables: prints rows on the console of commands, and returns them as text."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

from pipegrad.printable import printable

_PLAIN_WIDTH = 160  # columns without a terminal


class _Console(Console):
    """A console whose texts are lines, without control characters: names in them may have some."""

    def print(self, *objects: Any, **options: Any) -> None:  # noqa: ANN401 - as rich has them
        texts = [printable(each) if isinstance(each, str) else each for each in objects]
        super().print(*texts, **options)


def make_console(**options: Any) -> Console:  # noqa: ANN401 - as rich has them
    """Returns a console on the standard output. A text is one line, and has no markup."""
    console = _Console(highlight=False, markup=False, emoji=False, **options)
    if not console.is_terminal:
        console.width = _PLAIN_WIDTH
    return console


def print_parts(console: Console, parts: Iterable[RenderableType]) -> None:
    """Prints parts. A part that is text is one line, and is not wrapped."""
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str))


def as_text(parts: Iterable[RenderableType]) -> str:
    """Returns parts as they are printed without a terminal."""
    console = make_console(color_system=None, width=_PLAIN_WIDTH)
    with console.capture() as captured:
        print_parts(console, parts)
    lines = "\n".join(line.rstrip() for line in captured.get().splitlines())
    return lines.strip("\n")


def table(
    columns: Iterable[str], rows: Iterable[Iterable[object]], most: int = sys.maxsize
) -> Table:
    """Returns a table whose only line is below its head."""
    text_table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        text_table.add_column(printable(column), overflow="fold")
    for row in ends_of([*rows], most, lambda number: [f"... {number} more"]):
        text_table.add_row(*(printable(str(cell)) for cell in row))
    return text_table


def ends_of(items: list[Any], most: int, left_out: Callable[[int], Any]) -> list[Any]:
    """Returns the first and last items of many, with an item for the number that is left out."""
    if len(items) <= most:
        return items
    half = most // 2
    return [*items[:half], left_out(len(items) - 2 * half), *items[-half:]]
