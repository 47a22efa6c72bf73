"""hop-aware-1f1b warms up by what each hop costs, and loses no time where it does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from pipegrad import schedules
from pipegrad.errors import PluginOptionError, ScheduleError
from pipegrad.schedules import Schedule
from pipegrad.schedules.builtin.hop_aware import HopAwareOneForwardOneBackward
from pipegrad.schedules.measured import Times
from tests.support.schedules.makespan import makespan, warm_ups

NAME = "hop-aware-1f1b"
FORWARD_SECONDS, BACKWARD_SECONDS = 1.0, 2.0
COMPUTE_SECONDS = FORWARD_SECONDS + BACKWARD_SECONDS


def build(hop_seconds: Sequence[float], num_microbatches: int = 64, **options: Any) -> Schedule:
    given = {"hop_seconds": hop_seconds, "compute_seconds": COMPUTE_SECONDS, **options}
    numbers = {"num_ranks": len(hop_seconds) + 1, "num_microbatches": num_microbatches}
    return schedules.build(NAME, **numbers, **given)


def seconds(schedule: Schedule, hop_seconds: Sequence[float]) -> float:
    """Returns how long a step takes where transfers are asynchronous."""
    return makespan(schedule, {"F": FORWARD_SECONDS, "B": BACKWARD_SECONDS}, hop_seconds)


def period(name: str, hops: Sequence[float], **options: Any) -> float:
    """Returns how many seconds one more microbatch takes in the steady state."""

    def step(num_microbatches: int) -> float:
        if name == NAME:
            return seconds(build(hops, num_microbatches, **options), hops)
        numbers = {"num_ranks": len(hops) + 1, "num_microbatches": num_microbatches}
        return seconds(schedules.build(name, **numbers), hops)

    return (step(240) - step(80)) / 160  # what repeats, repeats after at most 8


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("num_microbatches", [1, 2, 7, 20])
@pytest.mark.parametrize(
    ("hop_seconds", "same_as"),
    [(0, "1f1b"), (0.05 * 1.5, "1f1b"), (0.051 * 1.5, "eager-1f1b"), (1.5, "eager-1f1b")],
)
def test_its_corner_cases_are_1f1b_and_eager(
    hop_seconds: float, same_as: str, num_microbatches: int, num_ranks: int
) -> None:
    numbers = {"num_ranks": num_ranks, "num_microbatches": num_microbatches}
    made = build([hop_seconds] * (num_ranks - 1), num_microbatches)
    assert made.name == NAME
    assert made.actions == schedules.build(same_as, **numbers).actions
    assert len(made.grid[0]) == 2 * (num_microbatches + num_ranks - 1)


@pytest.mark.parametrize(
    ("hop_seconds", "options", "expected"),
    [
        ((), {}, [1]),
        ((0, 1.5, 0), {}, [5, 4, 2, 1]),
        ((1.5, 0, 0), {}, [5, 3, 2, 1]),
        ((0, 0, 1.5), {}, [5, 4, 3, 1]),
        ((1.51,), {}, [4, 1]),
        ((6.0, 3.0), {}, [9, 4, 1]),
        ((0.1 + 0.2,), {"compute_seconds": 0.6}, [3, 1]),
        ((1, 2), {"compute_seconds": 2, "threshold": 0}, [6, 4, 1]),
        ((0.75,), {"threshold": 0.5}, [2, 1]),
        ((0.76,), {"threshold": 0.5}, [3, 1]),
        ((0.01,), {"threshold": 0}, [3, 1]),
        ((1e308,), {"compute_seconds": 1e-308}, [64, 1]),
        ((1e9, 0), {}, [64, 2, 1]),
    ],
)
def test_each_hop_adds_what_it_needs(
    hop_seconds: tuple[float, ...], options: dict[str, Any], expected: list[int]
) -> None:
    made = build(hop_seconds, **options)
    assert warm_ups(made) == expected
    assert made.stage_to_rank == tuple(range(len(expected)))
    assert len(made.grid[0]) == 2 * (64 + len(expected) - 1)


def test_one_slow_hop_costs_40_activations_where_eager_takes_64() -> None:
    hops = [0, 0, 0, 0.5 * COMPUTE_SECONDS, 0, 0, 0]
    eager = schedules.build("eager-1f1b", num_ranks=8, num_microbatches=64)
    assert (sum(warm_ups(build(hops))), sum(warm_ups(eager))) == (40, 64)
    assert warm_ups(build(hops)) == [9, 8, 7, 6, 4, 3, 2, 1]
    assert seconds(build(hops), hops) == seconds(eager, hops)


@pytest.mark.parametrize(
    "hop_seconds", [[1.5] * 7, [1.6] * 7, [0, 4, 0.2, 1], [0.1] * 3, [0, 0, 0, 1.5, 0, 0, 0]]
)
def test_its_steady_state_loses_no_time(hop_seconds: list[float]) -> None:
    assert period(NAME, hop_seconds) == pytest.approx(COMPUTE_SECONDS)


def test_other_warm_ups_lose_what_their_docstrings_say() -> None:
    assert period("1f1b", [0, 0, 0, 0.3, 0, 0, 0]) == pytest.approx(COMPUTE_SECONDS + 0.3)
    assert period("1f1b", [0.3] * 7) == pytest.approx(COMPUTE_SECONDS + 2 * 0.3 * 7 / 8)
    assert period("eager-1f1b", [COMPUTE_SECONDS / 2] * 7) == pytest.approx(COMPUTE_SECONDS)
    assert period("eager-1f1b", [COMPUTE_SECONDS / 2 + 0.1] * 7) > COMPUTE_SECONDS + 0.05


@pytest.mark.parametrize("threshold", [0.05, 0.3])
def test_all_hops_together_lose_no_more_than_the_threshold(threshold: float) -> None:
    hops = [threshold * COMPUTE_SECONDS / 2] * 7
    lost = period(NAME, hops, threshold=threshold) / COMPUTE_SECONDS - 1
    assert 0.8 * threshold < lost <= threshold


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hop_seconds": [0, -1, 0]}, r"hop_seconds\[1\] is -1, expected a finite number"),
        ({"hop_seconds": [0, math.nan]}, r"hop_seconds\[1\] is nan, expected a finite number"),
        ({"hop_seconds": {0: 1.0, 1: 2.0}}, "expected a sequence of numbers, one for each hop"),
        ({"hop_seconds": "12"}, "hop_seconds is '12', expected a sequence of numbers"),
        ({"compute_seconds": 0}, "compute_seconds is 0, expected a finite number above 0"),
        ({"compute_seconds": math.nan}, "compute_seconds is nan, expected"),
        ({"hop_seconds": None}, "give both in one unit, or none of them"),
        ({"compute_seconds": None}, "give both in one unit, or none of them"),
        ({"threshold": -0.1}, "threshold is -0.1, expected at least 0 and below 1"),
        ({"threshold": 1}, "threshold is 1, expected at least 0 and below 1"),
        ({"threshold": math.nan}, "threshold is nan, expected at least 0 and below 1"),
    ],
)
def test_costs_that_are_none_are_refused(options: dict[str, Any], message: str) -> None:
    given = {"hop_seconds": [0, 0], "compute_seconds": 1, **options}
    with pytest.raises(PluginOptionError, match=message) as caught:
        schedules.build(NAME, num_ranks=3, num_microbatches=4, **given)
    assert isinstance(caught.value.__cause__, ScheduleError)


@pytest.mark.parametrize(("num_ranks", "given"), [(1, [0]), (4, []), (4, [0, 0]), (4, [0] * 4)])
def test_each_hop_has_its_cost(num_ranks: int, given: list[float]) -> None:
    expected = f"over {num_ranks} ranks has {num_ranks - 1} hops, found {len(given)} hop_seconds"
    with pytest.raises(ScheduleError, match=expected):
        schedules.build(
            NAME, num_ranks=num_ranks, num_microbatches=4, hop_seconds=given, compute_seconds=1
        )


def test_hops_may_be_any_sequence_of_numbers() -> None:
    hops, options = (0.0, 1.5, 0.0), {"num_ranks": 4, "num_microbatches": 64, "compute_seconds": 3}
    for given in (list(hops), torch.tensor(hops), (c for c in hops)):
        assert build(hops).actions == schedules.build(NAME, hop_seconds=given, **options).actions


def test_without_costs_it_begins_as_1f1b_and_takes_what_is_measured() -> None:
    numbers = {"num_ranks": 3, "num_microbatches": 8}
    generator = HopAwareOneForwardOneBackward()
    began = schedules.build(NAME, **numbers)
    assert began.actions == schedules.build("1f1b", **numbers).actions
    assert generator.wants_times

    planned = generator.planned(Times((1.0, 0.5, 1.0), (2.0, 1.0, 2.0), (0.0, 1.5)))

    assert not planned.wants_times
    assert warm_ups(planned.generate(**numbers)) == [4, 3, 1]
