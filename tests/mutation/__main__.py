"""``python -m tests.mutation``: writes anew which program kills which mutant of the gate first."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

from tests.mutation.test_mutation import HANGS, MUTANTS, TABLE, in_order, noticed


def best(mutant: str) -> str | None:
    """Returns the first program whose checker or numbers tell; else one that fails, or hangs."""
    found: dict[str, str] = {}
    for name in in_order(mutant):
        if how := noticed(name, mutant):
            found[name] = how
            print(f"{mutant:44}{name}: {how}", flush=True)
            if " " in how and how != HANGS:
                return name
    return min(found, key=lambda name: found[name] == HANGS, default=None)


def main() -> None:
    with ThreadPoolExecutor(2) as pool:
        killers = dict(zip(MUTANTS, pool.map(best, MUTANTS), strict=True))
    TABLE.write_text(json.dumps(killers, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
