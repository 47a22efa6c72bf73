"""1F1B that warms up by what each hop costs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pipegrad.errors import ScheduleError
from pipegrad.schedules.builtin.one_f_one_b import in_turns
from pipegrad.schedules.schedule import Schedule, ScheduleGenerator


class HopAwareOneForwardOneBackward(ScheduleGenerator):
    """Hides the transfers of slow hops, each for more live activations on the ranks before it.

    For 3 ranks and 5 microbatches, with `hop_seconds` (0, 0.5) and `compute_seconds` 1::

        rank 0  0F0 0F1 0F2 0F3     0B0 0F4 0B1     0B2     0B3     0B4
        rank 1      1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2     1B3     1B4
        rank 2          2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4

    Rank s warms up with min(M, w_s) forwards before its first backward, and holds as many
    activations: w_{P-1} = 1 and w_s = w_{s+1} + 1 + extra, where extra is 0 on a hop with
    2 c <= threshold x compute, and ceil(2 c / compute) on any other. With no slow hop this is
    1f1b; with each 2 c in (threshold, 1] x compute it is eager-1f1b.

    Why: let no rank idle, so that its period a microbatch is T = tF+tB. In strict turns it ends
    the backward of microbatch k right before the forward of k + w_s: w_s T after it began the
    forward of k. Within that time come its own tF, a transfer, the w_{s+1} T of the next rank, a
    transfer back, and its own tB. Hence, for each hop h = s -> s+1::

        (w_s - w_{s+1}) T >= tF + tB + 2 c_h

    A hop that falls short makes all ranks wait for every microbatch: for c where it is alone, for
    up to 2 c where all hops are such. Filling and draining cost 2 c a hop and step in any case.

    Args:
        hop_seconds: For each hop s -> s+1, P-1 of them, how long the transfer of a microbatch takes
            one way. It takes as long back.
        compute_seconds: How long a stage's forward and backward of a microbatch take, tF+tB.
        threshold: Share of `compute_seconds`, in [0, 1), that one is willing to lose on a hop, with
            every microbatch, rather than hold one more activation on each rank before it. It is
            the most that all hops lose together.

    Raises:
        ScheduleError: If these are not such numbers.

    Source: derived above; `extra` is 0 in 1f1b, 1 in eager-1f1b (Zhuang et al., arXiv 2211.05322).
    """

    def __init__(
        self, *, hop_seconds: Sequence[float], compute_seconds: float, threshold: float = 0.05
    ) -> None:
        for hop, seconds in enumerate(hop_seconds):
            if not (math.isfinite(seconds) and seconds >= 0):
                raise ScheduleError(
                    f"hop_seconds[{hop}] is {seconds}, expected a finite number, at least 0"
                )
        if not (math.isfinite(compute_seconds) and compute_seconds > 0):
            raise ScheduleError(
                f"compute_seconds is {compute_seconds}, expected a finite number above 0"
            )
        if not 0 <= threshold < 1:
            raise ScheduleError(f"threshold is {threshold}, expected at least 0 and below 1")
        self.hop_seconds = tuple(hop_seconds)
        self.compute_seconds = compute_seconds
        self.threshold = threshold

    def generate(self, *, num_ranks: int, num_microbatches: int) -> Schedule:
        """Returns the schedule, for any number of ranks and microbatches.

        Raises:
            ScheduleError: If there are not as many `hop_seconds` as hops.
        """
        if len(self.hop_seconds) != num_ranks - 1:
            raise ScheduleError(
                f"hop-aware-1f1b over {num_ranks} ranks has {num_ranks - 1} hops, found "
                f"{len(self.hop_seconds)} hop_seconds; give one for each rank but the last"
            )
        # One forward less: `in_turns` puts one more in front of the first backward.
        num_warmups = [0]
        for seconds in reversed(self.hop_seconds):
            extra = self._extra(seconds, num_microbatches)
            num_warmups.append(num_warmups[-1] + 1 + extra)
        return in_turns("hop-aware-1f1b", num_warmups[::-1], num_microbatches)

    def _extra(self, seconds: float, num_microbatches: int) -> int:
        """Returns how many more forwards than in 1f1b the ranks before this hop warm up with."""
        # Less a rounding error: 2 * (0.1 + 0.2) / 0.6 is to be 1.
        steps = 2.0 * (seconds / self.compute_seconds) - 1e-9
        # No warm-up has more forwards than there are, and the quotient may be infinite.
        return 0 if steps <= self.threshold else math.ceil(min(steps, num_microbatches))
