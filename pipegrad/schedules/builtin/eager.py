"""1F1B with a longer warm-up, which gives transfers time."""

from __future__ import annotations

from pipegrad.schedules.builtin.one_f_one_b import in_turns
from pipegrad.schedules.schedule import Schedule, ScheduleGenerator


class EagerOneForwardOneBackward(ScheduleGenerator):
    """Hides transfers both ways, for about twice the live activations of 1f1b.

    For 3 ranks and 6 microbatches::

        rank 0  0F0 0F1 0F2 0F3 0F4 0B0 0F5 0B1     0B2     0B3     0B4     0B5
        rank 1      1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3     1B4     1B5
        rank 2          2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4 2F5 2B5

    Rank i of P warms up with min(M, 2(P-i)-1) forwards before its first backward, and holds as many
    activations. With 1f1b these are min(M, P-i). Without transfers both take equally long. Let a
    transfer take c seconds for each hop and microbatch. Then eager-1f1b loses no time in its steady
    state while c <= (tF+tB)/2, where tF and tB are a stage's forward and backward. 1f1b loses time
    for any c. `hop-aware-1f1b` holds more activations only for the slow hops.

    Source: Zhuang et al., "On Optimizing the Communication of Model Parallelism", 2022,
    arXiv 2211.05322.
    """

    def generate(self, *, num_ranks: int, num_microbatches: int) -> Schedule:
        """Returns the schedule, for any number of ranks and microbatches."""
        # One less than in the docstring, because `in_turns` adds one forward before the first
        # backward.
        num_warmups = [2 * (num_ranks - 1 - rank) for rank in range(num_ranks)]
        return in_turns("eager-1f1b", num_warmups, num_microbatches)
