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
from tests.faults.expected import Excluded, expected

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
    """Yields the table, places by faults; then why cells end as they do."""
    layouts = ", and ".join(f"pipeline {p} x data {d}" for p, d in LAYOUTS.values())
    yield "`python -m tests.faults.table` writes what follows, from the results of one run: seconds"
    yield f"from the fault to the end of the last rank, the longer of both layouts ({layouts})."
    yield f"\n| | {' | '.join(FAULTS)} |"
    yield "|---" * (len(FAULTS) + 1) + "|"
    for place in PLACES:
        row = [entry(fault, place, results) for fault in FAULTS]
        yield f"| **{place}**: {PLACES[place]} | {' | '.join(row)} |"
    yield "\n### What the faults are"
    yield from (f"- **{fault}**: the rank {words}." for fault, words in FAULTS.items())
    yield "\n### Why a cell ends so"
    yield from notes()


def entry(fault: str, place: str, results: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns what the table says of a cell in all layouts."""
    cells = [Cell.of(fault, place, layout) for layout in LAYOUTS]
    wanted = expected(cells[0])
    if isinstance(wanted, Excluded):
        return "-"
    if any(str(cell) not in results for cell in cells):
        return "not run"
    for cell in cells:
        if complaints := results[str(cell)]["complaints"]:
            return f"**{complaints[0]}**"
    if wanted.ends == "finishes":
        return "goes on"
    return f"{max(results[str(cell)]['ended']['seconds'] for cell in cells):.1f}"


def notes() -> Iterator[str]:
    """Yields why cells that are run end in a way of their own: for each fault, each reason."""
    for fault in FAULTS:
        reasons: dict[str, list[str]] = {}
        for place in PLACES:
            wanted = expected(Cell.of(fault, place, "4"))
            if wanted.why and not isinstance(wanted, Excluded):
                end = "goes on" if wanted.ends == "finishes" else "ends"
                reasons.setdefault(f"the job {end}: {wanted.why}", []).append(place)
        for reason, places in reasons.items():
            where = "everywhere" if len(places) == len(PLACES) else ", ".join(places)
            yield f"- **{fault}** ({where}): {reason}."


if __name__ == "__main__":
    main()
