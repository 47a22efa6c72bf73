"""Split backward over stages in a V: nearly no bubble, with as many activations as 1f1b."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from pipegrad.schedules.builtin.zb_h1 import SplitBackward
from pipegrad.schedules.schedule import Action, Kind, Schedule


class ZeroBubbleV(SplitBackward):
    """Two stages a rank, in a V: the first and the last are on rank 0, where a tie costs nothing.

    For 2 ranks and 3 microbatches::

        rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
        rank 1      1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2

    Each rank holds at most 2P activations of its half stages, as much as P of whole stages. If F, I
    and W take one unit each and M >= 2P-1, a step takes 6M+P-1 units, and a rank computes for 6M of
    them. For fewer microbatches the schedule of 2P-1 is used, without the actions of the missing
    microbatches.

    Args:
        head_w_first: As in `zb-h1`, for ties of stages on different ranks.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023, arXiv 2401.10241, section 6.
    """

    def generate(self, *, num_ranks: int, num_microbatches: int) -> Schedule:
        """Returns the schedule, for any number of ranks and microbatches."""
        whole = max(num_microbatches, 2 * num_ranks - 1)
        actions = tuple(
            tuple(a for a in _actions_of(rank, num_ranks, whole) if a.microbatch < num_microbatches)
            for rank in range(num_ranks)
        )
        stage_to_rank = (*range(num_ranks), *reversed(range(num_ranks)))
        return Schedule(
            "zbv", num_microbatches, stage_to_rank, actions, head_w_first=self.head_w_first
        )


def _actions_of(rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Action]:
    """Yields the actions of a rank: f0, i0, w0 down the V, and f1, i1, w1 up."""
    kinds: tuple[Kind, ...] = ("F", "I", "W")
    f0, i0, w0 = (Action(rank, kind, 0) for kind in kinds)
    f1, i1, w1 = (Action(2 * num_ranks - 1 - rank, kind, 0) for kind in kinds)
    rest = num_ranks - rank
    # The phases of the paper: warm-up, steady state, and drain. Microbatches are numbered at the
    # end, because every action takes the next microbatch of its kind and stage.
    ahead = rest - 1  # after the warm-up: the lead of the way down, in forwards
    turns = [f0] * (2 * rest - 1) + [f1, f0] * rank + [f1, i1, w1] * rest
    turns += [f0, i0, w0, f1, i1, w1] * (num_microbatches - num_ranks - ahead)
    turns += [i0, w0, f1, i1, w1] * ahead
    turns += [i0, i1] * rank + [i0, w0] * rest + [w1] * rank + [w0] * rank
    number_of: dict[Action, Iterator[int]] = {turn: count() for turn in (f0, i0, w0, f1, i1, w1)}
    for turn in turns:
        yield turn._replace(microbatch=next(number_of[turn]))
