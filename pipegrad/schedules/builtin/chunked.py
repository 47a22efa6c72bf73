"""Sequences cut into chunks of time, whose state stays on the rank of its stage."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace

from pipegrad.errors import ScheduleError
from pipegrad.schedules.builtin.one_f_one_b import in_turns
from pipegrad.schedules.builtin.zb_h1 import split_in_turns
from pipegrad.schedules.schedule import Schedule, ScheduleGenerator, is_number


class _Chunked(ScheduleGenerator):
    """A schedule of one stage on each rank, made for chunks as if they were microbatches."""

    def __init__(self, chunks: int = 1) -> None:
        if not is_number(chunks) or chunks < 1:
            raise ScheduleError(f"chunks is {chunks!r}, expected a whole number from 1")
        self.chunks = chunks

    def of_chunks(self, chunks: int) -> ScheduleGenerator:
        """Returns the same schedule for another number of chunks."""
        return type(self)(chunks)

    def generate(self, *, num_ranks: int, num_microbatches: int) -> Schedule:
        """Returns the schedule, for any number of ranks and microbatches."""
        # Each rank computes `chunks - 1` more forwards before its first backward, because that is
        # the backward of the last chunk of a sequence.
        schedule = self._of_microbatches(num_ranks, self.chunks - 1, num_microbatches * self.chunks)
        last = self.chunks - 1
        actions = tuple(
            tuple(
                action
                if action.kind == "F"
                else action._replace(microbatch=m - m % self.chunks + last - m % self.chunks)
                for action in of_rank
                for m in [action.microbatch]
            )
            for of_rank in schedule.actions
        )
        return replace(schedule, actions=actions, chunks=self.chunks)

    @abstractmethod
    def _of_microbatches(self, num_ranks: int, num_more: int, num_microbatches: int) -> Schedule:
        """Returns a schedule with `num_more` more forwards before the first backward of a rank."""


class ChunkedOneForwardOneBackward(_Chunked):
    """1f1b of chunks of time: a rank holds (P - 1 + k) / k sequences instead of P, of k chunks.

    For 3 ranks, 2 sequences and 2 chunks; 0F3 is the second chunk of the second sequence::

        rank 0  0F0 0F1 0F2 0F3         0B1     0B0     0B3 0B2
        rank 1      1F0 1F1 1F2     1B1 1F3 1B0     1B3 1B2
        rank 2          2F0 2F1 2B1 2F2 2B0 2F3 2B3 2B2

    Forwards of a sequence run in the order of time, and backwards from its end. The state that a
    stage carries from chunk to chunk, for example keys and values, stays on its rank. If all chunks
    take equally long, the bubble is (P-1) (tF+tB) / k, where tF and tB are the times of a whole
    sequence.

    Source: Sun et al., "Seq1F1B: Efficient Sequence-Level Pipeline Parallelism", 2024, arXiv
    2406.03488, section 3.
    """

    def _of_microbatches(self, num_ranks: int, num_more: int, num_microbatches: int) -> Schedule:
        num_warmups = [num_ranks - 1 - rank + num_more for rank in range(num_ranks)]
        return in_turns("chunked-1f1b", num_warmups, num_microbatches)


class ChunkedZeroBubbleH1(_Chunked):
    """zb-h1 of chunks of time: as `chunked-1f1b`, and weight gradients (W) fill the bubble.

    For 2 ranks, 2 sequences and 2 chunks::

        rank 0  0F0 0F1 0F2     0I1 0W1 0F3 0I0 0W0 0I3 0W3 0I2 0W2
        rank 1      1F0 1F1 1I1 1F2 1I0 1W1 1F3 1I3 1W0 1I2 1W3 1W2

    Every rank holds as much as the first one of `chunked-1f1b`.

    Source: as `chunked-1f1b`, with the split backward of `zb-h1`.
    """

    def _of_microbatches(self, num_ranks: int, num_more: int, num_microbatches: int) -> Schedule:
        num_warmups = [num_ranks - rank + num_more for rank in range(num_ranks)]
        return split_in_turns("chunked-zb-h1", num_warmups, num_microbatches)
