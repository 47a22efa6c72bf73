"""What each placement is: how gradients are reduced to it, and how parameters come back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from pipegrad.comm import collectives
from pipegrad.comm.work import Done, Work
from pipegrad.plan.buckets import Slot
from pipegrad.plugins.handler import Placement, ReductionStep
from pipegrad.reduce.pair_exchange import PairSum


class StepBucket:
    """The part of a bucket that a reduction reduces: what handlers launch.

    Args:
        buffer: Payload, then one flag a slot; flat.
        num_flags: How many.
        index: The bucket's.
        slots: Where each gradient lies in the payload.
        pair_sum: What two ranks do that do not all-reduce.

    Attributes:
        is_mean: Whether what was launched last leaves the mean: a hook's, or of float16, whose sum
            may overflow where the mean does not, so that each rank divides its own part before.
        arriving: What the next rank sends in this step, if the reduction is point-to-point.
    """

    def __init__(
        self,
        buffer: torch.Tensor,
        num_flags: int,
        *,
        index: int,
        slots: Sequence[Slot],
        pair_sum: PairSum | None = None,
    ) -> None:
        self.buffer = buffer
        self.num_flags = num_flags
        self.index = index
        self.payload, self.flags = buffer[:-num_flags], buffer[-num_flags:]
        self._slots = slots
        self.pair_sum = pair_sum
        self.is_mean = False
        self.arriving: collectives.Arriving | None = None

    @property
    def gradients(self) -> list[torch.Tensor]:
        """Views of the payload, one a flag; see `FlatBucket`."""
        start = int(self.payload.storage_offset())
        return [
            self.payload.as_strided(slot.shape, slot.stride, start + slot.offset)
            for slot in self._slots
        ]

    def reduce(self, reduction: ReductionStep, group: dist.ProcessGroup) -> Work:
        """Sums over `group` as the reduction's placement says.

        Sync: on a comm stream. With SHARD this rank's shard is summed, and the flags behind it.
        """
        if reduction.op == "mean" and self.buffer.dtype == torch.float16:
            self.buffer.div_(len(reduction.ranks))
            self.is_mean = True
        return _REDUCE[reduction.placement](self, group)


def _replicate(bucket: StepBucket, group: dist.ProcessGroup) -> Work:
    if bucket.pair_sum is not None:
        return bucket.pair_sum.begin(bucket.arriving, group)
    work: Work = dist.all_reduce(bucket.buffer, group=group, async_op=True)
    return work


def _give_to_owner(bucket: StepBucket, group: dist.ProcessGroup) -> Work:
    collectives.reduce_chain(bucket.buffer, bucket.arriving, group)
    return Done()


def _shard(bucket: StepBucket, group: dist.ProcessGroup) -> Work:
    numel = bucket.buffer.numel() - bucket.num_flags
    payload, flags = bucket.buffer[:numel], bucket.buffer[numel:]
    me, size = dist.get_rank(group), dist.get_world_size(group)
    shards = payload.view(size, -1)
    collectives.reduce_scatter(shards[me], shards.unbind(), group, common=flags)
    if me + 1 < size:  # over the shard behind this one, which is with its rank by now
        behind = (me + 1) * shards.shape[1]
        payload[behind : behind + bucket.num_flags].copy_(flags)
    return Done()


def bring_back(parameters: torch.Tensor, placement: Placement, group: dist.ProcessGroup) -> None:
    """Moves updated parameters back along a reduction.

    Args:
        parameters: The part of a bucket that the reduction reduced the gradients of, ``(numel,)``.
        placement: The reduction's.
        group: Its communicator.

    Sync: on a comm stream.
    """
    _BRING_BACK[placement](parameters, group)


def _gather(parameters: torch.Tensor, group: dist.ProcessGroup) -> None:
    collectives.all_gather(parameters.view(dist.get_world_size(group), -1).unbind(), group)


_REDUCE: Mapping[Placement, Callable[[StepBucket, dist.ProcessGroup], Work]] = {
    Placement.REPLICATE: _replicate,
    Placement.OWNER: _give_to_owner,
    Placement.SHARD: _shard,
}
_BRING_BACK: Mapping[Placement, Callable[[torch.Tensor, dist.ProcessGroup], None]] = {
    Placement.OWNER: collectives.broadcast_chain,
    Placement.SHARD: _gather,
}
