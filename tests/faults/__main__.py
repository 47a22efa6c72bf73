"""Runs the fault matrix: python -m tests.faults [--fault kill] [--place backward] [--layout 4].

It prints a line for each cell, and writes all of them as JSON. `tests.faults.table` makes the table
of the documentation from that.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import click

from tests.faults.cell import FAULTS, LAYOUTS, PLACES, Cell
from tests.faults.expected import Excluded, expected
from tests.faults.network import Network, can_cut
from tests.faults.outcome import Outcome, outcome


@click.command()
@click.option("--fault", "faults", multiple=True, type=click.Choice(list(FAULTS)))
@click.option("--place", "places", multiple=True, type=click.Choice(list(PLACES)))
@click.option("--layout", "layouts", multiple=True, type=click.Choice(list(LAYOUTS)))
@click.option("--rank", type=int, help="Which rank has the fault. Rank 0 then keeps the store.")
@click.option("--torchrun", "by_torchrun", is_flag=True, help="Let torchrun start the ranks.")
@click.option("--results", type=Path, help="Where to write JSON; cells of an old file stay.")
@click.option("--keep", type=Path, help="Where to leave the files of cells that fail.")
def main(
    *,
    faults: Sequence[str],
    places: Sequence[str],
    layouts: Sequence[str],
    rank: int | None,
    by_torchrun: bool,
    results: Path | None,
    keep: Path | None,
) -> None:
    """Run the cells of the matrix, one after the other; exit 1 if one is not as expected."""
    # Networks and ranks are removed on the way out, also when the script is ended.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    num_failed = 0
    for cell in cells(
        faults or list(FAULTS), places or list(PLACES), layouts or list(LAYOUTS), rank
    ):
        begin = time.monotonic()
        found = run(cell, keep, by_torchrun=by_torchrun)
        num_failed += bool(found.complaints)
        click.echo(described(found, time.monotonic() - begin))
        if results is not None:
            _add(results, found)
    sys.exit(num_failed > 0)


def cells(
    faults: Sequence[str], places: Sequence[str], layouts: Sequence[str], rank: int | None = None
) -> Iterator[Cell]:
    """Yields the cells that exist."""
    for layout in layouts:
        for fault in faults:
            for place in places:
                cell = Cell.of(fault, place, layout, rank)
                if isinstance(expected(cell), Excluded):
                    continue
                if fault != "cut" or can_cut():
                    yield cell
                else:
                    click.echo(f"{cell}: left out, it needs root and iproute2", err=True)


def run(cell: Cell, keep: Path | None = None, *, by_torchrun: bool = False) -> Outcome:
    """Runs a cell, in a network if it cuts a link."""
    folder = None if keep is None else keep / str(cell).replace(" ", "-")
    if folder is not None:
        folder.mkdir(parents=True)
    with ExitStack() as stack:
        network = stack.enter_context(Network.made(4)) if cell.fault == "cut" else None
        return outcome(cell, network=network, by_torchrun=by_torchrun, folder=folder)


def described(found: Outcome, seconds: float) -> str:
    """Returns a line about a cell, and further lines if it is not as expected."""
    ended = found.ended
    took = "-" if ended.seconds is None else f"{ended.seconds:.1f}"
    codes = " ".join("-" if code is None else str(code) for code in ended.codes.values())
    words = "; ".join(found.complaints) or "ok"
    line = f"{found.cell!s:40} {took:>5} s of {seconds:4.0f}  codes {codes}  {words}"
    return f"{line}\n    {found.error[:200]}" if found.error else line


def _add(results: Path, found: Outcome) -> None:
    """Puts an outcome into a file of results, in the place of an older one of this cell."""
    known = json.loads(results.read_text()) if results.exists() else {}
    known[str(found.cell)] = asdict(found)
    results.write_text(json.dumps(known, indent=1))


if __name__ == "__main__":
    main()
