"""Steps behind the first one, and what-ifs of a split backward."""

from __future__ import annotations

import pytest

from pipegrad.schedules import build, lower
from pipegrad.simulation.costs import Costs, StageCosts
from pipegrad.simulation.explain.breakdown import break_down
from pipegrad.simulation.explain.critical_path import critical_path
from pipegrad.simulation.explain.explanation import what_ifs
from pipegrad.simulation.explain.lookup import Lookup
from pipegrad.simulation.simulator import simulate
from pipegrad.simulation.timeline import MemoryPoint, Span, Timeline

TWO_STEPS = Timeline(
    "two steps",
    "measured",
    1,
    (0,),
    1,
    (Span(0, "F", 0, 4), Span(0, "F", 5, 9, 1)),
    (5.0, 12.0),
    ((MemoryPoint(0.0, 10), MemoryPoint(4.0, 30), MemoryPoint(8.0, 20)),),
)


def test_a_step_behind_the_first_takes_from_its_begin_to_its_end() -> None:
    assert break_down(Lookup(TWO_STEPS), 1).seconds == 7.0


def test_a_step_alone_begins_with_the_memory_that_is_held_then() -> None:
    assert TWO_STEPS.of_step(1).memory == ((MemoryPoint(0.0, 30), MemoryPoint(3.0, 20)),)
    assert TWO_STEPS.of_step(0).memory[0][0] == MemoryPoint(0.0, 10)


def test_a_rank_that_computes_faster_has_shorter_weight_gradients_too() -> None:
    program = lower(build("zb-h1", num_ranks=2, num_microbatches=4))
    own = StageCosts(1.0, 2.0, weight_seconds=0.5), StageCosts(3.0, 6.0, weight_seconds=1.5)
    costs = Costs(own)
    timeline = simulate(program, costs).timeline
    assert timeline is not None
    path = critical_path(Lookup(timeline), 0)
    changes = {found.change: found.costs for found in what_ifs(program, costs, path)}
    (evened,) = (own for change, own in changes.items() if change.startswith("layers moved"))
    slow = evened.stages[1]
    assert slow.weight_seconds / 1.5 == pytest.approx(slow.forward_seconds / 3.0)
    assert 0.5 < slow.forward_seconds / 3.0 < 1.0
