"""hop-aware-1f1b and hop-aware-zb-h1 warm up by what each hop costs, and lose no time there."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from pipegrad import schedules
from pipegrad.errors import PluginOptionError, ScheduleError
from pipegrad.schedules import Kind, Schedule
from pipegrad.schedules.builtin.hop_aware import HopAwareOneForwardOneBackward
from pipegrad.schedules.builtin.hop_aware_zb_h1 import HopAwareZeroBubbleH1
from pipegrad.schedules.builtin.zb_h1 import split_in_turns
from pipegrad.schedules.measured import Times
from pipegrad.schedules.program.lower import lower
from pipegrad.schedules.program.verify import verify
from tests.support.pairwise import everything, pairwise
from tests.support.schedules.makespan import makespan, warm_ups

NAME, SPLIT = "hop-aware-1f1b", "hop-aware-zb-h1"
SECONDS: dict[Kind, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
COMPUTE_SECONDS = 3.0


def build(
    hop_seconds: Sequence[float], num_microbatches: int = 64, name: str = NAME, **options: Any
) -> Schedule:
    given = {"hop_seconds": hop_seconds, "compute_seconds": COMPUTE_SECONDS, **options}
    numbers = {"num_ranks": len(hop_seconds) + 1, "num_microbatches": num_microbatches}
    return schedules.build(name, **numbers, **given)


def seconds(schedule: Schedule, hop_seconds: Sequence[float]) -> float:
    """Returns how long a step takes where transfers are asynchronous."""
    return makespan(schedule, SECONDS, hop_seconds)


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
        ((6.0, 3.0), {}, [9, 4, 1]),
        ((0.1 + 0.2,), {"compute_seconds": 0.6}, [3, 1]),
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
    ("name", "options", "message"),
    [
        (NAME, {"hop_seconds": [0, -1, 0]}, r"hop_seconds\[1\] is -1, expected a finite number"),
        (
            NAME,
            {"hop_seconds": {0: 1.0, 1: 2.0}},
            "expected a sequence of numbers, one for each",
        ),
        (NAME, {"compute_seconds": 0}, "compute_seconds is 0, expected a finite number above 0"),
        (NAME, {"compute_seconds": None}, "give both in one unit, or none of them"),
        (NAME, {"threshold": -0.1}, "threshold is -0.1, expected at least 0 and below 1"),
        (
            SPLIT,
            {"weight_seconds": 1},
            "weight_seconds is 1 and compute_seconds is 1: expected a",
        ),
        (
            SPLIT,
            {"compute_seconds": None, "hop_seconds": None, "weight_seconds": 1.0},
            "and compute_seco",
        ),
        (SPLIT, {"max_live_activations": 0}, "max_live_activations is 0, expected a whole number"),
    ],
)
def test_costs_that_are_none_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    given = {"hop_seconds": [0, 0], "compute_seconds": 1, **options}
    with pytest.raises(PluginOptionError, match=message) as caught:
        schedules.build(name, num_ranks=3, num_microbatches=4, **given)
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


# hop-aware-zb-h1: it hides what hops cost, for as many activations as it says.


def bound(hop_seconds: Sequence[float], num_microbatches: int) -> float:
    """Returns what no schedule of one stage a rank can beat, if there are many microbatches.

    The last rank begins when the first microbatch has come there, and then computes all.
    """
    there = len(hop_seconds) * SECONDS["F"] + sum(hop_seconds)
    return there + num_microbatches * COMPUTE_SECONDS


def some_hops(number: int) -> list[list[float]]:
    """Returns the hops of so many pipelines, of two to eight ranks."""
    generator = random.Random(0)
    speeds = [0.0, 0.02, 0.2, 0.5, 0.51, 0.8, 1.0, 1.2, 2.0]
    sizes = [generator.randint(1, 7) for _ in range(number)]
    return [[generator.choice(speeds) for _ in range(size)] for size in sizes]


@pytest.mark.parametrize(
    ("options", "num_microbatches", "num_ranks"),
    pairwise([{}, {"head_w_first": True}], [1, 2, 7, 20], [1, 2, 4, 8]),
)
def test_where_hops_take_no_time_it_is_zb_h1(
    options: dict[str, Any], num_microbatches: int, num_ranks: int
) -> None:
    numbers = {"num_ranks": num_ranks, "num_microbatches": num_microbatches}
    plain = schedules.build("zb-h1", **numbers, **options)
    by_name = schedules.build(SPLIT, **numbers, **options)
    for made in (build([0.0] * (num_ranks - 1), num_microbatches, SPLIT, **options), by_name):
        assert made.name == SPLIT
        assert made.actions == plain.actions
        assert made.head_w_first == plain.head_w_first


@pytest.mark.parametrize(
    ("hop_seconds", "options", "expected"),
    [
        ((), {}, [1]),
        # Of many microbatches, a fast hop costs too small a share of the step.
        ((0.5, 0.5, 0.5), {}, [4, 3, 2, 1]),
        ((1.0, 1.0, 1.0), {}, [7, 5, 3, 1]),
        ((1.01, 1.01, 1.01), {"threshold": 0}, [10, 7, 4, 1]),
        ((3.0, 0, 2.0), {"threshold": 0}, [9, 5, 4, 1]),
        ((0.1 + 0.2,), {"compute_seconds": 0.9, "threshold": 0}, [3, 1]),
        # W of a quarter hides less, and a little more of F and I hides nothing.
        ((1.0,), {"weight_seconds": 0.75, "threshold": 0}, [4, 1]),
        ((0.75,), {"weight_seconds": 0.75, "threshold": 0}, [3, 1]),
        ((0.75,), {"weight_seconds": 0, "threshold": 0}, [3, 1]),
        ((1e308,), {"compute_seconds": 1e-308}, [64, 1]),
        ((1e9, 0), {}, [64, 2, 1]),
        ((1.0, 1.0, 1.0), {"max_live_activations": 4}, [4, 3, 2, 1]),
        ((1.0, 1.2, 1.0), {"max_live_activations": 5}, [5, 4, 2, 1]),
        ((1.0, 1.0, 1.0), {"max_live_activations": 64}, [7, 5, 3, 1]),
    ],
)
def test_each_hop_adds_what_it_needs_where_weights_hide_some(
    hop_seconds: tuple[float, ...], options: dict[str, Any], expected: list[int]
) -> None:
    made = build(hop_seconds, name=SPLIT, **options)
    assert warm_ups(made) == expected
    assert made.stage_to_rank == tuple(range(len(expected)))


@pytest.mark.parametrize(
    ("num_microbatches", "num_ranks", "hops", "threshold", "extra"),
    pairwise(
        [1, 2, 3, 5, 8, 21],
        range(1, 7),
        [(0.0, 0.7, 3.0, 0.1, 1.0), (1.0,) * 5, (9.0,) * 5, (0.0, 0.0, 0.0, 0.0, 2.0)],
        [0.0, 0.05],
        [None, 0, 2],
    ),
)
def test_it_can_be_run_and_holds_what_it_says(
    num_microbatches: int,
    num_ranks: int,
    hops: tuple[float, ...],
    threshold: float,
    extra: int | None,
) -> None:
    limit = None if extra is None else num_ranks + extra
    own = hops[: num_ranks - 1]
    made = build(own, num_microbatches, SPLIT, threshold=threshold, max_live_activations=limit)
    proof = verify(lower(made))  # raises if a rank would hang
    most = warm_ups(made)[0]
    assert most <= min(num_microbatches, limit or num_microbatches)
    assert proof.live_activations == (most,) * num_ranks


@pytest.mark.parametrize("hops", some_hops(40 if everything() else 15), ids=str)
def test_nothing_is_faster_where_nothing_may_be_lost(hops: list[float]) -> None:
    made = build(hops, 80, SPLIT, threshold=0)
    assert makespan(made, SECONDS, hops) == pytest.approx(bound(hops, 80))


@pytest.mark.parametrize("seconds", [0.5, 0.7, 1.0])
def test_where_hops_are_alike_and_slow_one_activation_less_costs_time(seconds: float) -> None:
    hops = [seconds] * 3
    own = warm_ups(build(hops, 80, SPLIT, threshold=0))
    assert makespan(split_in_turns("own", own, 80), SECONDS, hops) == bound(hops, 80)
    for hop in range(3):
        fewer = [number - (rank <= hop) for rank, number in enumerate(own)]
        leaner = split_in_turns("leaner", fewer, 80)
        assert makespan(leaner, SECONDS, hops) > bound(hops, 80) + 0.05


@pytest.mark.parametrize("threshold", [0.02, 0.05, 0.3])
@pytest.mark.parametrize("hops", some_hops(12 if everything() else 6), ids=str)
def test_all_split_hops_together_lose_no_more_than_the_threshold(
    hops: list[float], threshold: float
) -> None:
    number = 40
    made, fastest = (build(hops, number, SPLIT, threshold=t) for t in (threshold, 0))
    lost = makespan(made, SECONDS, hops) - bound(hops, number)
    assert lost <= threshold * number * COMPUTE_SECONDS + 1e-9
    assert warm_ups(made)[0] <= warm_ups(fastest)[0]


@pytest.mark.parametrize("limit", range(4, 12) if everything() else (4, 5, 7, 10))
@pytest.mark.parametrize("hops", [[1.0, 1.0, 1.0], [0.0, 2.0, 0.2], [2.0, 1.0, 0.6]], ids=str)
def test_within_a_limit_it_is_near_the_best_that_fits(hops: list[float], limit: int) -> None:
    def took(extras: Sequence[int]) -> float:
        own = [1 + sum(1 + extra for extra in extras[rank:]) for rank in range(len(hops) + 1)]
        return makespan(split_in_turns("some", own, 40), SECONDS, hops)

    made = build(hops, 40, SPLIT, threshold=0, max_live_activations=limit)
    ways = itertools.product(range(limit - 3), repeat=len(hops))
    best = min(took(extras) for extras in ways if 4 + sum(extras) <= limit)
    assert warm_ups(made)[0] <= limit
    assert makespan(made, SECONDS, hops) <= 1.05 * best


def test_numbers_that_do_not_fit_the_pipeline_are_refused() -> None:
    with pytest.raises(ScheduleError, match="max_live_activations is 3, and zb-h1 itself holds 4"):
        build([0.0] * 3, name=SPLIT, max_live_activations=3)
    # Of three microbatches nobody holds more than three.
    assert warm_ups(build([9.0] * 3, 3, SPLIT, max_live_activations=3)) == [3, 3, 3, 1]


def test_without_costs_it_begins_as_zb_h1_and_takes_what_is_measured() -> None:
    numbers = {"num_ranks": 3, "num_microbatches": 8}
    generator = HopAwareZeroBubbleH1(threshold=0.0, max_live_activations=5, head_w_first=True)
    assert generator.wants_times
    backwards = (2.0, 1.0, 2.25)

    planned = generator.planned(Times((1.0, 0.5, 1.0), backwards, (0.0, 0.75), (1.0, 0.5, 0.75)))

    assert not planned.wants_times
    # The slowest rank says what W takes.
    assert (planned.compute_seconds, planned.weight_seconds) == (3.25, 0.75)
    made = planned.generate(**numbers)
    assert warm_ups(made) == [4, 3, 1]
    assert made.head_w_first
    slower = generator.planned(Times((1.0,) * 3, (2.0,) * 3, (2.0, 2.0)))
    assert slower.weight_seconds is None
    assert warm_ups(slower.generate(**numbers)) == [5, 3, 1]
