"""1F1B whose warm-up follows the present time of each hop."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import starmap

from pipegrad.errors import ScheduleError
from pipegrad.schedules.builtin.hop_aware import hiding, warm_ups
from pipegrad.schedules.builtin.one_f_one_b import in_turns
from pipegrad.schedules.measured import (
    MeasuredGenerator,
    Times,
    check_live_activations,
    check_threshold,
)
from pipegrad.schedules.schedule import Schedule

# Hold fewer activations only if the warm-up also suits hops that are slower by this factor, because
# a hop whose time lies at a border would otherwise change the warm-up in every step.
_CAUTION = 1.25


class AdaptiveOneForwardOneBackward(MeasuredGenerator):
    """Follows a network whose hops become slower and faster, within a limit of activations.

    It begins as 1f1b. After every step all ranks have the times of the computes of each rank and of
    the transfers of each hop. Rank s warms up with w_s forwards. Let T be the time of the slowest
    rank, t_s the time of rank s, and c_h the time of a transfer over the hop h = s -> s+1. Then a
    step needs for each microbatch at least T, and at least::

        (t_s + 2 c_h) / (w_s - w_{s+1})

    `hop-aware-1f1b` gives the reason. The warm-up that minimizes the largest of these is found by
    adding forwards one by one, each at the hop whose time is largest. It ends when no hop takes
    more than T (1 + threshold), or at the limit. The warm-up changes if the next steps take less
    time by more than `threshold`; or if it holds fewer activations and no hop would be too slow,
    even if all took 1.25 times as long.

    Raises:
        ScheduleError: If a number is out of its range.

    Source: derived in `hop-aware-1f1b`. PipeMorph (NSDI 2026) also changes pipelines as links do.
    """

    def __init__(self, *, max_live_activations: int | None = None, threshold: float = 0.05) -> None:
        check_live_activations(max_live_activations)
        check_threshold(threshold)
        self.max_live_activations = max_live_activations
        self.threshold = threshold
        # For each hop the forwards that ranks before it add to the warm-up of 1f1b.
        self._extras: tuple[int, ...] | None = None

    @property
    def wants_times(self) -> bool:
        """Always True, because a hop may change in any step."""
        return True

    def generate(self, *, num_ranks: int, num_microbatches: int) -> Schedule:
        """Returns the schedule, for any number of ranks and microbatches.

        Raises:
            ScheduleError: If `max_live_activations` is less than 1f1b holds.
        """
        extras = self._extras or (0,) * (num_ranks - 1)
        if len(extras) != num_ranks - 1:
            raise ScheduleError(
                f"this adaptive-1f1b was planned for {len(extras) + 1} ranks, found {num_ranks}"
            )
        limit, least = self._limit(num_ranks), min(num_ranks, num_microbatches)
        if limit < least:
            raise ScheduleError(
                f"max_live_activations is {limit}, and 1f1b itself holds {least} on rank 0 of "
                f"{num_ranks}: expected at least {least}"
            )
        # The last rank has 0, not 1, because `in_turns` adds one forward before the first backward.
        return in_turns("adaptive-1f1b", warm_ups(extras), num_microbatches)

    def planned(self, times: Times) -> AdaptiveOneForwardOneBackward:
        """Returns the generator of the schedules from the next step on; itself if unchanged."""
        fastest = self._fitting(times)
        if self._extras is None:
            return self._with(fastest)
        now = _period(times, self._extras)
        if now > (1 + self.threshold) * _period(times, fastest):
            return self._with(fastest)
        slower = replace(times, hop_seconds=tuple(_CAUTION * c for c in times.hop_seconds))
        leanest = self._fitting(slower)
        return self._with(leanest) if sum(leanest) < sum(self._extras) else self

    def _with(self, extras: tuple[int, ...]) -> AdaptiveOneForwardOneBackward:
        other = copy.copy(self)
        other._extras = extras
        return other

    def _limit(self, num_ranks: int) -> int:
        return self.max_live_activations or 2 * num_ranks - 1

    def _fitting(self, times: Times) -> tuple[int, ...]:
        """Returns for each hop the forwards that it needs, within the limit."""
        num_ranks, enough = len(times.compute_seconds), 1 + self.threshold
        extras = hiding(
            partial(_hop_period, times),
            range(num_ranks - 1),
            allowed=enough * max(times.compute_seconds),
            most=self._limit(num_ranks) - num_ranks,
        )
        return tuple(extras)


def _period(times: Times, extras: Sequence[int]) -> float:
    """Returns the time of one more microbatch."""
    periods = starmap(partial(_hop_period, times), enumerate(extras))
    return max([*times.compute_seconds, *periods])


def _hop_period(times: Times, hop: int, extra: int) -> float:
    return (times.compute_seconds[hop] + 2 * times.hop_seconds[hop]) / (1 + extra)
