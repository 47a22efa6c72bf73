"""zb-h1 and zbv take as long as they must, and hold no more than they say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble

from pipegrad import schedules
from pipegrad.schedules import Action, Kind, Schedule, read_csv, write_csv
from pipegrad.schedules.program.lower import lower
from pipegrad.schedules.program.verify import verify
from tests.support.pairwise import everything
from tests.support.schedules.makespan import makespan

NAMES = ("zb-h1", "zbv")
RANKS = range(1, 11) if everything() else (1, 2, 3, 4, 7)
NUMBERS = range(1, 21) if everything() else (1, 2, 3, 5, 8, 13, 20)
IFW: tuple[Kind, ...] = ("I", "F", "W")
UNITS: dict[Kind, int] = {"F": 1, "B": 2, "I": 1, "W": 1}


def build(name: str, num_ranks: int, num_microbatches: int, **options: Any) -> Schedule:
    numbers = {"num_ranks": num_ranks, "num_microbatches": num_microbatches}
    return schedules.build(name, **numbers, **options)


def live_activations(schedule: Schedule) -> tuple[int, ...]:
    return verify(lower(schedule)).live_activations


def needs(action: Action, num_stages: int) -> set[Action]:
    """Returns what an action waits for, where all backwards are full or all are split."""
    stage, kind, microbatch = action
    if kind == "F":
        return {Action(stage - 1, "F", microbatch)} if stage > 0 else set()
    if kind == "W":
        return {Action(stage, "I", microbatch)}
    later = {Action(stage + 1, kind, microbatch)} if stage + 1 < num_stages else set()
    return {Action(stage, "F", microbatch), *later}


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


@pytest.mark.parametrize("num_ranks", range(2, 9))
def test_the_bubble_is_a_third_of_that_of_1f1b_and_in_a_v_a_sixth(num_ranks: int) -> None:
    def bubble(name: str, units: Mapping[Kind, int], work: int) -> float:
        number = 4 * num_ranks
        return makespan(build(name, num_ranks, number), units) - work * number

    twice = {kind: 2 * unit for kind, unit in UNITS.items()}  # a stage is two of zbv
    assert bubble("1f1b", UNITS, 3) == 3 * (num_ranks - 1)
    assert bubble("zb-h1", UNITS, 3) == num_ranks - 1
    assert bubble("1f1b", twice, 6) == 6 * (num_ranks - 1)
    assert bubble("zbv", UNITS, 6) == num_ranks - 1


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


def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """Returns what holds as much as ZB-H2, 2P-1: at each tick an I if possible, else F, else W."""
    rows = [list[Action]() for _ in range(num_ranks)]
    done = set[Action]()
    while len(done) < 3 * num_ranks * num_microbatches:
        begun = list[Action]()
        for rank, row in enumerate(rows):
            number = Counter(action.kind for action in row)
            may = {kind: number[kind] < num_microbatches for kind in IFW}
            may["F"] &= number["F"] - number["W"] < 2 * num_ranks - 1
            turns = [Action(rank, kind, number[kind]) for kind in IFW if may[kind]]
            begun += [turn for turn in turns if needs(turn, num_ranks) <= done][:1]
        for action in begun:
            rows[action.stage].append(action)
        done.update(begun)
    actions = tuple(map(tuple, rows))
    return Schedule("zb-h2", num_microbatches, tuple(range(num_ranks)), actions)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_what_zb_h2_holds_more_buys_time_only_where_i_takes_longer(num_ranks: int) -> None:
    longer: dict[Kind, int] = {"F": 3, "I": 4, "W": 2}
    for num_microbatches in (2 * num_ranks, 4 * num_ranks, 64):
        more = zb_h2(num_ranks, num_microbatches)
        assert live_activations(more) == (2 * num_ranks - 1,) * num_ranks
        warm_ups = [[action.kind for action in row].index("I") for row in more.actions]
        assert warm_ups == [2 * (num_ranks - rank) - 1 for rank in range(num_ranks)]
        made = build("zb-h1", num_ranks, num_microbatches)
        assert len(more.grid[0]) == len(made.grid[0])
        assert makespan(made, longer) - makespan(more, longer) == 2 * (num_ranks - 1)


@pytest.mark.parametrize("name", NAMES)
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
