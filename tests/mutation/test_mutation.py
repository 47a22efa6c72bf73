"""The mutation gate: without any one wait, record or hold, a program is wrong, and a test says so.

Every site of `pipegrad.comm.sync_points` is switched off in turn, in each function that uses it,
and a program of `tests/support/ordering/programs.py` must notice: a violation, a wrong number, an
error, or a hang. `killers.json` has the program of each; ``python -m tests.mutation`` writes it. At
night all programs are tried if that one does not notice.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from pipegrad.comm.sync_points import sites
from pipegrad.testing import run_ranks
from tests.support.ordering.programs import PROGRAMS, run_programs, wrong
from tests.support.ordering.uses import uses
from tests.support.pairwise import everything

TIMEOUT_SECONDS = 20.0
WAITING = ("Reducer.wait", "Reducer.wait_for")  # who waits for a Ticket
HANGS = "it hangs"
TABLE = Path(__file__).with_name("killers.json")


def mutants(name: str) -> list[str]:
    """Returns a site, or where several functions use it, each of its uses; nothing without one."""
    users = [w for user in uses()[name] for w in (WAITING if user == "Ticket.wait" else [user])]
    return [name] if len(users) == 1 else [f"{name} in {user}" for user in users]


MUTANTS = [mutant for name in uses() for mutant in mutants(name)]


def in_order(mutant: str) -> list[str]:
    """Returns all programs: first who killed this mutant, then who killed the most."""
    killers = json.loads(TABLE.read_text())
    kills = Counter(killers.values())
    return sorted(PROGRAMS, key=lambda name: (name != killers.get(mutant), -kills[name]))


def noticed(name: str, mutant: str) -> str | None:
    """Returns how a program notices that a site is off; None if it does not."""
    try:
        replies = run_ranks(run_programs, 2, [name], mutant, timeout_seconds=TIMEOUT_SECONDS)
    except TimeoutError:
        return HANGS
    except Exception as error:  # noqa: BLE001 - a mutant may break anything
        return type(error).__name__
    found = [words for reply in replies if (words := wrong(name, reply[name]))]
    return found[0].splitlines()[0] if found else None


def killed_by(mutant: str, programs: Iterable[str]) -> tuple[str, str] | None:
    """Returns the first program that notices that a site is off, and how; None if none does."""
    return next(((name, how) for name in programs if (how := noticed(name, mutant))), None)


def test_nothing_is_wrong_without_a_mutation() -> None:
    replies = run_ranks(run_programs, 2, list(PROGRAMS))
    found = {name: wrong(name, reply[name]) for reply in replies for name in PROGRAMS}
    assert {name: words for name, words in found.items() if words} == {}


def test_every_site_has_a_mutant_and_every_mutant_a_known_killer() -> None:
    assert [name for name in sites if not mutants(name)] == []
    known = json.loads(TABLE.read_text()).keys()
    assert sorted(known) == sorted(MUTANTS), "python -m tests.mutation writes the table anew"


@pytest.mark.parametrize("mutant", MUTANTS)
def test_every_site_is_needed(mutant: str) -> None:
    programs = in_order(mutant) if everything() else in_order(mutant)[:1]
    killer = killed_by(mutant, programs)
    assert killer is not None, (
        f"nothing notices that {mutant} is off: {sites[mutant.partition(' ')[0]].reason}"
    )
