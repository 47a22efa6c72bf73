"""verify refuses good Programs after random harm, if they cannot be run."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import assume, given, settings

from pipegrad.schedules.program.program import Op, Program
from pipegrad.schedules.program.verify import verify
from tests.support.schedules.harm import assert_marked, move, quick, refused, seeds, swap, times
from tests.support.schedules.programs import DeadlockError, Run, places_of, programs

Harm = Callable[[Program, random.Random], Program | None]


def one_of(program: Program, chance: random.Random, op: Op) -> tuple[int, int] | None:
    """Returns rank and place of some item of a kind."""
    found = [
        (rank, place)
        for rank in range(len(program.items))
        for place, _ in places_of(program, rank, op)
    ]
    return chance.choice(found) if found else None


def some(op: Op, number: int) -> Harm:
    """Returns what makes some item of a kind come as often as said."""

    def harm(program: Program, chance: random.Random) -> Program | None:
        at = one_of(program, chance, op)
        return None if at is None else times(program, *at, number)

    return harm


def swap_sends(program: Program, chance: random.Random) -> Program | None:
    """Two transfers that follow each other on an edge leave the other way round."""
    pairs = list[tuple[int, int, int]]()
    for rank in range(len(program.items)):
        last: dict[int, int] = {}  # target -> where it was last sent to
        for place, item in places_of(program, rank, Op.SEND):
            target = program.channels[item.which].target
            if target in last:
                pairs.append((rank, last[target], place))
            last[target] = place
    return swap(program, *chance.choice(pairs)) if pairs else None


def wait_behind_reader(program: Program, chance: random.Random) -> Program | None:
    at = one_of(program, chance, Op.WAIT_RECEIVE)
    if at is None:
        return None
    rank, place = at
    # Nothing is waited for before it is read: see test_lower.
    reader = next(p for p, _ in places_of(program, rank, Op.COMPUTE) if p > place)
    return move(program, rank, place, reader + 1)


WORK = (Op.POST_RECEIVE, Op.WAIT_RECEIVE, Op.COMPUTE, Op.SEND, Op.RELEASE, Op.FINAL)
HARMS: dict[str, Harm] = {
    **{f"missing {op}": some(op, 0) for op in WORK},
    **{f"doubled {op}": some(op, 2) for op in WORK},
    "swapped sends of an edge": swap_sends,
    "wait behind its reader": wait_behind_reader,
}


@pytest.mark.parametrize("harm", HARMS)
@quick
@given(program=programs(min_ranks=2), seed=seeds)
def test_harm_is_refused_and_marked_in_the_grid(harm: str, program: Program, seed: int) -> None:
    harmed = HARMS[harm](program, random.Random(seed))
    assume(harmed is not None)
    assert harmed is not None
    assert_marked(refused(harmed), harmed)


@settings(quick, max_examples=200)
@given(program=programs(min_ranks=3), seed=seeds)
def test_early_releases_are_refused_if_and_only_if_a_run_never_ends(
    program: Program, seed: int
) -> None:
    """Releasing is waiting: directly behind its send that is mostly harmless, and at times not."""
    chance = random.Random(seed)
    for rank in range(len(program.items)):
        for place, item in places_of(program, rank, Op.RELEASE):
            sent = next(p for p, i in places_of(program, rank, Op.SEND) if i[1:] == item[1:])
            if chance.random() < 0.5:
                program = move(program, rank, place, sent + 1)
    try:
        Run(program, seed)
    except DeadlockError:
        text = refused(program)
        assert "cannot go on: ranks wait for each other:\n" in text
        assert_marked(text, program)
    else:
        verify(program)
