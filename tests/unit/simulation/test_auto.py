"""auto: a schedule of its own name, of costs that are given or measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipegrad import schedules
from pipegrad.errors import PluginOptionError
from pipegrad.schedules.measured import Times
from pipegrad.simulation.auto import Auto, costs_of
from pipegrad.simulation.costs import Costs, Network, StageCosts
from tests.support.schedules.makespan import warm_ups as warm_ups_of

STAGE = StageCosts(forward_seconds=0.01, backward_seconds=0.02, outputs={"x": 2**20})
COSTS = Costs((STAGE,) * 4, Network(nic_bytes_per_second=125e6))
SIZES = {"num_ranks": 4, "num_microbatches": 16}


def warm_ups(generator: Auto) -> list[int]:
    return warm_ups_of(generator.generate(**SIZES))


def test_costs_may_be_a_file_its_content_or_themselves(tmp_path: Path) -> None:
    COSTS.save(tmp_path / "costs.json")
    eager = schedules.build("eager-1f1b", **SIZES)
    for costs in (COSTS, COSTS.to_json(), tmp_path / "costs.json", str(tmp_path / "costs.json")):
        assert schedules.build("auto", costs=costs, **SIZES) == eager


def test_without_costs_it_begins_as_1f1b_and_chooses_by_what_was_measured() -> None:
    generator = Auto()
    assert generator.wants_times
    assert warm_ups(generator) == [4, 3, 2, 1]
    assert generator.choice(**SIZES) is None

    slow = Times((0.01,) * 4, (0.02,) * 4, (0.0, 0.014, 0.0))
    planned = generator.planned(slow)

    assert not planned.wants_times
    assert warm_ups(planned) == [5, 4, 2, 1]
    choice = planned.choice(**SIZES)
    assert choice is not None
    assert choice.best.step_seconds > 0
    assert warm_ups(generator) == [4, 3, 2, 1]  # as it was
    # Without a limit it holds no more than eager-1f1b.
    slow = Times((0.01,) * 4, (0.02,) * 4, (0.1,) * 3)
    assert max(warm_ups(Auto().planned(slow))) <= 7


def test_what_was_measured_places_one_stage_on_each_rank_and_splits_nothing() -> None:
    planned = Auto().planned(Times((0.01,) * 4, (0.02,) * 4, (0.0,) * 3))
    choice = planned.choice(**SIZES)
    assert choice is not None
    fitting = [c for c in choice.candidates if not c.refused]
    for candidate in fitting:
        assert candidate.schedule is not None
        assert candidate.schedule.stage_to_rank == (0, 1, 2, 3)
        assert {a.kind for row in candidate.schedule.actions for a in row} == {"F", "B"}


def test_measured_hops_take_what_was_measured() -> None:
    costs = costs_of(Times((1.0, 2.0), (3.0, 4.0), (0.5,)))
    sizes = sum(costs.stages[0].outputs.values())
    assert [s.forward_seconds for s in costs.stages] == [1.0, 2.0]
    assert [s.backward_seconds for s in costs.stages] == [3.0, 4.0]
    assert costs.network.seconds(0, 1, sizes) == pytest.approx(0.5)
    assert costs.network.seconds(1, 0, sizes) == pytest.approx(0.5)
    # W took no time, so a split backward was simulated as a whole one.
    costs = costs_of(Times((1.0, 2.0), (3.0, 4.0), (0.5,), (1.0, 4.5)))
    assert [stage.seconds("W") for stage in costs.stages] == [1.0, 4.0]
    assert [stage.seconds("I") for stage in costs.stages] == [2.0, 0.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_limit_bytes": 5}, "memory_limit_bytes needs costs"),
        ({"costs": "nowhere.json"}, "there is no file .*nowhere.json"),
        ({"costs": COSTS, "memory_limit_bytes": "all"}, "memory_limit_bytes is 'all', expected a"),
        ({"max_live_activations": 3}, "has no option 'max_live_activations'"),
    ],
)
def test_costs_that_are_none_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PluginOptionError, match=message):
        schedules.build("auto", **SIZES, **options)
