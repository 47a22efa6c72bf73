"""v-min and v-half hold no more than they say, and take no longer."""

from __future__ import annotations

import pytest

from pipegrad import schedules
from pipegrad.schedules import Proof, Schedule
from pipegrad.schedules.builtin.v_shaped import VHalf, VMin
from pipegrad.schedules.program.lower import lower
from pipegrad.schedules.program.verify import verify
from tests.support.pairwise import everything

NAMES = ("v-min", "v-half")
RANKS = range(1, 17) if everything() else (1, 2, 3, 4, 5, 6, 8, 9)
# What repeating the blocks takes, of 1, 2, ... 16 ranks and many microbatches, in units. In the
# paper's own code reordering ends there too: as much, or 2 less for v-min of 2 ranks here.
MANY = {
    "v-min": (0, 1, 5, 11, 15, 17, 23, 27, 29, 35, 39, 41, 47, 51, 53, 59),
    "v-half": (0, 1, 5, 5, 11, 11, 17, 17, 23, 23, 29, 29, 35, 35, 41, 41),
}


def limit(name: str, num_ranks: int) -> int:
    """Returns how many half stages a rank may hold."""
    return 2 * ((num_ranks + 4) // 3 if name == "v-min" else (num_ranks + 2) // 2)


def most_bubble(name: str, num_ranks: int, num_microbatches: int) -> int:
    """Returns what the docstring says, in units."""
    if name == "v-min":
        return 4 * num_ranks - 3
    return 3 * num_ranks - 3 if num_microbatches >= num_ranks else max(0, 4 * num_ranks - 5)


def numbers(num_ranks: int) -> list[int]:
    """Returns numbers of microbatches from 1 to 4P: all of them at night."""
    every = range(1, 4 * num_ranks + 1)
    some = {1, 2, 3, num_ranks - 1, num_ranks, num_ranks + 1, 4 * num_ranks}
    return list(every) if everything() or num_ranks <= 3 else sorted(some)


def build(name: str, num_ranks: int, num_microbatches: int, **options: bool) -> Schedule:
    sizes = {"num_ranks": num_ranks, "num_microbatches": num_microbatches}
    return schedules.build(name, **sizes, **options)


def bubble(schedule: Schedule) -> int:
    return len(schedule.grid[0]) - 6 * schedule.num_microbatches


def proven(schedule: Schedule) -> Proof:
    return verify(lower(schedule))


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("name", NAMES)
def test_no_rank_holds_more_or_waits_longer_than_the_schedule_claims(
    name: str, num_ranks: int
) -> None:
    most, last = 0, 0
    for number in numbers(num_ranks):
        made = build(name, num_ranks, number)
        assert made.stage_to_rank == (*range(num_ranks), *reversed(range(num_ranks)))
        most = max(proven(made).live_activations)
        last = bubble(made)
        assert most <= limit(name, num_ranks)
        assert last <= most_bubble(name, num_ranks, number)
    assert most == limit(name, num_ranks), "of 4P microbatches, a rank holds all that it may"
    assert last == MANY[name][num_ranks - 1]


@pytest.mark.parametrize("name", NAMES)
def test_one_microbatch_waits_for_nothing(name: str) -> None:
    """It goes through 4P actions, and then its last rank has a W."""
    for num_ranks in (1, 2, 5, 8):
        assert len(build(name, num_ranks, 1).grid[0]) == max(6, 4 * num_ranks + 1)


def test_few_microbatches_overtake_and_many_follow_the_block() -> None:
    """Nine of sixteen ranks took 45 units more than they compute, in turns."""
    assert bubble(build("v-half", 16, 9)) == 29
    # In turns, with the pause of an even number of ranks, it took four more.
    assert bubble(build("v-half", 8, 32)) == 17
    # Overtaking, 32 microbatches of 8 ranks took 50 more with a limit as small as that of v-min.
    assert bubble(build("v-min", 8, 32)) == 27


def test_the_steady_state_is_the_block() -> None:
    """For 5 ranks no pause is needed, so a rank begins F, F, I and I as the paper draws them.

    A microbatch is 6 units later. The offsets of rank 0 are 0, 9, 10 and 19 in v-min: 0, 3, 4, 1
    of 6. In v-half they are 0, 13, 14 and 28: 0, 1, 2 and 4.
    """
    expected = {"v-min": "FIFI", "v-half": "FFII"}
    for name, kinds in expected.items():
        made = build(name, 5, 40).actions[0]
        middle = [a for a in made if a.kind != "W"][60:100]
        # 0F of a microbatch begins a period.
        begin = next(at for at, a in enumerate(middle) if (a.stage, a.kind) == (0, "F"))
        period = "".join(a.kind for a in middle[begin : begin + 4])
        assert period == kinds
        assert [(a.stage, a.kind) for a in middle[begin : begin + 32]] == [
            (a.stage, a.kind) for a in middle[begin : begin + 4]
        ] * 8


@pytest.mark.parametrize(("name", "made"), [("v-min", VMin), ("v-half", VHalf)])
def test_w_of_shared_weights_can_be_first(name: str, made: type[VMin | VHalf]) -> None:
    plain = build(name, 4, 8)
    assert not plain.head_w_first
    first = build(name, 4, 8, head_w_first=True)
    assert first.head_w_first
    assert first.actions == plain.actions
    assert made(head_w_first=True).generate(num_ranks=4, num_microbatches=8) == first
