"""A page of one verdict: what each rank does at each time, and who waits for whom in it."""

from __future__ import annotations

import html
from collections.abc import Iterator
from string import Template
from typing import TYPE_CHECKING, Literal

from pipegrad.picture.drawable import PALETTE
from pipegrad.printable import printable

if TYPE_CHECKING:
    from pipegrad.orders.verification import Verdict

_MOST_TICKS = 1500  # of a larger grid, the part around what is marked
_MOST_NEVER = 3  # cells that a rank never ends, and the marked ones
_COMPUTES: tuple[Literal["F", "B", "I", "W"], ...] = ("F", "B", "I", "W")
_PAGE = Template("""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>$title</title>
<style>
body { font: 14px/1.45 system-ui, sans-serif; margin: 16px; color: #1b1f24; background: #fff; }
h1 { font-size: 18px; margin: 0 0 6px; } p, ol, ul { margin: 6px 0; max-width: 120ch; }
.grid { overflow: auto; border: 1px solid #d9dee4; max-height: 80vh; }
table { border-collapse: collapse; font: 12px/1.3 ui-monospace, monospace; }
th { position: sticky; left: 0; background: #f6f7f9; text-align: left; font-weight: 600; }
th, td div { white-space: nowrap; }
th, td { padding: 2px 5px; vertical-align: top; border-bottom: 1px solid #d9dee4; }
td div { padding: 0 3px; margin-bottom: 2px; border-radius: 3px; color: #5b6470; }
$colours
td div.marked { outline: 2px solid #b3261e; color: #b3261e; font-weight: 700; background: #fff; }
td div b { background: #b3261e; color: #fff; border-radius: 8px; padding: 0 5px; }
td.never div { opacity: 0.55; } td.never div.marked { opacity: 1; }
</style>
<h1>$title</h1>
<p>$assumed</p>
$findings
<p>Each line is one rank, and each column one time unit: a compute takes one, a transfer none. Below
a compute is what its rank starts then.$more</p>
<div class="grid"><table>$rows</table></div>
</html>
""")


def as_html(verdict: Verdict) -> str:
    """Returns the page."""
    columns = [_columns(verdict, rank) for rank in range(len(verdict.orders.cells))]
    ticks = [
        tick
        for rank, cells in verdict.marked.items()
        for tick, boxes in enumerate(columns[rank][0])
        if cells & set(boxes)
    ]
    begin = max(0, min(ticks, default=0) - _MOST_TICKS // 2)
    width = max(len(done) for done, _ in columns)
    end = min(width, begin + _MOST_TICKS)
    rows = (
        _row(verdict, rank, [*done, *[[]] * (width - len(done))][begin:end], never)
        for rank, (done, never) in enumerate(columns)
    )
    colours = "\n".join(
        f"td div.{kind} {{ background: {PALETTE[kind].fill}; color: {PALETTE[kind].text}; }}"
        for kind in _COMPUTES
    )
    more = f" Columns {begin + 1} to {end} of {width} are shown." if end - begin < width else ""
    if verdict.stuck:
        more += " The last column has what a rank never ends."
    return _PAGE.substitute(
        title=_text(f"{verdict.orders.name}: {'right' if verdict.is_right else 'wrong'}"),
        assumed=_text(verdict.assumed),
        findings="".join(_findings(verdict)),
        colours=colours,
        more=more,
        rows="\n".join(rows),
    )


def _text(text: str) -> str:
    return html.escape(printable(text))


def _findings(verdict: Verdict) -> Iterator[str]:
    if verdict.circle:
        sentences = "".join(f"<li>{_text(sentence)}</li>" for sentence in verdict.sentences)
        yield f"<p>{_text(verdict.summary_of_circle)}</p><ol>{sentences}</ol>"
    if verdict.defects:
        lines = (f"<li>{_text(verdict.in_words(defect))}</li>" for defect in verdict.defects)
        yield f"<ul>{''.join(lines)}</ul>"


def _columns(verdict: Verdict, rank: int) -> tuple[list[list[int]], list[int]]:
    """Returns for each tick the cells of a rank, and the cells that it never ends."""
    orders = verdict.orders
    ticks = verdict.run.ticks[rank] if verdict.run else range(len(orders.cells[rank]))
    # The tick of a cell is that of its last item: a compute is done then.
    tick_of = dict(zip(orders.cell_of[rank], ticks, strict=False))
    stuck = verdict.stuck.get(rank, len(orders.cells[rank]))
    columns: list[list[int]] = [[] for _ in range(max(ticks, default=0) + 1)]
    never = list[int]()
    tick = 0
    for cell, text in enumerate(orders.cells[rank]):
        if stuck != -1 and cell >= stuck:
            never += [cell] * bool(text)
        elif text:
            tick = max(tick, tick_of.get(cell, tick))
            columns[tick].append(cell)
    return columns, never


def _row(verdict: Verdict, rank: int, done: list[list[int]], never: list[int]) -> str:
    cells, marked = verdict.orders.cells[rank], verdict.marked.get(rank, frozenset())
    numbers = {  # of the sentence that says what a cell waits for
        verdict.orders.cell_of[rank][wait.position]: number
        for number, wait in enumerate(verdict.circle, start=1)
        if wait.rank == rank
    }

    def box(cell: int) -> str:
        text = _text(cells[cell])
        letters = cells[cell].strip("0123456789")
        kind = letters if letters in _COMPUTES else ""
        mark = "marked" if cell in marked else ""
        number = f"<b>{numbers[cell]}</b> " if cell in numbers else ""
        return f'<div class="{kind} {mark}">{number}{text}</div>'

    columns = "".join(f"<td>{''.join(map(box, column))}</td>" for column in done)
    if verdict.stuck:
        shown = [cell for n, cell in enumerate(never) if n < _MOST_NEVER or cell in marked]
        more = f"<div>{len(never) - len(shown)} more</div>" * (len(never) > len(shown))
        columns += f'<td class="never">{"".join(map(box, shown))}{more}</td>'
    return f"<tr><th>rank {rank}</th>{columns}</tr>"
