"""verify refuses good Programs after random harm, if they cannot be run."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import assume, given, settings

from pipegrad.schedules.program.lower import lower
from pipegrad.schedules.program.program import Collective, Link, Op, Program, decode
from pipegrad.schedules.program.verify import verify
from tests.support.schedules.harm import assert_marked, move, quick, refused, seeds, swap, times
from tests.support.schedules.programs import DeadlockError, Run, places_of, programs, rows

pytestmark = pytest.mark.slow
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


def launch_ahead_of_final(program: Program, chance: random.Random) -> Program | None:
    places = list[tuple[int, int, int]]()
    for rank in range(len(program.items)):
        finals = {item.which: at for at, item in places_of(program, rank, Op.FINAL)}
        for place, item in places_of(program, rank, Op.LAUNCH):
            stages = finals.keys() & set(program.collectives[item.which].stages)
            places += [(rank, place, finals[stage]) for stage in sorted(stages)]
    return move(program, *chance.choice(places)) if places else None


WORK = (Op.POST_RECEIVE, Op.WAIT_RECEIVE, Op.COMPUTE, Op.SEND, Op.RELEASE, Op.FINAL)
HARMS: dict[str, Harm] = {
    **{f"missing {op}": some(op, 0) for op in (*WORK, Op.JOIN)},  # LAUNCH: below
    **{f"doubled {op}": some(op, 2) for op in (*WORK, Op.LAUNCH)},
    "swapped sends of an edge": swap_sends,
    "wait behind its reader": wait_behind_reader,
    "launch ahead of its final": launch_ahead_of_final,
}


@pytest.mark.parametrize("harm", HARMS)
@quick
@given(program=programs(min_ranks=2), seed=seeds)
def test_harm_is_refused_and_marked_in_the_grid(harm: str, program: Program, seed: int) -> None:
    harmed = HARMS[harm](program, random.Random(seed))
    assume(harmed is not None)
    assert harmed is not None
    assert_marked(refused(harmed), harmed)


@quick
@given(program=programs(min_ranks=2), seed=seeds)
def test_a_missing_launch_is_refused_with_its_rank(program: Program, seed: int) -> None:
    at = one_of(program, random.Random(seed), Op.LAUNCH)
    assume(at is not None)
    assert at is not None
    rank, place = at
    collective = program.collectives[decode(program.items[rank][place]).which]
    assume(not collective.readers)  # what is published and not reduced is marked in the grid
    del program.items[rank][place]
    assert refused(program) == f"rank {rank} never launches {collective.name}"


@quick
@given(program=programs(min_ranks=2), seed=seeds)
def test_swapped_collectives_are_refused_with_their_ranks(program: Program, seed: int) -> None:
    chance = random.Random(seed)
    places = program.schedule.stage_to_rank
    ranks = tuple(sorted(chance.sample(range(max(places) + 1), 2)))
    stages = tuple(sorted(places.index(rank) for rank in ranks))
    pair = [Collective(name, ranks, stages, comm_stream=7) for name in ("left", "right")]
    both = lower(program.schedule, links=program.links, collectives=(*program.collectives, *pair))
    verify(both)
    rank = chance.choice(ranks)
    number = len(program.collectives)
    left, right = [p for p, i in places_of(both, rank, Op.LAUNCH) if i.which >= number]
    other = ranks[rank == ranks[0]]
    text = refused(swap(both, rank, left, right))
    assert text.startswith("collectives wait for each other, in the orders they launch:\n  rank ")
    assert f"\n  rank {rank}, comm stream 7: right, over ranks {list(ranks)}" in text
    assert f"\n  rank {other}, comm stream 7: left, over ranks {list(ranks)}" in text
    with pytest.raises(DeadlockError):
        Run(swap(both, rank, left, right), seed)


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


def test_a_release_that_its_peer_cannot_answer_is_refused() -> None:
    order = ("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1", "2F0 2F1 3F0 3F1 3B0 3B1 2B0 2B1")
    schedule = rows(*order, stages=(0, 1, 2, 2), num_microbatches=2)
    links = [*(Link("x", stage, (stage + 1,)) for stage in range(3)), Link("skip", 0, (3,))]
    program = lower(schedule, links=links, depth=0)
    verify(program)
    (sent, _), *_ = places_of(program, 0, Op.SEND)[1:]
    (release,) = [
        place
        for place, item in places_of(program, 0, Op.RELEASE)
        if program.words(item) == "release        skip of 0F0 to rank 2"
    ]
    assert refused(move(program, 0, release, sent + 1)) == (
        "schedule 'mine' cannot go on: ranks wait for each other:\n"
        "  rank 0: release        skip of 0F0 to rank 2, for 0F1\n"
        "  rank 1: wait-receive   x of 0F1 from rank 0, for 1F1\n"
        "  rank 2: wait-receive   x of 1F1 from rank 1, for 2F1\n"
        "rank 0  0F0   >0F1< 0B0   0B1\n"
        "rank 1  1F0   >1F1< 1B0   1B1\n"
        "rank 2  2F0   >2F1< 3F0   3F1   3B0   3B1   2B0   2B1"
    )
