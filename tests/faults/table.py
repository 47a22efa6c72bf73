"""Writes the table of the documentation: python -m tests.faults.table RESULTS [PAGE].

``python -m tests.faults --results`` has written RESULTS. The table goes between two marks of PAGE.
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
BEGIN, END = "<!-- table: python -m tests.faults.table -->", "<!-- end of the table -->"


@click.command()
@click.argument("results", type=Path)
@click.argument("page", type=Path, default=PAGE)
def main(results: Path, page: Path) -> None:
    """Put the table of RESULTS into PAGE."""
    text = page.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    table = "\n".join(lines(json.loads(results.read_text())))
    page.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")


def lines(results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yields the tables: one a layout, faults by places, then why cells are as they are."""
    for layout, (pipeline, data) in LAYOUTS.items():
        yield f"### {pipeline * data} ranks: pipeline {pipeline}, data {data}"
        yield f"| A rank ... | {' | '.join(PLACES)} |"
        yield "|---" * (len(PLACES) + 1) + "|"
        for fault, words in FAULTS.items():
            row = [entry(Cell.of(fault, place, layout), results) for place in PLACES]
            yield f"| **{words}** | {' | '.join(row)} |"
        yield ""
    yield from notes()


def entry(cell: Cell, results: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns what the table says of a cell: how the job ended, and after how many seconds."""
    wanted = expected(cell)
    if isinstance(wanted, Excluded):
        return "-"
    if str(cell) not in results:
        return "not run"
    found = results[str(cell)]
    if found["complaints"]:
        return f"**not as stated**: {found['complaints'][0]}"
    if wanted.ends == "finishes":
        return "goes on"
    seconds = f"{found['ended']['seconds']:.1f} s"
    return seconds if wanted.culprit is None else f"{seconds}, rank {wanted.culprit}"


def notes() -> Iterator[str]:
    """Yields why cells do not exist, or end in a way of their own; each reason once."""
    reasons: dict[str, list[str]] = {}
    for fault in FAULTS:
        for place in PLACES:
            wanted = expected(Cell.of(fault, place, "4"))
            kind = "not applicable" if isinstance(wanted, Excluded) else _ending(wanted)
            if wanted.why:
                reasons.setdefault(f"{kind}: {wanted.why}", []).append(f"{fault} x {place}")
    for reason, names in reasons.items():
        yield f"- {reason[0].upper()}{reason[1:]}. This is {', '.join(names)}."


def _ending(wanted: Expected) -> str:
    return "the job goes on" if wanted.ends == "finishes" else "the job ends"


if __name__ == "__main__":
    main()
