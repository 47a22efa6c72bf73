"""Writes the tables of the documentation: python -m tests.faults.table RESULTS [PAGE].

``python -m tests.faults --results`` has written RESULTS. The tables replace the end of PAGE.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from tests.faults.cell import FAULTS, LAYOUTS, PLACES, Cell
from tests.faults.expected import Excluded, Expected, expected

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
HEADING = "## All cells\n"


@click.command()
@click.argument("results", type=Path)
@click.argument("page", type=Path, default=PAGE)
def main(results: Path, page: Path) -> None:
    """Put the tables of RESULTS into PAGE."""
    before, _, _ = page.read_text().partition(HEADING)
    tables = "\n".join(lines(json.loads(results.read_text())))
    page.write_text(f"{before}{HEADING}{tables}\n")


def lines(results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yields a table for each layout, places by faults; then why cells are as they are."""
    yield "Seconds are those from the fault to the end of the last rank."
    for layout, (pipeline, data) in LAYOUTS.items():
        yield f"\n### {pipeline * data} ranks: pipeline {pipeline}, data {data}"
        yield f"| | {' | '.join(FAULTS)} |"
        yield "|---" * (len(FAULTS) + 1) + "|"
        for place in PLACES:
            row = [entry(Cell.of(fault, place, layout), results) for fault in FAULTS]
            yield f"| **{place}** | {' | '.join(row)} |"
    yield "\n### What the faults are"
    yield from (f"- **{fault}**: the rank {words}." for fault, words in FAULTS.items())
    yield "\n### Cells of their own"
    yield from notes()


def entry(cell: Cell, results: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns what the table says of a cell."""
    wanted = expected(cell)
    if isinstance(wanted, Excluded):
        return "-"
    if str(cell) not in results:
        return "not run"
    found = results[str(cell)]
    if found["complaints"]:
        return f"**{found['complaints'][0]}**"
    if wanted.ends == "finishes":
        return "goes on"
    return f"{found['ended']['seconds']:.1f} s"


def notes() -> Iterator[str]:
    """Yields why cells do not exist, or end in a way of their own: for each fault, each reason."""
    for fault in FAULTS:
        reasons: dict[str, list[str]] = {}
        for place in PLACES:
            wanted = expected(Cell.of(fault, place, "4"))
            if wanted.why:
                reasons.setdefault(f"{_ending(wanted)}: {wanted.why}", []).append(place)
        for reason, places in reasons.items():
            where = "everywhere" if len(places) == len(PLACES) else ", ".join(places)
            yield f"- **{fault}** ({where}): {reason}."


def _ending(wanted: Expected | Excluded) -> str:
    if isinstance(wanted, Excluded):
        return "not applicable"
    return "the job goes on" if wanted.ends == "finishes" else "the job ends"


if __name__ == "__main__":
    main()
