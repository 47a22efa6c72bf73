"""Meetings: which parameters of a rank meet those of other replicas, and in which order. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from pipegrad.plan.buckets import Bucket, in_few_words
from pipegrad.plan.routes import Route, is_counted, meeting_of
from pipegrad.plugins.handler import Placement, ReductionStep


@dataclass(frozen=True)
class Meeting:
    """Parameters of one rank that meet together.

    Attributes:
        index: Its number: the same on all ranks.
        keys: The parameters, of which this rank steps `numel` elements.
        numel: The same, for all keys.
        dtype: In which they are averaged, float32 at least.
        step: The replicas that meet.
        averages: Whether this rank averages with other replicas. If several ranks of a replica have
            the same elements, one of them averages.
        spread: The reductions along which the result then goes to the other ranks of this replica,
            from the owner of each.
    """

    index: int
    keys: tuple[str, ...]
    numel: int
    dtype: torch.dtype
    step: ReductionStep
    averages: bool
    spread: tuple[ReductionStep, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that this rank averages with other replicas."""
        return self.numel * self.dtype.itemsize if self.averages else 0

    @property
    def names(self) -> str:
        """A short text for its parameters."""
        return in_few_words(self.keys)


def make_meetings(
    packs: Iterable[Bucket], numels: dict[str, int], rank: int, master_dtype: torch.dtype | None
) -> Iterator[Meeting]:
    """Yields the meetings of a rank, in the order of all ranks.

    Args:
        packs: Its parameters by route.
        numels: Key -> how many elements of a parameter its optimizer steps.
        rank: The rank.
        master_dtype: dtype of main parameters, if it is not that of each parameter.
    """
    # All members go through one list of packs, and in each first average and then spread. So the
    # first of these collectives that is not complete can always complete.
    for pack in packs:
        keys = tuple(slot.key for slot in pack.slots if slot.key in numels)
        step = meeting_of(pack.route)
        if step is not None and keys:
            yield Meeting(
                pack.index,
                keys,
                sum(numels[key] for key in keys),
                _dtype(pack.dtype, master_dtype),
                step,
                is_counted(pack.route, rank),
                _spread(pack.route),
            )


def _dtype(dtype: torch.dtype, master_dtype: torch.dtype | None) -> torch.dtype:
    """Returns the dtype in which parameters are averaged."""
    # An outer step of lr 0.7 is smaller than the inner steps that it averages. In 16 bits most of
    # it would be lost, also if parameters have no more bits.
    least = torch.promote_types(dtype, torch.float32)
    return torch.promote_types(least, master_dtype) if master_dtype else least


def _spread(route: Route) -> tuple[ReductionStep, ...]:
    # With OWNER and SHARD a parameter sync sends the result, as after every step.
    return tuple(step for step in route if step.placement is Placement.REPLICATE)
