"""adaptive-1f1b follows the times of steps, and keeps within its limit of activations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pipegrad import schedules
from pipegrad.errors import PluginOptionError, ScheduleError
from pipegrad.schedules.builtin.adaptive import AdaptiveOneForwardOneBackward
from pipegrad.schedules.measured import Times
from tests.support.schedules.makespan import warm_ups as warm_ups_of

NAME = "adaptive-1f1b"


def times(hops: Sequence[float], compute: Sequence[float] | None = None) -> Times:
    """Returns what a step showed; by default a forward and a backward take 3 together."""
    both = [3.0] * (len(hops) + 1) if compute is None else compute
    return Times(tuple(t / 3 for t in both), tuple(2 * t / 3 for t in both), tuple(hops))


def warm_ups(generator: AdaptiveOneForwardOneBackward, num_ranks: int = 4) -> list[int]:
    return warm_ups_of(generator.generate(num_ranks=num_ranks, num_microbatches=32))


def after(*steps: Times, **options: Any) -> AdaptiveOneForwardOneBackward:
    """Returns the generator after some steps."""
    generator = AdaptiveOneForwardOneBackward(**options)
    for step in steps:
        generator = generator.planned(step)
    return generator


@pytest.mark.parametrize(
    ("hops", "limit", "expected"),
    [
        ((0, 0, 0), None, [4, 3, 2, 1]),
        ((0, 1.5, 0), None, [5, 4, 2, 1]),
        ((1.5, 1.5, 1.5), None, [7, 5, 3, 1]),
        ((1.5, 1.5, 1.5), 6, [6, 4, 2, 1]),
        ((1.5, 1.5, 1.5), 4, [4, 3, 2, 1]),
        ((0, 3.0, 0), 12, [6, 5, 2, 1]),
        ((1.0, 3.0, 0), 5, [5, 4, 2, 1]),  # the slowest hop first
        ((0, 300.0, 0), 12, [12, 11, 2, 1]),
        ((0, 0.07, 0), None, [4, 3, 2, 1]),  # less than the threshold of 5 %
        ((0, 0.08, 0), None, [5, 4, 2, 1]),
    ],
)
def test_each_hop_gets_what_it_needs_within_the_limit(
    hops: tuple[float, ...], limit: int | None, expected: list[int]
) -> None:
    assert warm_ups(after(times(hops), max_live_activations=limit)) == expected


def test_it_begins_as_1f1b_and_follows_hops_and_ranks_that_become_slow_and_fast_again() -> None:
    numbers = {"num_ranks": 4, "num_microbatches": 6}
    made = schedules.build(NAME, **numbers)
    assert made.actions == schedules.build("1f1b", **numbers).actions
    fast, slow, slowest = times((0, 0, 0)), times((0, 1.4, 0)), times((1.5, 1.5, 1.5))
    before = after(fast)
    assert warm_ups(before.planned(slow)) == [5, 4, 2, 1]
    assert warm_ups(before) == [4, 3, 2, 1]  # what it was stays as it is
    assert warm_ups(after(fast, slow, fast)) == [4, 3, 2, 1]
    straggling = times((1.5, 1.5, 1.5), compute=(3.0, 3.0, 3.0, 9.0))
    assert warm_ups(after(slowest, straggling)) == [4, 3, 2, 1]
    # A hop behind a rank that has time gets nothing.
    assert warm_ups(after(times((1.0, 0, 0), compute=(1.0, 1.0, 1.0, 3.0)))) == [4, 3, 2, 1]
    assert warm_ups(after(times((1.0, 0, 0), compute=(3.0, 1.0, 1.0, 1.0)))) == [5, 3, 2, 1]
    assert warm_ups(after(times(())), num_ranks=1) == [1]


def test_times_near_a_border_change_nothing() -> None:
    # With 2 c = 3 one forward more is enough. Some noise around it must not change the warm-up.
    planned = after(times((0, 1.5, 0)))
    for hop in (1.3, 1.55, 1.42, 1.6):
        assert planned.planned(times((0, hop, 0))) is planned
    # Near the threshold, too: an activation is given back only if it is not needed soon.
    planned = after(times((0, 0.08, 0)))
    assert planned.planned(times((0, 0.07, 0))) is planned
    assert planned.planned(times((0, 0.05, 0))) is not planned


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_live_activations": 4.5}, "max_live_activations is 4.5, expected a whole number"),
        ({"max_live_activations": True}, "max_live_activations is True, expected a whole number"),
        ({"threshold": 1}, "threshold is 1, expected at least 0 and below 1"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PluginOptionError, match=message):
        schedules.build(NAME, num_ranks=2, num_microbatches=2, **options)


def test_a_limit_below_that_of_1f1b_and_times_of_other_ranks_are_refused() -> None:
    numbers = {"num_ranks": 4, "max_live_activations": 3}
    with pytest.raises(ScheduleError, match="is 3, and 1f1b itself holds 4 on rank 0 of 4"):
        schedules.build(NAME, num_microbatches=8, **numbers)
    assert schedules.build(NAME, num_microbatches=3, **numbers).num_microbatches == 3
    with pytest.raises(ScheduleError, match="was planned for 4 ranks, found 3"):
        warm_ups(after(times((0, 0, 0))), num_ranks=3)
