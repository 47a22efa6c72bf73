"""The reduction of gradients for each placement, and the parameter sync along it.

Steps 6 and 9 of the journey of a gradient (docs/internals.md) run these on comm streams.
"""

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
    """The part of a bucket for one reduction; the `FlatBucket` that handlers launch.

    Args:
        buffer: Payload, then a flag for each slot; flat.
        num_flags: Number of flags.
        index: Of the bucket.
        slots: The slot of each gradient in the payload.
        pair_sum: The exchange of two ranks, if the reduction has one.

    Attributes:
        is_mean: Whether the last launch leaves the mean, not the sum: a hook's, or that of float16.
        arriving: The posted receive of the next rank's sum, if the reduction is point-to-point.
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

    def begin(self) -> None:
        """Starts a reduction: what is launched next is a sum, unless it says otherwise."""
        self.is_mean = False

    def expect(self, inbox: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Posts the receive of the next rank's partial sum, for this step."""
        self.arriving = collectives.expect_reduce_chain(inbox, group)

    def end(self) -> None:
        """Ends a reduction: the partial sum was added."""
        self.arriving = None

    @property
    def gradients(self) -> list[torch.Tensor]:
        """Views of the payload, one for each flag; see `FlatBucket`."""
        start = int(self.payload.storage_offset())
        return [
            self.payload.as_strided(slot.shape, slot.stride, start + slot.offset)
            for slot in self._slots
        ]

    def reduce(self, reduction: ReductionStep, group: dist.ProcessGroup) -> Work:
        """Sums over `group` as the reduction's placement says.

        Sync: on a comm stream. With SHARD, only this rank's shard and the flags hold sums then.
        """
        # A sum of float16 may overflow although the mean does not. So each rank divides its own
        # part before the sum.
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
    # The receive was posted at the beginning of the step, so the sender need not wait for this
    # rank. See steps 1 and 6 of the journey of a gradient.
    collectives.reduce_chain(bucket.buffer, bucket.arriving, group)
    return Done()


def _shard(bucket: StepBucket, group: dist.ProcessGroup) -> Work:
    numel = bucket.buffer.numel() - bucket.num_flags
    payload, flags = bucket.buffer[:numel], bucket.buffer[numel:]
    me, size = dist.get_rank(group), dist.get_world_size(group)
    shards = payload.view(size, -1)
    collectives.reduce_scatter(shards[me], shards.unbind(), group, common=flags)
    # The flags are copied to right behind this rank's shard; see [Note: shards]. They overwrite the
    # next shard, which the next rank has summed by now.
    if me + 1 < size:
        end = (me + 1) * shards.shape[1]
        payload[end : end + bucket.num_flags].copy_(flags)
    return Done()


def sync_parameters(
    parameters: torch.Tensor, placement: Placement, group: dist.ProcessGroup
) -> None:
    """Sends updated parameters backwards along a reduction.

    Args:
        parameters: The parameters of the region that the reduction has reduced, ``(numel,)``.
        placement: Of the reduction.
        group: Its communicator.

    Sync: on a comm stream.
    """
    _SYNC[placement](parameters, group)


def _gather(parameters: torch.Tensor, group: dist.ProcessGroup) -> None:
    collectives.all_gather(parameters.view(dist.get_world_size(group), -1).unbind(), group)


_REDUCE: Mapping[Placement, Callable[[StepBucket, dist.ProcessGroup], Work]] = {
    Placement.REPLICATE: _replicate,
    Placement.OWNER: _give_to_owner,
    Placement.SHARD: _shard,
}
_SYNC: Mapping[Placement, Callable[[torch.Tensor, dist.ProcessGroup], None]] = {
    Placement.OWNER: collectives.broadcast_chain,
    Placement.SHARD: _gather,
}
