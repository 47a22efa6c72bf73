"""Schedules whose warm-up depends on the cost of each hop."""

from __future__ import annotations

import heapq
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence

from pipegrad.errors import ScheduleError
from pipegrad.schedules.builtin.one_f_one_b import in_turns
from pipegrad.schedules.measured import MeasuredGenerator, Times, check_threshold
from pipegrad.schedules.schedule import Schedule


def warm_ups(extras: Sequence[int]) -> list[int]:
    """Returns the number of forwards by which each rank is ahead of the last one, in its warm-up.

    Args:
        extras: For each hop the forwards that the ranks before it add to the warm-up of 1f1b.
    """
    num_hops = len(extras)
    return [sum(extras[rank:]) + num_hops - rank for rank in range(num_hops + 1)]


def hiding(
    cost: Callable[[int, int], float], hops: Sequence[int], *, allowed: float, most: float
) -> list[int]:
    """Returns for each hop the forwards that hide it.

    They are added one by one, each at the hop that costs most.
    """
    extras = [0] * len(hops)
    costs = [(-cost(hop, 0), place, hop) for place, hop in enumerate(hops)]
    heapq.heapify(costs)
    while most > 0 and costs and -costs[0][0] > allowed:
        _, place, hop = costs[0]
        most -= 1
        extras[hop] += 1
        heapq.heapreplace(costs, (-cost(hop, extras[hop]), place, hop))
    return extras


class HopAware(MeasuredGenerator):
    """Times of hops: arguments, or measured in the second step of a `Scheduler`.

    Args:
        hop_seconds: For each hop s -> s+1 (P-1 hops) the time of one transfer of a microbatch.
        compute_seconds: Time of a stage's compute of a microbatch.
        threshold: Share of the time that may be lost, in [0, 1).

    Raises:
        ScheduleError: If a number is out of its range.
    """

    def __init__(
        self,
        *,
        hop_seconds: Sequence[float] | None = None,
        compute_seconds: float | None = None,
        threshold: float = 0.05,
    ) -> None:
        if (hop_seconds is None) != (compute_seconds is None):
            raise ScheduleError(
                f"hop_seconds is {hop_seconds} and compute_seconds is {compute_seconds}: give both "
                f"in one unit, or none of them, and a Scheduler measures them"
            )
        if isinstance(hop_seconds, Mapping | str):
            raise ScheduleError(
                f"hop_seconds is {hop_seconds!r}, expected a sequence of numbers, one for each hop"
            )
        self.hop_seconds = None if hop_seconds is None else tuple(hop_seconds)
        for hop, seconds in enumerate(self.hop_seconds or ()):
            if not (math.isfinite(seconds) and seconds >= 0):
                raise ScheduleError(
                    f"hop_seconds[{hop}] is {seconds}, expected a finite number, at least 0"
                )
        if compute_seconds is not None and not (
            math.isfinite(compute_seconds) and compute_seconds > 0
        ):
            raise ScheduleError(
                f"compute_seconds is {compute_seconds}, expected a finite number above 0"
            )
        check_threshold(threshold)
        self.compute_seconds = compute_seconds
        self.threshold = threshold

    @property
    def wants_times(self) -> bool:
        """True until they are given, or measured."""
        return self.hop_seconds is None

    @abstractmethod
    def planned(self, times: Times) -> HopAware:
        """Returns the generator of the schedules from the next step on."""

    def _hops(self, name: str, num_ranks: int) -> tuple[float, ...]:
        """Returns the time of each hop; zeros if they are not known yet.

        Raises:
            ScheduleError: If the number of `hop_seconds` is not the number of hops.
        """
        if self.hop_seconds is None:
            return (0.0,) * (num_ranks - 1)
        if len(self.hop_seconds) != num_ranks - 1:
            raise ScheduleError(
                f"{name} over {num_ranks} ranks has {num_ranks - 1} hops, found "
                f"{len(self.hop_seconds)} hop_seconds; give one for each rank but the last"
            )
        return self.hop_seconds


class HopAwareOneForwardOneBackward(HopAware):
    """Hides the transfers of slow hops, each for more live activations on the ranks before it.

    For 3 ranks and 5 microbatches, with `hop_seconds` (0, 0.5) and `compute_seconds` 1::

        rank 0  0F0 0F1 0F2 0F3     0B0 0F4 0B1     0B2     0B3     0B4
        rank 1      1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2     1B3     1B4
        rank 2          2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4

    Rank s warms up with min(M, w_s) forwards before its first backward, and holds as many
    activations. w_{P-1} is 1, and w_s is w_{s+1} + 1 + extra. On a hop with
    2 c <= threshold x compute, extra is 0. On any other hop it is ceil(2 c / compute). If no hop is
    slow, this is 1f1b. If each 2 c is in (threshold, 1] x compute, it is eager-1f1b.

    Reason: suppose that no rank is idle. Then each microbatch takes T = tF+tB. A rank ends the
    backward of microbatch k right before the forward of k + w_s, because forwards and backwards
    alternate. That is w_s T after it began the forward of k. This time must hold the rank's tF, a
    transfer, the w_{s+1} T of the next rank, a transfer back, and the rank's tB. For each hop
    h = s -> s+1 follows::

        (w_s - w_{s+1}) T >= tF + tB + 2 c_h

    If a hop does not satisfy this, all ranks wait in every microbatch: for c if only one hop is too
    slow, for up to 2 c if all hops are. Fill and drain always cost 2 c for each hop and step.

    Without `hop_seconds` and `compute_seconds` it begins as 1f1b, and a `Scheduler` measures both
    in its second step. From the third step on it uses the measured times. `adaptive-1f1b` measures
    them in every step.

    Args:
        hop_seconds: For each hop s -> s+1 (P-1 hops) the time of one transfer of a microbatch in
            one direction. The transfer back takes as long. By default measured.
        compute_seconds: Time of a stage's forward and backward of a microbatch, tF+tB. By default
            measured; given if and only if `hop_seconds` is.
        threshold: Share of `compute_seconds`, in [0, 1). A hop may lose this share with every
            microbatch, and the ranks before it then hold one activation less. All hops together
            lose at most this share.

    Raises:
        ScheduleError: If a number is out of its range.

    Source: derived above; `extra` is 0 in 1f1b, 1 in eager-1f1b (Zhuang et al., arXiv 2211.05322).
    """

    def planned(self, times: Times) -> HopAwareOneForwardOneBackward:
        """Returns the generator of the schedules from the next step on."""
        return HopAwareOneForwardOneBackward(
            hop_seconds=times.hop_seconds,
            compute_seconds=max(times.compute_seconds) or 1.0,
            threshold=self.threshold,
        )

    def generate(self, *, num_ranks: int, num_microbatches: int) -> Schedule:
        """Returns the schedule, for any number of ranks and microbatches.

        Raises:
            ScheduleError: If the number of `hop_seconds` is not the number of hops.
        """
        hops = self._hops("hop-aware-1f1b", num_ranks)
        extras = [self._extra(seconds, num_microbatches) for seconds in hops]
        # The last rank has 0, not 1, because `in_turns` adds one forward before the first backward.
        return in_turns("hop-aware-1f1b", warm_ups(extras), num_microbatches)

    def _extra(self, seconds: float, num_microbatches: int) -> int:
        """Returns the number of forwards that ranks before this hop add to 1f1b's warm-up."""
        # A rounding error must not add a forward: 2 * (0.1 + 0.2) / 0.6 must count as 1.
        steps = 2.0 * (seconds / (self.compute_seconds or 1.0)) - 1e-9
        # A warm-up has at most `num_microbatches` forwards, and the quotient may be infinite.
        return 0 if steps <= self.threshold else math.ceil(min(steps, num_microbatches))
