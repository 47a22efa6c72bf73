"""1f1b with a split backward: weight gradients (W) fill the bubble."""

from __future__ import annotations

from collections.abc import Sequence

from pipegrad.schedules.schedule import Action, Schedule, ScheduleGenerator


def split_in_turns(
    name: str, num_warmups: Sequence[int], num_microbatches: int, *, head_w_first: bool = False
) -> Schedule:
    """Returns a schedule with one stage on each rank and a split backward."""
    # Limit the delay, because more changes nothing once all W come after all I.
    delays = [min(num_warmups[0] - num_warmup, num_microbatches) for num_warmup in num_warmups]
    actions = tuple(
        tuple(_actions_of(rank, num_warmup, num_delayed, num_microbatches))
        for rank, (num_warmup, num_delayed) in enumerate(zip(num_warmups, delays, strict=True))
    )
    stage_to_rank = tuple(range(len(actions)))
    return Schedule(name, num_microbatches, stage_to_rank, actions, head_w_first=head_w_first)


def _actions_of(
    rank: int, num_warmup: int, num_delayed: int, num_microbatches: int
) -> list[Action]:
    actions = [Action(rank, "F", m) for m in range(min(num_warmup, num_microbatches))]
    for microbatch in range(num_microbatches + num_delayed):
        # I comes first, because the previous rank waits for it. W is delayed, because it needs no
        # other rank, and fills the time in which 1f1b would wait.
        late, ahead = microbatch - num_delayed, microbatch + num_warmup
        if microbatch < num_microbatches:
            actions.append(Action(rank, "I", microbatch))
        if late >= 0:
            actions.append(Action(rank, "W", late))
        if ahead < num_microbatches:
            actions.append(Action(rank, "F", ahead))
    return actions


class SplitBackward(ScheduleGenerator):
    """A schedule with split backwards; weight gradients for other ranks may be computed first."""

    def __init__(self, *, head_w_first: bool = False) -> None:
        self.head_w_first = head_w_first


class ZeroBubbleH1(SplitBackward):
    """1f1b whose idle time W fills, for as many live activations on every rank as on its first.

    For 3 ranks and 4 microbatches::

        rank 0  0F0 0F1 0F2         0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
        rank 1      1F0 1F1     1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
        rank 2          2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3

    Rank i of P follows the order of 1f1b, and computes each W i microbatches later. It holds
    min(M, P) activations. For M >= P the bubble of a step is (P-1) max(tF, tI, tF+tI-tW). 1f1b has
    a bubble of (P-1) (tF+tI+tW). If tI is at most tF and at most tW, the bubble is (P-1) tF. No
    schedule with one stage on each rank has a smaller bubble, because the last rank starts that
    late. ZB-H2 holds 2P-1 activations and gains nothing here, because ranks meet at the end of each
    step. These bubbles assume transfers that take no time; `hop-aware-zb-h1` hides others.

    Args:
        head_w_first: After the last input gradient of a stage, first compute the weight gradients
            that other ranks wait for, for all microbatches, because a tied head is then reduced
            while the other weight gradients are computed.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023, arXiv 2401.10241, section 2.
    """

    def generate(self, *, num_ranks: int, num_microbatches: int) -> Schedule:
        """Returns the schedule, for any number of ranks and microbatches."""
        num_warmups = range(num_ranks, 0, -1)
        return split_in_turns(
            "zb-h1", num_warmups, num_microbatches, head_w_first=self.head_w_first
        )
