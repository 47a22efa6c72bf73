"""Writes the tables of the documentation: python -m tests.faults.table RESULTS [PAGE].

``python -m tests.faults --results`` has written RESULTS. The tables replace the end of PAGE.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from tests.faults.cell import FAULTS, LAYOUTS, PLACES, Cell
from tests.faults.expected import Excluded, expected

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
HEADING = "## All cells\n"
STARTING, LATER = [*PLACES][:2], [*PLACES][2:]


@click.command()
@click.argument("results", type=Path)
@click.argument("page", type=Path, default=PAGE)
def main(results: Path, page: Path) -> None:
    """Put the tables of RESULTS into PAGE."""
    before, _, _ = page.read_text().partition(HEADING)
    tables = "\n".join(lines(json.loads(results.read_text())))
    page.write_text(f"{before}{HEADING}{tables}\n")


def lines(results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yields a line for each fault; then where faults strike, and why runs end as they do."""
    layouts = " and ".join(f"pipeline {p} x data {d}" for p, d in LAYOUTS.values())
    yield "`python -m tests.faults.table` writes what follows, from the results of one run: seconds"
    yield f"from the fault to the end of the last rank, over all points, with {layouts}."
    yield "\n| fault | the rank | while the run starts | later |\n|---|---|---|---|"
    for fault, words in FAULTS.items():
        early, later = (entry(fault, places, results) for places in (STARTING, LATER))
        yield f"| **{fault}** | {words} | {early} | {later} |"
    yield f"\nThe points are {', '.join(STARTING)}; then {', '.join(LATER)}."
    yield "\nEnds of another kind:"
    yield from notes()


def entry(fault: str, places: Sequence[str], results: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns what the table says of a fault: the least and the most seconds of its cells."""
    cells = [Cell.of(fault, place, layout) for place in places for layout in LAYOUTS]
    wanted = {cell: expected(cell) for cell in cells}
    run = {cell: end for cell, end in wanted.items() if not isinstance(end, Excluded)}
    if missing := [str(cell) for cell in run if str(cell) not in results]:
        return f"not run: {missing[0]}"
    for cell in run:
        if complaints := results[str(cell)]["complaints"]:
            return f"**{cell}: {complaints[0]}**"
    ended = [cell for cell, end in run.items() if end.ends != "finishes"]
    seconds = [results[str(cell)]["ended"]["seconds"] for cell in ended]
    span = f"{min(seconds):.1f} to {max(seconds):.1f}" if seconds else ""
    return ", or ".join(filter(None, [span, "goes on" * (len(ended) < len(run))])) or "-"


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
