"""The mutation gate: without any one wait, record or hold, a program is wrong, and a test says so.

``pytest -m mutation``; not in the default run. Every site of `pipegrad.comm.sync_points` is
switched off in turn, in each function that uses it, in process, and the programs of
`tests/support/ordering/programs.py` run until one notices: a violation, a wrong number, an error,
or a hang.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from pipegrad.comm.sync_points import Site, sites
from pipegrad.testing import run_ranks
from tests.support.ordering.programs import PROGRAMS, run_programs, wrong

pytestmark = pytest.mark.mutation
TIMEOUT_SECONDS = 120.0
WAITING = ("Reducer.wait", "Reducer.wait_for", "Bucketer._wait")  # who waits for a Ticket


_kills = Counter[str]()  # of each program, of the mutants before


def killed_by(mutant: str) -> str | None:
    """Returns which program notices that a site is off, and how; None if none does."""
    for name in sorted(PROGRAMS, key=lambda name: -_kills[name]):  # each is a spawn
        try:
            replies = run_ranks(run_programs, 2, [name], mutant, timeout_seconds=TIMEOUT_SECONDS)
        except TimeoutError:
            return f"{name}: it hangs"
        except Exception as error:  # noqa: BLE001 - a mutant may break anything
            return f"{name}: {type(error).__name__}"
        noticed = [found for reply in replies if (found := wrong(name, reply[name]))]
        if noticed:
            _kills[name] += 1
            return f"{name}: {noticed[0].splitlines()[0]}"
    return None


def functions() -> Iterator[tuple[str, set[Site]]]:
    """Yields the functions of pipegrad, and the sites that each names."""
    for module in [m for name, m in sys.modules.items() if name.startswith("pipegrad.")]:
        places = [module, *(c for c in vars(module).values() if inspect.isclass(c))]
        for function in [f for place in places for f in vars(place).values()]:
            if inspect.isfunction(function) and function.__module__ == module.__name__:
                named = map(vars(module).get, function.__code__.co_names)
                yield function.__qualname__, {found for found in named if isinstance(found, Site)}


def mutants() -> Iterator[str]:
    """Yields every site, or where several functions use one, each of its uses."""
    for name, site in sites.items():
        users = sorted(function for function, named in functions() if site in named)
        users = [w for user in users for w in (WAITING if user == "Ticket.wait" else [user])]
        yield from [name] if len(users) == 1 else [f"{name} in {user}" for user in users]


def test_nothing_is_wrong_without_a_mutation() -> None:
    replies = run_ranks(run_programs, 2, list(PROGRAMS))
    assert [wrong(name, reply[name]) for reply in replies for name in PROGRAMS] == [None] * (
        2 * len(PROGRAMS)
    )


@pytest.mark.parametrize("mutant", list(mutants()))
def test_every_site_is_needed(mutant: str, record_property: Callable[[str, object], None]) -> None:
    killer = killed_by(mutant)
    record_property("killed by", killer)
    assert killer is not None, (
        f"nothing notices that {mutant} is off: {sites[mutant.partition(' ')[0]].reason}"
    )
