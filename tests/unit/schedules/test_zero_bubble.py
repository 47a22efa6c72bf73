"""zb-h1, zbv, v-min and v-half take as long as they must, and hold no more than they say."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble

from pipegrad import schedules
from pipegrad.schedules import Kind, Schedule, read_csv, write_csv
from pipegrad.schedules.program.lower import lower
from pipegrad.schedules.program.verify import verify
from tests.support.pairwise import everything
from tests.support.schedules.makespan import makespan

RANKS = range(1, 11) if everything() else (1, 2, 3, 4, 7)
NUMBERS = range(1, 21) if everything() else (1, 2, 3, 5, 8, 13, 20)


def build(name: str, num_ranks: int, num_microbatches: int, **options: Any) -> Schedule:
    numbers = {"num_ranks": num_ranks, "num_microbatches": num_microbatches}
    return schedules.build(name, **numbers, **options)


def live_activations(schedule: Schedule) -> tuple[int, ...]:
    return verify(lower(schedule)).live_activations


@pytest.mark.parametrize("num_ranks", [*RANKS, 12])
def test_zb_h1_takes_no_longer_than_any_schedule_of_one_stage_a_rank(num_ranks: int) -> None:
    for number in (*NUMBERS, 64):
        made = build("zb-h1", num_ranks, number)
        assert made.stage_to_rank == tuple(range(num_ranks))
        # The last rank begins P-1 late, as the first microbatch goes there through all others, and
        # computes 3M. Or: it has computed its M forwards and inputs' gradients at P-1+2M, at the
        # earliest; the last of these goes back through P-1 ranks, and then the first rank has a W.
        at_least = max(3 * number + num_ranks - 1, 2 * num_ranks + 2 * (number - 1) + 1)
        assert len(made.grid[0]) == at_least
        assert live_activations(made) == (min(number, num_ranks),) * num_ranks


@pytest.mark.parametrize("num_ranks", RANKS)
def test_zbv_has_no_bubble_but_that_its_last_rank_begins_late(num_ranks: int) -> None:
    for number in {*NUMBERS, *range(2 * num_ranks - 2, 2 * num_ranks + 2), 64} - {0}:
        made, enough = build("zbv", num_ranks, number), number >= 2 * num_ranks - 1
        assert made.stage_to_rank == (*range(num_ranks), *reversed(range(num_ranks)))
        begins_late, too_few = num_ranks - 1 + 6 * number, 4 * num_ranks + 4 * number - 2
        assert len(made.grid[0]) == (begins_late if enough else max(begins_late, too_few))
        # What a rank computes down and up before its first W, as far as there are so many: 2P.
        assert live_activations(made) == tuple(
            min(number, 2 * num_ranks - 1 - rank) + min(number, rank + 1)
            for rank in range(num_ranks)
        )
        assert (set(live_activations(made)) == {2 * num_ranks}) == enough


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("forward", "input_gradient", "weights_gradient"),
    [(1, 1, 1), (3, 4, 2), (10, 12, 8), (2, 3, 3), (4, 1, 3)],
)
def test_zb_h1_waits_for_f_and_i_less_w_a_rank_but_no_less_than_f_or_i(
    forward: int, input_gradient: int, weights_gradient: int, num_ranks: int
) -> None:
    units: dict[Kind, int] = {"F": forward, "I": input_gradient, "W": weights_gradient}
    took = makespan(build("zb-h1", num_ranks, 4 * num_ranks), units)
    a_rank = max(forward, input_gradient, forward + input_gradient - weights_gradient)
    assert took - 4 * num_ranks * sum(units.values()) == (num_ranks - 1) * a_rank


@pytest.mark.parametrize("name", ["zb-h1", "zbv", "v-min", "v-half"])
def test_head_w_first_is_said_and_changes_no_action(name: str) -> None:
    plain, made = build(name, 3, 5), build(name, 3, 5, head_w_first=True)
    assert (plain.head_w_first, made.head_w_first) == (False, True)
    assert made == replace(plain, head_w_first=True)
    assert read_csv(write_csv(made), name=name) == plain  # the notation has no word for it


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_zbv_is_that_of_torch(num_ranks: int) -> None:
    for number in (1, num_ranks, 2 * num_ranks - 1, 2 * num_ranks, 4 * num_ranks):
        stage: Any = SimpleNamespace(
            num_stages=2 * num_ranks, group_size=num_ranks, group_rank=0, submod=nn.Identity()
        )
        theirs = ScheduleZBVZeroBubble([stage, stage], number)
        orders = [theirs.pipeline_order[rank] for rank in range(num_ranks)]
        found = [[str(action) for action in order if action] for order in orders]
        assert found == [[*map(str, row)] for row in build("zbv", num_ranks, number).actions]


# v-min and v-half.

NAMES = ("v-min", "v-half")
V_RANKS = range(1, 17) if everything() else (1, 2, 3, 4, 5, 6, 8, 9)
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


def bubble(schedule: Schedule) -> int:
    return len(schedule.grid[0]) - 6 * schedule.num_microbatches


@pytest.mark.parametrize("num_ranks", V_RANKS)
@pytest.mark.parametrize("name", NAMES)
def test_no_rank_holds_more_or_waits_longer_than_the_schedule_claims(
    name: str, num_ranks: int
) -> None:
    most, last = 0, 0
    for number in numbers(num_ranks):
        made = build(name, num_ranks, number)
        assert made.stage_to_rank == (*range(num_ranks), *reversed(range(num_ranks)))
        most = max(live_activations(made))
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
