"""One forward, one backward in turns, after some forwards to warm up."""

from __future__ import annotations

from collections.abc import Sequence

from pipegrad.schedules.schedule import Action, Schedule, ScheduleGenerator


def turns(
    forwards: Sequence[Action], backwards: Sequence[Action], num_warmup: int
) -> tuple[Action, ...]:
    """Returns `num_warmup` forwards, then alternating forwards and backwards, then the rest."""
    # The number of live activations stays at `num_warmup` plus one, because after the warm-up a
    # backward follows each forward.
    steady = zip(forwards[num_warmup:], backwards, strict=False)
    paired = [action for pair in steady for action in pair]
    drained = backwards[len(forwards[num_warmup:]) :]
    return (*forwards[:num_warmup], *paired, *drained)


def in_turns(name: str, num_warmups: Sequence[int], num_microbatches: int) -> Schedule:
    """Returns a schedule with one stage on each rank, from the number of warm-up forwards.

    Backwards are in the order of forwards.
    """
    actions = [
        turns(
            [Action(rank, "F", m) for m in range(num_microbatches)],
            [Action(rank, "B", m) for m in range(num_microbatches)],
            min(num_warmup, num_microbatches),
        )
        for rank, num_warmup in enumerate(num_warmups)
    ]
    return Schedule(name, num_microbatches, tuple(range(len(actions))), tuple(actions))


class OneForwardOneBackward(ScheduleGenerator):
    """A backward as soon as there is one: as long as GPipe, with at most P live activations.

    For 3 ranks and 4 microbatches::

        rank 0  0F0 0F1 0F2         0B0 0F3 0B1     0B2     0B3
        rank 1      1F0 1F1     1B0 1F2 1B1 1F3 1B2     1B3
        rank 2          2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3

    Source: Narayanan et al., PipeDream-Flush in "Memory-Efficient Pipeline-Parallel DNN Training",
    2021, section 3.2.
    """

    def generate(self, *, num_ranks: int, num_microbatches: int) -> Schedule:
        """Returns the schedule, for any number of ranks and microbatches."""
        num_warmups = [num_ranks - 1 - rank for rank in range(num_ranks)]
        return in_turns("1f1b", num_warmups, num_microbatches)
