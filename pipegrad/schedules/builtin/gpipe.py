"""All forwards, then all backwards."""

from __future__ import annotations

from pipegrad.schedules.builtin.one_f_one_b import in_turns
from pipegrad.schedules.schedule import Schedule, ScheduleGenerator


class GPipe(ScheduleGenerator):
    """All forwards, then all backwards: the most live activations, the fewest surprises.

    For 3 ranks and 3 microbatches::

        rank 0  0F0 0F1 0F2                 0B0 0B1 0B2
        rank 1      1F0 1F1 1F2         1B0 1B1 1B2
        rank 2          2F0 2F1 2F2 2B0 2B1 2B2

    Source: Huang et al., GPipe, 2019, section 2.3. Backwards are in the order of the forwards here.
    """

    def generate(self, *, num_ranks: int, num_microbatches: int) -> Schedule:
        """Returns the schedule, for any number of ranks and microbatches."""
        return in_turns("gpipe", [num_microbatches] * num_ranks, num_microbatches)
