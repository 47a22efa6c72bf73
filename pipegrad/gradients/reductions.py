"""The reduction of gradients for each placement, and the parameter sync along it.

Steps 6 and 9 of the journey of a gradient (docs/internals.md) run these on comm streams.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from pipegrad.comm import collectives
from pipegrad.comm.collectives import Arriving, WideSum
from pipegrad.comm.sync_points import Done, Work
from pipegrad.gradients.bucket_memory import BucketMemory, FlatBuffer
from pipegrad.gradients.tie_exchange import PairSum
from pipegrad.plan.plan import Launch
from pipegrad.plugins.handler import Placement, ReductionStep


class StepBucket:
    """The part of a bucket for one reduction; the `FlatBucket` that handlers launch.

    Args:
        memory: The memory of the bucket.
        launch: The collective.
        pair_sum: The exchange of two ranks, if the reduction has one.
        is_divided: Whether gradients were divided before; their sum is the mean then.
        inbox: Memory for the next rank's sum, if the reduction is point-to-point.

    Attributes:
        reduction: The reduction.
        buffer: Payload, then a flag for each slot; flat.
        index: Index of the bucket.
        scattered: Elements of each rank after the reduction; see `Bucket.scattered`.
        is_mean: Whether the last launch leaves the mean, not the sum.
        arriving: The posted receive into `inbox`.
        name: What it reduces, for profilers.
        description: The same for errors, with the handler.
    """

    def __init__(
        self,
        memory: BucketMemory,
        launch: Launch,
        *,
        pair_sum: PairSum | None = None,
        is_divided: bool = False,
        inbox: FlatBuffer | None = None,
    ) -> None:
        bucket = memory.bucket
        self.memory, self.launch = memory, launch
        self.reduction = bucket.route[launch.step]
        self.buffer, num_flags = memory.part(launch.step), len(bucket.slots)
        self.payload, self.flags = self.buffer[:-num_flags], self.buffer[-num_flags:]
        self.index = bucket.index
        self._slots = bucket.pieces(memory.rank, launch.step)
        self.scattered = bucket.scattered(launch.step, memory.rank)
        self.pair_sum = pair_sum
        self.is_mean = self.is_divided = is_divided
        self.inbox = inbox
        self.arriving: Arriving | None = None
        self.name = f"bucket {bucket.index} {self.reduction}"
        self.description = (
            f"bucket {bucket.index} ({bucket.names}): {self.reduction} over ranks "
            f"{list(self.reduction.ranks)} by handler {self.reduction.handler!r}"
        )

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

        Sync: on a comm stream. With SHARD and WHOLE, only this rank's part and the flags hold sums
        then.
        """
        # Each rank divides its part before the sum, because a sum of float16 may overflow although
        # the mean does not. A wider sum is divided before it is rounded.
        divisor = len(reduction.ranks) if reduction.op == "mean" and not self.is_mean else 1
        self.is_mean |= divisor != 1
        wide = None
        # Not for messages between two ranks, because a sum of two parts is rounded once anyway.
        sum_dtype = self.memory.bucket.sum_dtype
        if sum_dtype != self.buffer.dtype and not reduction.is_point_to_point:
            wide = WideSum(sum_dtype.to_real(), divisor)
        elif divisor != 1:
            self.payload.div_(divisor)
        return _REDUCE[reduction.placement](self, group, wide)


def _replicate(bucket: StepBucket, group: dist.ProcessGroup, wide: WideSum | None) -> Work:
    if bucket.pair_sum is not None:
        return bucket.pair_sum.begin(bucket.buffer, bucket.arriving, group)
    if wide is not None:
        collectives.wide_all_reduce(bucket.buffer, wide, group)
        return Done()
    work: Work = dist.all_reduce(bucket.buffer, group=group, async_op=True)
    return work


def _give_to_owner(bucket: StepBucket, group: dist.ProcessGroup, _: WideSum | None) -> Work:
    # The sender need not wait for this rank, because the receive was posted at the start of the
    # step. See steps 1 and 6 of the journey of a gradient.
    collectives.reduce_chain(bucket.buffer, bucket.arriving, group)
    return Done()


def _scatter(bucket: StepBucket, group: dist.ProcessGroup, wide: WideSum | None) -> Work:
    flags, numel, num_flags = bucket.flags, bucket.payload.numel(), bucket.flags.numel()
    me, shards = dist.get_rank(group), bucket.payload.split(list(bucket.scattered))
    collectives.reduce_scatter(shards[me], shards, group, common=flags, wide=wide)
    # Copy the flags to the memory right after this rank's shard; see [Note: shards]. They may
    # overwrite the next shards, because other ranks have summed those by now.
    end = sum(bucket.scattered[: me + 1])
    if end < numel:
        # With WHOLE, the parts of the last ranks may be smaller than the flags.
        overlap = numel - end < num_flags
        bucket.buffer[end : end + num_flags].copy_(flags.clone() if overlap else flags)
    return Done()


def sync_parameters(
    parameters: torch.Tensor,
    placement: Placement,
    group: dist.ProcessGroup,
    *,
    scattered: Sequence[int],
) -> None:
    """Sends updated parameters backwards along a reduction.

    Args:
        parameters: The parameters of the region that the reduction has reduced, ``(numel,)``.
        placement: Placement of the reduction.
        group: Its communicator.
        scattered: Elements of each rank after the reduction; see `Bucket.scattered`.

    Sync: on a comm stream.
    """
    if placement is Placement.OWNER:
        collectives.broadcast_chain(parameters, group)
    else:  # SHARD or WHOLE
        collectives.all_gather(parameters.split(list(scattered)), group)


_REDUCE: Mapping[Placement, Callable[[StepBucket, dist.ProcessGroup, WideSum | None], Work]] = {
    Placement.REPLICATE: _replicate,
    Placement.OWNER: _give_to_owner,
    Placement.WHOLE: _scatter,
    Placement.SHARD: _scatter,
}
