"""Schedules are complete, possible and as their docstrings draw them; others are refused."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable
from dataclasses import replace

import pytest

from pipegrad import schedules
from pipegrad.errors import PluginOptionError, ScheduleError
from pipegrad.schedules import Action, Schedule, ScheduleGenerator
from pipegrad.schedules.builtin.eager import EagerOneForwardOneBackward
from pipegrad.schedules.builtin.gpipe import GPipe
from pipegrad.schedules.builtin.hop_aware import HopAwareOneForwardOneBackward
from pipegrad.schedules.builtin.interleaved import InterleavedOneForwardOneBackward
from pipegrad.schedules.builtin.one_f_one_b import OneForwardOneBackward
from pipegrad.schedules.builtin.v_shaped import VHalf, VMin
from pipegrad.schedules.builtin.zb_h1 import ZeroBubbleH1
from pipegrad.schedules.builtin.zbv import ZeroBubbleV
from pipegrad.schedules.torch_csv import read_csv, write_csv
from tests.support.schedules.programs import rows


@pytest.mark.parametrize(
    ("generator", "numbers"),
    [
        (GPipe(), (3, 3)),
        (OneForwardOneBackward(), (3, 4)),
        (EagerOneForwardOneBackward(), (3, 6)),
        (HopAwareOneForwardOneBackward(hop_seconds=(0, 0.5), compute_seconds=1), (3, 5)),
        (InterleavedOneForwardOneBackward(), (2, 2)),
        (ZeroBubbleH1(), (3, 4)),
        (ZeroBubbleV(), (2, 3)),
        (VHalf(), (2, 3)),
        (VMin(), (2, 3)),
    ],
    ids=lambda given: type(given).__name__,
)
def test_the_docstring_draws_the_grid(
    generator: ScheduleGenerator, numbers: tuple[int, int]
) -> None:
    num_ranks, num_microbatches = numbers
    made = generator.generate(num_ranks=num_ranks, num_microbatches=num_microbatches)
    drawn = re.search(r"::\n\n(.*?)\n\n", inspect.getdoc(generator) or "", re.DOTALL)
    assert drawn is not None
    assert textwrap.dedent(drawn[1]) == str(made)


LIVE: dict[str, Callable[[int, int], int]] = {
    "gpipe": lambda later, num_microbatches: num_microbatches,
    "1f1b": lambda later, num_microbatches: min(num_microbatches, later + 1),
    "eager-1f1b": lambda later, num_microbatches: min(num_microbatches, 2 * later + 1),
}


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("num_microbatches", [1, 2, 5, 15, 20])
@pytest.mark.parametrize("name", LIVE)
def test_one_stage_a_rank_takes_as_long_as_it_must(
    name: str, num_ranks: int, num_microbatches: int
) -> None:
    made = schedules.build(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    assert made.stage_to_rank == tuple(range(num_ranks))
    assert len(made.grid[0]) == 2 * (num_microbatches + num_ranks - 1)
    expected = [LIVE[name](num_ranks - 1 - rank, num_microbatches) for rank in range(num_ranks)]
    assert [live(made, rank) for rank in range(num_ranks)] == expected
    kinds = [[action.kind for action in row] for row in made.actions]
    assert [row.index("B") for row in kinds] == expected
    assert sorted(made.stage_ticks, reverse=True) == list(made.stage_ticks)


@pytest.mark.parametrize("stages_per_rank", [1, 2, 3])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_interleaving_makes_the_bubble_smaller(
    rounds: int, num_ranks: int, stages_per_rank: int
) -> None:
    numbers = {"num_ranks": num_ranks, "num_microbatches": rounds * num_ranks}
    options = {"stages_per_rank": stages_per_rank}
    made = schedules.build("interleaved-1f1b", **numbers, **options)
    assert made.stage_to_rank == tuple(range(num_ranks)) * stages_per_rank
    work = 2 * numbers["num_microbatches"] * stages_per_rank
    assert len(made.grid[0]) == work + 2 * (num_ranks - 1)


def live(schedule: Schedule, rank: int) -> int:
    """Returns the most microbatches whose activations a rank holds at a time."""
    held, most = 0, 0
    for action in schedule.actions[rank]:
        held += 1 if action.kind == "F" else -1
        most = max(most, held)
    return most


def test_interleaved_states_what_it_takes() -> None:
    with pytest.raises(ScheduleError, match=r"multiple of 4 .* found 6; the nearest is"):
        schedules.build("interleaved-1f1b", num_ranks=4, num_microbatches=6)
    with pytest.raises(ScheduleError, match="the nearest is 4"):
        schedules.build("interleaved-1f1b", num_ranks=4, num_microbatches=1)
    for numbers in ((0, 4), (4, 0), (-1, 4)):
        with pytest.raises(ScheduleError, match="at least 1 rank and 1 microbatch"):
            schedules.build("1f1b", num_ranks=numbers[0], num_microbatches=numbers[1])
    with pytest.raises(PluginOptionError, match="stages_per_rank is 0, expected at least 1"):
        schedules.build("interleaved-1f1b", num_ranks=4, num_microbatches=4, stages_per_rank=0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (rows("0F0 0B0", "1F0 1B0 1I0"), r"found stage 1 microbatch 0 has \['B', 'F', 'I'\]"),
        (rows("0F0 0B0 2F0", "1F0 1B0"), "found 2F0 on rank 0"),
        (rows("0F0 0W0 0I0", "1F0 1I0 1W0"), r"never come: \{0: '0W0'\}"),
    ],
)
def test_what_can_never_be_run_is_refused_with_its_rows(wrong: Schedule, message: str) -> None:
    with pytest.raises(ScheduleError, match=message) as caught:
        _ = wrong.ticks
    assert re.search(r"\nrank 0  >?0", str(caught.value))
    # Issue 16, point 11: printing a schedule that cannot be run raised.
    assert str(rows("0B0 0F0", stages=(0,))) == "rank 0  0B0 0F0"


A = Action
NO_SCHEDULES: dict[str, tuple[Callable[[], Schedule], str]] = {
    "words": (lambda: Schedule("s", 1, (0,), (("0F0", "0B0"),)), "rank 0 is '0F0', expected an"),  # type: ignore[arg-type]
    "kind": (lambda: Schedule("s", 1, (0,), ((A(0, "f", 0),),)), "kind='f'"),  # type: ignore[arg-type]
    "number": (lambda: Schedule("s", 1, (0,), ((A(0, "F", 0.0),),)), "microbatch=0.0"),  # type: ignore[arg-type]
    "a gap": (lambda: Schedule("s", 1, (0, 5), ((), ())), r"stage_to_rank is \(0, 5\)"),
    "no stage": (lambda: Schedule("s", 1, (), ()), "stage_to_rank is"),
    "no microbatch": (lambda: Schedule("s", 0, (0,), ((),)), "num_microbatches is 0"),
    "feeds": (lambda: Schedule("s", 1, (0, 0), ((),), feeds=((), (1,))), "feeds is"),
}


@pytest.mark.parametrize("case", NO_SCHEDULES)
def test_what_is_no_schedule_is_refused_in_words(case: str) -> None:
    """Issue 16, point 10 (runtime 15): AttributeError, IndexError and TypeError of our own."""
    make, message = NO_SCHEDULES[case]
    with pytest.raises(ScheduleError, match=message):
        make()


TOWERS = ("0F0 0B0", "1F0 1B0", "2F0 2B0")  # stages 0 and 1 both feed stage 2


def test_a_schedule_is_drawn_along_what_feeds_what() -> None:
    """Issue 16, point 11: ticks and the grid took every pipeline for a chain."""
    places = (0, 1, 2)
    towers = replace(rows(*TOWERS, stages=places), feeds=((), (), (0, 1)))
    assert str(towers).splitlines() == [
        "rank 0  0F0         0B0",
        "rank 1  1F0         1B0",
        "rank 2      2F0 2B0",
    ]
    assert towers.stage_ticks == (3, 3, 2)
    with pytest.raises(ScheduleError, match="cannot go on"):
        _ = rows("1F0 0F0 0B0 1B0", stages=(0, 0)).ticks
    apart = replace(rows("1F0 0F0 0B0 1B0", stages=(0, 0)), feeds=((), ()))
    assert str(apart) == "rank 0  1F0 0F0 0B0 1B0"
    assert read_csv(write_csv(apart), name="mine", feeds=apart.feeds) == apart
