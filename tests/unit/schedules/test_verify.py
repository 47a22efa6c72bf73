"""verify passes what runs to its end, says what it needs, and refuses everything else."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipegrad.errors import ScheduleError
from pipegrad.schedules import Action, Schedule
from pipegrad.schedules.builtin.one_f_one_b import OneForwardOneBackward
from pipegrad.schedules.program.lower import lower
from pipegrad.schedules.program.program import Link, Op, Program, action_index, encode
from pipegrad.schedules.program.verify import verify
from tests.support.schedules.harm import move, quick, refused, seeds, swap, times
from tests.support.schedules.programs import Run, expected, places_of, programs, rows, with_items

# What can be run.


@quick
@given(program=programs(), forward_only=st.booleans(), depth=st.integers(0, 5), seed=seeds)
def test_what_verify_passes_runs_to_its_end_whatever_the_delays(
    program: Program, forward_only: bool, depth: int, seed: int
) -> None:
    if forward_only:
        program = lower(program.schedule, links=program.links, depth=depth, forward_only=True)
    proof = verify(program)
    run = Run(program, seed)
    assert (run.values, run.gradients) == expected(program)
    assert (proof.receive_buffers, proof.in_flight) == (tuple(run.buffers), tuple(run.in_flight))
    if not forward_only:
        assert (proof.live_activations, proof.live_graphs) == (tuple(run.live), tuple(run.graphs))
        assert run.held_up == []


def test_forwards_alone_must_be_complete_too() -> None:
    schedule = rows("0F0 0F1", "1F0", num_microbatches=2)
    with pytest.raises(ScheduleError, match=r"expected F of .* stage 1 microbatch 1 has \[\]"):
        verify(lower(schedule, links=(), forward_only=True))


# What a schedule's author gets wrong, and the whole message.

INCOMPLETE = (
    "schedule 'mine' is not complete: expected F and B (or F, I and W) of each stage and "
    "microbatch once, on the stage's rank; found "
)


WRONG: dict[str, tuple[Schedule, list[str]]] = {
    "cycle": (
        rows("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", num_microbatches=2),
        [
            "schedule 'mine' cannot go on: ranks wait for each other:",
            "  rank 0: wait-receive   gradient of x of 0F0 from rank 1, for 0B0",
            "  rank 1: wait-receive   x of 0F1 from rank 0, for 1F1",
            "rank 0  0F0   >0B0< 0F1   0B1",
            "rank 1  1F0   >1F1< 1B0   1B1",
        ],
    ),
    "doubled": (
        rows("0F0 0B0 0B0", "1F0 1B0"),
        [f"{INCOMPLETE}0B0 2 times", "rank 0  0F0   >0B0< >0B0<", "rank 1  1F0   1B0"],
    ),
    "wrong rank": (
        rows("0F0 0B0 1B0", "1F0"),
        [f"{INCOMPLETE}1B0 on rank 0", "rank 0  0F0   0B0   >1B0<", "rank 1  1F0"],
    ),
    "missing": (
        rows("0F0 0B0", "1F0"),
        [f"{INCOMPLETE}stage 1 microbatch 0 has ['F']", "rank 0  0F0   0B0", "rank 1  >1F0<"],
    ),
    "backward first": (
        rows("0F0 0F1 0B0 0B1", "1B0 1F0 1F1 1B1", num_microbatches=2),
        [
            "schedule 'mine', rank 1, 1B0: compute        1B0: its forward comes first",
            "rank 0  0F0   0F1   0B0   0B1",
            "rank 1  >1B0< 1F0   1F1   1B1",
        ],
    ),
    "weights first": (
        rows("0F0 0B0", "1F0 1W0 1I0"),
        [
            (
                "schedule 'mine', rank 1, 1W0: compute        1W0: "
                "the input's gradient, I, comes first"
            ),
            "rank 0  0F0   0B0",
            "rank 1  1F0   >1W0< 1I0",
        ],
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_schedules_are_refused_with_their_grid(wrong: str) -> None:
    schedule, lines = WRONG[wrong]
    assert refused(lower(schedule)).splitlines() == lines


def test_crossed_sends_are_refused_with_both() -> None:
    schedule = OneForwardOneBackward().generate(num_ranks=2, num_microbatches=2)
    program = lower(schedule, depth=1)
    (left, _), (right, _) = places_of(program, 1, Op.POST_RECEIVE)
    assert refused(swap(program, 1, left, right)) == (
        "schedule '1f1b', rank 0, 0F0: send           x of 0F0 to rank 1: rank 1 expects another "
        "transfer of the edge here: post-receive   x of 0F1 from rank 0\n"
        "rank 0  >0F0< 0F1   0B0   0B1\n"
        "rank 1  1F0   1B0   1F1   1B1"
    )


# Harm to items that few Programs have.


def joining() -> Program:
    """Returns a Program whose rank 0 has one item of each kind, at least."""
    schedule = rows("0F0 0B0", "1F0 1B0", "2F0 2B0", stages=(0, 1, 2))
    links = [Link("x", 0, (1, 2)), Link("y", 1, (2,))]
    return lower(schedule, links=links, synced=(0, 1))


def splitting() -> Program:
    """Returns a Program whose rank 0 splits backward, and computes first what others wait for."""
    order = "0F0 0F1 0I0 0I1 0W0 0W1"
    schedule = rows(order, order.replace(" 0", " 1").replace("0F0", "1F0", 1), num_microbatches=2)
    return lower(replace(schedule, head_w_first=True))


def moved(op: Op, to: Op, program: Program | None = None) -> Program:
    """Returns it with the only item of one kind in front of the first of another."""
    program = program or joining()
    ((place, _),) = places_of(program, 0, op)
    return move(program, 0, place, places_of(program, 0, to)[0][0])


def with_more(action: Action) -> Program:
    program = joining()
    more = encode(Op.COMPUTE, action_index(action), action.microbatch)
    return with_items(program, 0, [*program.items[0], more])


def only(op: Op, number: int, program: Program | None = None) -> Program:
    """Returns it with the only item of a kind of rank 0 as often as said."""
    program = program or joining()
    ((place, _),) = places_of(program, 0, op)
    return times(program, 0, place, number)


MORE_HARM: dict[str, Callable[[], Program]] = {
    "no wait for parameters": lambda: only(Op.FIRST_USE, 0),
    "a wait for parameters after their use": lambda: moved(Op.FIRST_USE, Op.LAST_BACKWARD),
    "no last backward": lambda: only(Op.LAST_BACKWARD, 0),
    "two last backwards": lambda: only(Op.LAST_BACKWARD, 2),
    "inputs never final": lambda: only(Op.INPUTS_FINAL, 0, splitting()),
    "inputs final twice": lambda: only(Op.INPUTS_FINAL, 2, splitting()),
    "inputs final too early": lambda: moved(Op.INPUTS_FINAL, Op.COMPUTE, splitting()),
    "inputs final when all is": lambda: moved(Op.FINAL, Op.INPUTS_FINAL, splitting()),
    "shared weights twice": lambda: only(Op.SHARED_WEIGHTS, 2, splitting()),
    "shared weights too early": lambda: moved(Op.SHARED_WEIGHTS, Op.INPUTS_FINAL, splitting()),
    "an action of another rank": lambda: with_more(Action(1, "F", 0)),
    "an action of no microbatch": lambda: with_more(Action(0, "F", 1)),
}


def test_what_is_harmed_below_is_passed_unharmed() -> None:
    verify(joining())
    verify(splitting())
    verify(only(Op.FIRST_USE, 1))


@pytest.mark.parametrize("harm", MORE_HARM)
def test_more_harm_is_refused(harm: str) -> None:
    refused(MORE_HARM[harm]())


def test_a_value_must_leave_before_its_stage_makes_another_one() -> None:
    program = lower(rows("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1", num_microbatches=2))
    (first, _), (second, _) = places_of(program, 0, Op.SEND)
    assert second - first == 2  # a forward lies between them
    late = refused(move(program, 0, first, second))
    assert "sent after stage 0 has computed another one" in late


# Speed.


def test_a_million_items_are_proven_in_seconds() -> None:
    large = lower(OneForwardOneBackward().generate(num_ranks=64, num_microbatches=1590))
    assert large.num_items >= 1_000_000
    began = time.process_time()  # other processes may have the machine meanwhile
    proof = verify(large)
    assert time.process_time() - began < 30  # 3.3 s here: this is for what grows faster
    assert proof.live_activations == tuple(range(64, 0, -1))
