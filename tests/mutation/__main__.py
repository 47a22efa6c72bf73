"""``python -m tests.mutation``: writes anew which program kills which mutant of the gate first."""

from __future__ import annotations

import json

import click

from tests.mutation.test_mutation import HANGS, MUTANTS, TABLE, in_order, noticed


def best(mutant: str) -> str | None:
    """Returns the first program whose checker or numbers tell; else one that fails, or hangs."""
    found: dict[str, str] = {}
    for name in in_order(mutant):
        if how := noticed(name, mutant):
            found[name] = how
            click.echo(f"{mutant:50}{name}: {how}")
            if " " in how and how != HANGS:
                return name
    return min(found, key=lambda name: found[name] == HANGS, default=None)


if __name__ == "__main__":
    killers = {mutant: best(mutant) for mutant in MUTANTS}
    TABLE.write_text(json.dumps(killers, indent=2, sort_keys=True) + "\n")
