"""chunked-1f1b and chunked-zb-h1: what they hold, how long they take, and what verify refuses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest

from pipegrad.errors import PipegradError, ScheduleError
from pipegrad.pipeline.wiring import fitted, wire
from pipegrad.schedules import Action, Schedule, build
from pipegrad.schedules.builtin.chunked import ChunkedOneForwardOneBackward, ChunkedZeroBubbleH1
from pipegrad.schedules.program.lower import lower
from pipegrad.schedules.program.verify import verify
from pipegrad.simulation.costs import Costs, StageCosts
from pipegrad.simulation.simulator import simulate
from tests.support.pairwise import everything
from tests.support.schedules.harm import refused

NAMES = ("chunked-1f1b", "chunked-zb-h1")
RANKS, NUMBERS, CHUNKS = (
    (range(1, 9), range(1, 10), range(1, 9))
    if everything()
    else ((1, 2, 3, 6), (1, 2, 5), (1, 2, 3, 8))
)
SIZES = [*product(RANKS, NUMBERS, CHUNKS)]


def made(name: str, num_ranks: int, num_microbatches: int, chunks: int) -> Schedule:
    sizes = {"num_ranks": num_ranks, "num_microbatches": num_microbatches}
    return build(name, **sizes, chunks=chunks)


@pytest.mark.parametrize("name", NAMES)
def test_a_rank_holds_few_chunks_and_the_bubble_is_that_of_a_chunk(name: str) -> None:
    for num_ranks, number, chunks in SIZES:
        schedule = made(name, num_ranks, number, chunks)
        assert (schedule.num_sequences, schedule.chunks) == (number, chunks)
        total, splits = number * chunks, name == "chunked-zb-h1"
        live = verify(lower(schedule)).live_activations
        first = min(num_ranks - 1 + chunks, total)
        assert max(live) == live[0] == first
        if splits:
            assert set(live) == {first}
        else:
            assert live == tuple(min(first, num_ranks - 1 - r + chunks) for r in range(num_ranks))
            assert len(schedule.grid[0]) == 2 * total + 2 * (num_ranks - 1)


@pytest.mark.parametrize("name", NAMES)
def test_one_chunk_is_the_schedule_of_whole_sequences(name: str) -> None:
    whole = name.removeprefix("chunked-")
    for num_ranks, number in product(RANKS, NUMBERS):
        expected = build(whole, num_ranks=num_ranks, num_microbatches=number)
        assert made(name, num_ranks, number, 1).actions == expected.actions


def test_forwards_go_with_time_and_backwards_against_it() -> None:
    for name, (num_ranks, number, chunks) in product(NAMES, SIZES):
        schedule = made(name, num_ranks, number, chunks)
        for actions in schedule.actions:
            for kind in "FBIW":
                own = [a.microbatch for a in actions if a.kind == kind]
                blocks = [[s * chunks + c for c in range(chunks)] for s in range(number)]
                if kind != "F":
                    blocks = [block[::-1] for block in blocks]
                assert own in ([], [m for block in blocks for m in block])


@pytest.mark.parametrize(
    ("kind", "sizes"), [(ChunkedOneForwardOneBackward, (3, 2, 2)), (ChunkedZeroBubbleH1, (2, 2, 2))]
)
def test_the_grids_of_the_docstrings(kind: type, sizes: tuple[int, int, int]) -> None:
    schedule = made(NAMES[kind is ChunkedZeroBubbleH1], *sizes)
    rows = re.findall(r"^ +(rank \d .*)$", kind.__doc__ or "", re.MULTILINE)
    assert [" ".join(row.split()) for row in rows] == [
        " ".join(row.split()) for row in str(schedule).splitlines()
    ]


def swapped(schedule: Schedule, rank: int, left: Action, right: Action) -> Schedule:
    actions: list[Sequence[Action]] = [*schedule.actions]
    trade = {left: right, right: left}
    actions[rank] = tuple(trade.get(a, a) for a in actions[rank])
    return replace(schedule, actions=tuple(map(tuple, actions)))


@pytest.mark.parametrize("kind", ["F", "B"])
def test_a_schedule_whose_chunks_are_in_another_order_is_refused(kind: str) -> None:
    schedule = made("chunked-1f1b", 2, 2, 3)
    assert kind in ("F", "B")
    wrong = swapped(schedule, 1, Action(1, kind, 0), Action(1, kind, 1))  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match="cannot go on"):
        _ = wrong.ticks


@pytest.mark.parametrize(
    ("kind", "words"),
    [("F", "what the chunk before carries"), ("B", "the gradient of what it carries")],
)
def test_a_program_whose_chunks_are_in_another_order_is_refused(kind: str, words: str) -> None:
    """On one rank nothing but the state orders the chunks of a sequence."""
    schedule = made("chunked-1f1b", 1, 2, 2)
    wrong = swapped(schedule, 0, Action(0, kind, 0), Action(0, kind, 1))  # type: ignore[arg-type]
    assert words in refused(lower(wrong))


@pytest.mark.parametrize("chunks", [0, -1, 1.5, True, "4"])
def test_numbers_that_are_none_are_refused(chunks: object) -> None:
    with pytest.raises(PipegradError, match="chunks is"):
        build("chunked-1f1b", num_ranks=2, num_microbatches=2, chunks=chunks)


def test_a_schedule_has_whole_sequences() -> None:
    schedule = made("chunked-1f1b", 2, 3, 2)
    for chunks in (4, 0, True):
        with pytest.raises(ScheduleError, match="divides the 6 microbatches"):
            replace(schedule, chunks=chunks)


def test_stages_without_a_state_have_no_chunks() -> None:
    wiring = wire({0: (("x",), ("x",), ()), 1: (("x",), ("x",), ())})
    schedule = made("chunked-1f1b", 2, 2, 2)
    assert fitted(schedule, wiring, is_over_batch=False, carries=True) == schedule
    with pytest.raises(ScheduleError, match="no stage carries anything"):
        fitted(schedule, wiring, is_over_batch=False, carries=False)
    whole = made("chunked-1f1b", 2, 2, 1)
    assert fitted(whole, wiring, is_over_batch=False, carries=False) == whole


def test_a_chunk_costs_its_part_of_a_microbatch() -> None:
    """(P-1)(tF+tB) / k is the bubble, and a rank holds (P-1+k) / k of what a sequence needs."""
    stage = StageCosts(forward_seconds=0.8, backward_seconds=1.6, activation_bytes=800)
    for chunks in (1, 2, 4, 8):
        costs = Costs(stages=(stage,) * 3)
        result = simulate(lower(made("chunked-1f1b", 3, 4, chunks)), costs)
        assert result.step_seconds[0] == pytest.approx(4 * 2.4 + 2 * 2.4 / chunks)
        assert result.peak_bytes[0] == 800 // chunks * (2 + chunks)
