"""Split backward, so that weights' gradients fill the bubble of 1f1b."""

from __future__ import annotations

from pipegrad.schedules.schedule import Action, Schedule, ScheduleGenerator


class ZeroBubbleH1(ScheduleGenerator):
    """1f1b whose idle time W fills, for as many live activations on every rank as on its first.

    For 3 ranks and 4 microbatches::

        rank 0  0F0 0F1 0F2         0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
        rank 1      1F0 1F1     1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
        rank 2          2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3

    Rank i of P goes by the turns of 1f1b, and is i weights' gradients late: it holds min(M, P)
    activations. The bubble of a step is (P-1) max(tF, tI, tF+tI-tW), for M >= P; that of 1f1b
    (P-1) (tF+tI+tW). Where tI is neither above tF nor above tW it is (P-1) tF, which no schedule of
    one stage a rank undercuts, whatever it holds, since the last rank begins so late: ZB-H2's 2P-1
    activations buy nothing then, if ranks meet at the end of the step, as they do here.

    Args:
        head_w_first: Behind the last input's gradient of a stage, first compute the weights'
            gradients that other ranks wait for, of all microbatches: so a tied head is reduced
            while the others are computed.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023, arXiv 2401.10241, section 2.
    """

    def __init__(self, *, head_w_first: bool = False) -> None:
        self.head_w_first = head_w_first

    def generate(self, *, num_ranks: int, num_microbatches: int) -> Schedule:
        """Returns the schedule, for any number of ranks and microbatches."""
        rows = tuple(
            tuple(_row(rank, num_ranks - rank, num_microbatches)) for rank in range(num_ranks)
        )
        places = tuple(range(num_ranks))
        return Schedule("zb-h1", num_microbatches, places, rows, head_w_first=self.head_w_first)


def _row(rank: int, num_warmup: int, num_microbatches: int) -> list[Action]:
    row = [Action(rank, "F", m) for m in range(min(num_warmup, num_microbatches))]
    for microbatch in range(num_microbatches + rank):
        late, ahead = microbatch - rank, microbatch + num_warmup
        if microbatch < num_microbatches:
            row.append(Action(rank, "I", microbatch))
        if late >= 0:
            row.append(Action(rank, "W", late))
        if ahead < num_microbatches:
            row.append(Action(rank, "F", ahead))
    return row
