"""Chooses which tests run when, by a table that `scripts/tiers` makes from measured CPU seconds.

`tests/tiers.json` has a row for each test function: the CPU seconds of one case with its ranks, and
how many of its cases run in a tier, in the order of `order`, or their names. A function without a
row is of the landing tier, with all its cases. `tests/budget.toml` limits the seconds of folders.

- ``first``: what ``pytest`` runs, three minutes on two cores.
- ``landing``: what a change must pass, with all of ``first``: twenty minutes, ``.ci/check``.
- ``night``: everything, ``.ci/night``.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypedDict

import pytest

TESTS = Path(__file__).resolve().parents[1]
TABLE, BUDGET = TESTS / "tiers.json", TESTS / "budget.toml"
TIERS = ("first", "landing", "night")
NUM_DEAREST = 10
ALLOWED = 1.1  # of a budget

Cases = int | str | list[str]  # how many, "all", or the names in brackets


class Row(TypedDict, total=False):
    """A test function: CPU seconds of a case, and its cases in the tiers."""

    seconds: float
    first: Cases
    landing: Cases


Table = dict[str, dict[str, Row]]  # by file, then by function


@cache
def table() -> Table:
    """Returns the table of all tests that were measured."""
    return dict(json.loads(TABLE.read_text())) if TABLE.exists() else {}


def split(nodeid: str) -> tuple[str, str, str]:
    """Returns file, function and case of a test."""
    function, _, case = nodeid.partition("[")
    file, _, name = function.partition("::")
    return file, name, case.removesuffix("]")


def folder_of(nodeid: str) -> str:
    """Returns the folder whose budget a test spends."""
    parts = nodeid.split("/")[1:-1]
    return "/".join(parts[:2] if parts[:1] == ["ranks"] else parts[:1])


def order(number: int) -> list[int]:
    """Returns the numbers below a number so that any first part is spread over all of them."""
    ends = [0, number - 1]
    while len(set(ends)) < number:
        known = sorted(set(ends))
        ends += [(a + b) // 2 for a, b in itertools.pairwise(known) if b - a > 1]
    return list(dict.fromkeys(ends))


def mark(items: Sequence[pytest.Item]) -> None:
    """Gives each test the marks of its tiers. Tests of the built site are in none."""
    rows, functions = table(), defaultdict[tuple[str, str], list[pytest.Item]](list)
    for item in items:
        file, name, _ = split(item.nodeid)
        if not file.startswith("tests/site/"):
            functions[file, name].append(item)
    for (file, name), cases in functions.items():
        row = rows.get(file, {}).get(name, Row())
        turns = order(len(cases))
        for number, item in enumerate(cases):
            turn, case = turns.index(number), split(item.nodeid)[2]
            is_first = _has(row.get("first", 0), turn, case)
            item.add_marker("night")
            if is_first:
                item.add_marker("first")
            if is_first or _has(row.get("landing", "all"), turn, case):
                item.add_marker("landing")


def _has(cases: Cases, turn: int, case: str) -> bool:
    if isinstance(cases, int):
        return turn < cases
    return cases == "all" or case in cases


def gone(items: Iterable[pytest.Item]) -> list[str]:
    """Returns the rows whose test is not there, of files that were collected or are gone."""
    found = defaultdict[str, set[str]](set)
    for file, name, _ in (split(item.nodeid) for item in items):
        found[file].add(name)
    return [
        f"{file}::{name}"
        for file, rows in table().items()
        if file in found or not (TESTS.parent / file).exists()
        for name in rows
        if name not in found[file]
    ]


def has_first(file: str, rows: Table) -> bool:
    """Returns whether a file has a test of the first tier."""
    return any(row.get("first", 0) for row in rows.get(file, {}).values())


def seconds_of_file(file: str, rows: Table) -> float:
    """Returns about how long a file takes; one that was not measured comes first."""
    return sum(row.get("seconds", 0.0) for row in rows[file].values()) if file in rows else 1e9


def report(tier: str, seconds: Mapping[str, float]) -> tuple[list[str], list[str]]:
    """Returns the lines of a tier's spending, and the folders that are over their budget.

    Args:
        tier: `first` or `landing`.
        seconds: CPU seconds of each test. Those of the median test are what the table has for it,
            so that a slow machine is no reason to fail: the median of all tests or, where that is
            more, of the folder, as a machine under load is not slow alike at everything.
    """
    known = {f"{file}::{name}": row for file, own in table().items() for name, row in own.items()}
    functions, folders = defaultdict[str, float](float), defaultdict[str, float](float)
    ratios = defaultdict[str, list[float]](list)
    for nodeid, spent in seconds.items():
        usual = known.get(nodeid.partition("[")[0], Row()).get("seconds", spent)
        if spent > 0.05:
            ratios[folder_of(nodeid)].append(spent / usual)
    speed = statistics.median([ratio for own in ratios.values() for ratio in own] or [1.0])
    speeds = {folder: max(speed, statistics.median(own)) for folder, own in ratios.items()}
    for nodeid, spent in seconds.items():
        folder = folder_of(nodeid)
        scaled = spent / speeds.get(folder, speed)
        functions[nodeid.partition("[")[0]] += scaled
        folders[folder] += scaled
    budgets: dict[str, Any] = tomllib.loads(BUDGET.read_text())[tier]
    lines = [f"CPU seconds of the {tier} tier, spent / budget; {speed:.2f} here are 1.00 there:"]
    lines += [
        f"  {folder:20} {folders.get(folder, 0.0):6.0f} /{budgets.get(folder, 0):5}"
        f"{speeds.get(folder, speed):9.2f}"
        for folder in sorted({*folders, *budgets})
    ]
    lines.append(f"  {'in all':20} {sum(folders.values()):6.0f} /{sum(budgets.values()):5}")
    lines.append("dearest functions:")
    dearest = sorted(functions, key=lambda name: -functions[name])[:NUM_DEAREST]
    lines += [f"  {functions[name]:6.1f} {name}" for name in dearest]
    over = [name for name, spent in folders.items() if spent > ALLOWED * budgets.get(name, 0)]
    return lines, sorted(over)


def dump(rows: Table) -> None:
    """Writes the table, a line a function."""
    files: Sequence[str] = sorted(rows)
    text = ",\n".join(
        f"{json.dumps(file)}: {{\n"
        + ",\n".join(f"  {json.dumps(k)}: {json.dumps(rows[file][k])}" for k in sorted(rows[file]))
        + "\n}"
        for file in files
    )
    TABLE.write_text(f"{{\n{text}\n}}\n")
