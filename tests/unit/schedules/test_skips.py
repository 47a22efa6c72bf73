"""Skips have a connection of their own where they would hold up what the next stage takes."""

from __future__ import annotations

import pytest

from pipegrad.schedules import Action, Schedule, build, lower
from pipegrad.schedules.program.program import Channel, Link, Program
from pipegrad.simulation.costs import Costs, Network, StageCosts
from tests.support.schedules.makespan import recorded

NEXT = tuple(Link("x", stage, (stage + 1,)) for stage in range(3))
LOOP, V, ROW = (0, 1, 0, 1), (0, 1, 1, 0), (0, 1, 2, 3)  # stages to ranks


def skips(places: tuple[int, ...], *others: Link) -> list[tuple[str, str, int, int]]:
    """Returns the names of skips, which way they go, and between which ranks."""
    num_ranks = 1 + max(places)
    order = [*range(4), *range(7, 3, -1)]
    actions = tuple(
        tuple(
            Action(step if step < 4 else step - 4, "F" if step < 4 else "B", 0)
            for step in order
            if places[step % 4] == rank
        )
        for rank in range(num_ranks)
    )
    program = lower(Schedule("some", 1, places, actions), links=[*NEXT, *others])
    return sorted((program.links[c.link].name, *c[1:]) for c in program.skips)


@pytest.mark.parametrize(
    ("places", "others", "expected"),
    [
        (ROW, [Link("skip", 0, (3,))], []),  # nothing else goes from rank 0 to rank 3
        (LOOP, [], []),
        (LOOP, [Link("skip", 0, (3,))], [("skip", "B", 1, 0), ("skip", "F", 0, 1)]),
        (V, [Link("skip", 0, (2,))], [("skip", "B", 1, 0), ("skip", "F", 0, 1)]),
        (V, [Link("skip", 0, (3,))], []),  # it stays on its rank
        # The next stage takes it, too.
        (LOOP, [Link("skip", 0, (1, 3))], []),
        (LOOP, [Link("skip", 0, (2, 3))], [("skip", "B", 1, 0), ("skip", "F", 0, 1)]),
        (LOOP, [Link("mask", 0, (3,), False)], [("mask", "F", 0, 1)]),
        (LOOP, [Link("skip", 1, (3,))], []),
        # From rank 1 only the gradient of x comes back to rank 0, and none of a mask.
        ((0, 1, 1, 1), [Link("skip", 0, (2,))], [("skip", "B", 1, 0), ("skip", "F", 0, 1)]),
    ],
)
def test_a_value_that_skips_stages_beside_one_that_does_not(
    places: tuple[int, ...], others: list[Link], expected: list[tuple[str, str, int, int]]
) -> None:
    assert skips(places, *others) == expected


def test_an_evaluation_knows_the_same_channels() -> None:
    schedule = build("interleaved-1f1b", num_ranks=2, num_microbatches=2)
    links = [*NEXT, Link("skip", 0, (3,))]
    training = lower(schedule, links=links)
    evaluation = lower(schedule, links=links, forward_only=True)
    assert training.skips == {Channel(3, "F", 0, 1), Channel(3, "B", 1, 0)}
    assert evaluation.skips == {Channel(3, "F", 0, 1)}


def arrivals(program: Program) -> dict[str, float]:
    """Returns when values of the first microbatch come to rank 1, if NICs send a byte a second."""
    stages = (StageCosts(1.0, 2.0, outputs={"x": 1, "skip": 10}),) * 4
    timeline = recorded(program, Costs(stages, Network(nic_bytes_per_second=1.0)))
    spans = (s for s in timeline.spans if s.kind == "transfer" and (s.rank, s.peer) == (0, 1))
    return {s.label.split(" of ")[0]: s.end for s in spans if s.label.endswith("of 0F0")}


def test_in_a_simulation_both_share_the_nic() -> None:
    """Behind the skip x would come at 1 + 10 + 1."""
    schedule = build("interleaved-1f1b", num_ranks=2, num_microbatches=2)
    program = lower(schedule, links=[Link("skip", 0, (3,)), *NEXT])
    found = arrivals(program)
    assert found["x"] == pytest.approx(1 + 2)
    assert found["skip"] > 12
