"""zb-h1 whose warm-up depends on the cost of each hop."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pipegrad.errors import ScheduleError
from pipegrad.schedules.builtin.hop_aware import HopAware, hiding, warm_ups
from pipegrad.schedules.builtin.zb_h1 import split_in_turns
from pipegrad.schedules.measured import Times, check_live_activations
from pipegrad.schedules.schedule import Schedule


class HopAwareZeroBubbleH1(HopAware):
    """Hides transfers and the bubble, for more live activations on all ranks.

    For 3 ranks and 5 microbatches, with `hop_seconds` (0, 0.3) and `compute_seconds` 1::

        rank 0  0F0 0F1 0F2 0F3     0I0 0W0 0F4 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4
        rank 1      1F0 1F1 1F2 1I0 1F3 1I1 1W0 1F4 1I2 1W1 1I3 1W2 1I4 1W3 1W4
        rank 2          2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2W0 2F4 2I4 2W1 2W2 2W3 2W4

    Rank s has w_s forwards before its first I. w_{P-1} is 1, and w_s is w_{s+1} + 1 + extra. It
    computes each W w_0 - w_s microbatches late, and holds min(M, w_0) activations. If extra is 0 on
    all hops, this is zb-h1.

    Reason: let T = tF+tI+tW, and let a transfer over the hop take c. With `extra`, the hop costs
    the step, in addition to one transfer there, at most::

        max(0, 2 c - extra (tF+tI)) + max(0, c - extra tW) + M max(0, 2 c - tW - extra T)

    - Fill: until the last rank has its first W, it takes a microbatch in each tF+tI. In w_s -
      w_{s+1} of these turns, rank s must compute an F and an I, and a transfer goes there and back.
    - Drain: after its last I, rank s+1 has w_s - w_{s+1} W more to compute than rank s. Meanwhile
      the last gradient goes back, and rank s computes its I. If tI is longer than tW, each hop also
      costs the difference, as in zb-h1.
    - Steady state: a rank takes a microbatch in each T. Here W hides transfers too, because a rank
      may compute W while it waits.

    extra is the smallest number with which no hop costs more than its share of the allowed loss. If
    nothing may be lost and F, I and W take equally long, extra is ceil(c / tW). A step is then as
    short as any with one stage on each rank, because the last rank begins when the first microbatch
    has come there, and then never waits.

    Without `hop_seconds` and `compute_seconds` it begins as zb-h1, and a `Scheduler` measures them
    in its second step, with `weight_seconds`. From the third step on it uses the measured times.

    Args:
        hop_seconds: For each hop s -> s+1 (P-1 hops) the time of one transfer of a microbatch in
            one direction. The transfer back takes as long. By default measured.
        compute_seconds: Time of a stage's compute of a microbatch, T. By default measured; given if
            and only if `hop_seconds` is.
        weight_seconds: The part of it that W takes. By default measured, or a third.
        threshold: Share of a step, M T, in [0, 1). All hops together may cost this share.
        max_live_activations: Number of microbatches that a rank may hold, at least the number of
            ranks. Forwards are then added at the hops that cost most. By default M.
        head_w_first: See `zb-h1`.

    Raises:
        ScheduleError: If a number is out of its range.

    Source: derived above; orders of zb-h1 (Qi et al., arXiv 2401.10241), warm-up of hop-aware-1f1b.
    """

    def __init__(
        self,
        *,
        hop_seconds: Sequence[float] | None = None,
        compute_seconds: float | None = None,
        weight_seconds: float | None = None,
        threshold: float = 0.05,
        max_live_activations: int | None = None,
        head_w_first: bool = False,
    ) -> None:
        super().__init__(
            hop_seconds=hop_seconds, compute_seconds=compute_seconds, threshold=threshold
        )
        if weight_seconds is not None and not 0 <= weight_seconds < (compute_seconds or 0.0):
            raise ScheduleError(
                f"weight_seconds is {weight_seconds} and compute_seconds is {compute_seconds}: "
                f"expected a part of compute_seconds, at least 0 and below it"
            )
        check_live_activations(max_live_activations)
        self.weight_seconds = weight_seconds
        self.max_live_activations = max_live_activations
        self.head_w_first = head_w_first

    def planned(self, times: Times) -> HopAwareZeroBubbleH1:
        """Returns the generator of the schedules from the next step on."""
        compute = max(times.compute_seconds)
        weights = times.weight_seconds
        return HopAwareZeroBubbleH1(
            hop_seconds=times.hop_seconds,
            compute_seconds=compute or 1.0,
            # The time of the slowest rank, because the others wait for it.
            weight_seconds=weights[times.compute_seconds.index(compute)] if weights else None,
            threshold=self.threshold,
            max_live_activations=self.max_live_activations,
            head_w_first=self.head_w_first,
        )

    def generate(self, *, num_ranks: int, num_microbatches: int) -> Schedule:
        """Returns the schedule, for any number of ranks and microbatches.

        Raises:
            ScheduleError: If the number of `hop_seconds` is not the number of hops, or if
                `max_live_activations` is less than zb-h1 holds.
        """
        name = "hop-aware-zb-h1"
        hop_seconds = self._hops(name, num_ranks)
        least = min(num_ranks, num_microbatches)
        limit = self.max_live_activations
        if limit is not None and limit < least:
            raise ScheduleError(
                f"max_live_activations is {limit}, and zb-h1 itself holds {least} on each of "
                f"{num_ranks} ranks: expected at least {least}"
            )
        num_hops = num_ranks - 1
        # A rounding error must not add a forward.
        share = self.threshold * num_microbatches / max(1, num_hops) + 1e-9
        extras = hiding(
            lambda hop, extra: self._cost(hop_seconds[hop], extra, num_microbatches),
            range(num_hops)[::-1],  # the last ones first: more ranks then have more forwards
            allowed=share * self._compute_seconds,
            most=math.inf if limit is None or limit >= num_microbatches else limit - num_ranks,
        )
        num_warmups = [1 + ahead for ahead in warm_ups(extras)]
        return split_in_turns(name, num_warmups, num_microbatches, head_w_first=self.head_w_first)

    @property
    def _compute_seconds(self) -> float:
        return self.compute_seconds or 1.0  # nothing is known, and hops are 0

    def _cost(self, seconds: float, extra: int, num_microbatches: int) -> float:
        """Returns the time that a hop costs in a step; see the class."""
        if extra >= num_microbatches:
            return 0.0  # no rank has more forwards
        compute = self._compute_seconds
        weight = compute / 3 if self.weight_seconds is None else self.weight_seconds
        fill = 2 * seconds - extra * (compute - weight)
        # Without W, nothing is hidden.
        drain = seconds - extra * weight if weight else 0.0
        steady = num_microbatches * (2 * seconds - weight - extra * compute)
        return max(0.0, fill) + max(0.0, drain) + max(0.0, steady)
