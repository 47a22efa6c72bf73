"""Several stages a rank, one forward and one backward in turns."""

from __future__ import annotations

from pipegrad.errors import ScheduleError
from pipegrad.limits import check_size
from pipegrad.schedules.builtin.one_f_one_b import turns
from pipegrad.schedules.schedule import Action, Kind, Schedule, ScheduleGenerator, is_number


class InterleavedOneForwardOneBackward(ScheduleGenerator):
    """Each rank holds every P-th stage: a bubble smaller by their number, for more transfers.

    For 2 ranks, 2 stages a rank and 2 microbatches::

        rank 0  0F0 0F1 2F0 2F1     2B0     2B1 0B0 0B1
        rank 1      1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1

    The number of microbatches must be a multiple of the number of ranks.

    Args:
        stages_per_rank: Number of stages of each rank, at least 1.

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM", 2021, section 2.2.
    """

    def __init__(self, *, stages_per_rank: int = 2) -> None:
        if not is_number(stages_per_rank) or stages_per_rank < 1:
            raise ScheduleError(
                f"stages_per_rank is {stages_per_rank!r}, expected at least 1, a whole number"
            )
        self.stages_per_rank = stages_per_rank

    def generate(self, *, num_ranks: int, num_microbatches: int) -> Schedule:
        """Returns the schedule.

        Raises:
            ScheduleError: If the number of microbatches is not a multiple of the number of ranks,
                or if there would be too many stages.
        """
        check_size(num_ranks * self.stages_per_rank, num_microbatches)
        if num_microbatches % num_ranks:
            nearest = max(1, round(num_microbatches / num_ranks)) * num_ranks
            raise ScheduleError(
                f"interleaved-1f1b takes a multiple of {num_ranks} microbatches over {num_ranks} "
                f"ranks, found {num_microbatches}; the nearest is {nearest}"
            )
        actions = tuple(
            self._actions(rank, num_ranks, num_microbatches) for rank in range(num_ranks)
        )
        stage_to_rank = tuple(
            stage % num_ranks for stage in range(num_ranks * self.stages_per_rank)
        )
        return Schedule("interleaved-1f1b", num_microbatches, stage_to_rank, actions)

    def _actions(self, rank: int, num_ranks: int, num_microbatches: int) -> tuple[Action, ...]:
        chunks = self.stages_per_rank
        # Microbatches go in rounds of P. Within a round a rank computes one stage (chunk) after
        # the other for all P microbatches. Backwards begin with the last chunk.
        forwards, backwards = list[Action](), list[Action]()
        for start in range(0, num_microbatches, num_ranks):
            for chunk in range(chunks):
                for microbatch in range(start, start + num_ranks):
                    appended: tuple[tuple[list[Action], Kind, int], ...] = (
                        (forwards, "F", chunk),
                        (backwards, "B", chunks - 1 - chunk),
                    )
                    for actions, kind, chunk_of_kind in appended:
                        actions.append(Action(chunk_of_kind * num_ranks + rank, kind, microbatch))
        num_warmup = (chunks - 1) * num_ranks + (2 if chunks > 1 else 1) * (num_ranks - 1 - rank)
        return turns(forwards, backwards, min(num_warmup, len(forwards)))
