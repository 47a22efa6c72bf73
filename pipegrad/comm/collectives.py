"""Collectives whose names differ between versions of torch, or that are slow on a backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist

from pipegrad.comm import messages
from pipegrad.comm.messages import DOWN, GATHERED, RECEIVED, SENT, UP, can_send, real
from pipegrad.comm.shard_sums import WideSum, exchange
from pipegrad.comm.work import Work


def wide_all_reduce(tensor: torch.Tensor, wide: WideSum, group: dist.ProcessGroup | None) -> None:
    """Sums `tensor` in place over the group, in a wider dtype than its own.

    Each rank sums a shard and sends the rounded result to all others. So the bytes are those of a
    ring all-reduce of the narrow dtype, and all ranks have the same bits.

    Sync: as `reduce_scatter`.
    """
    tensor = real(tensor)
    me, size = dist.get_rank(group), dist.get_world_size(group)
    numel = tensor.numel() // size
    shards, rest = tensor[: numel * size].view(size, -1), tensor[numel * size :]
    reduce_scatter(shards[me], shards.unbind(), group, common=rest, wide=wide)
    if numel:
        all_gather(shards.unbind(), group)


def reduce_scatter(
    output: torch.Tensor,
    shards: Sequence[torch.Tensor],
    group: dist.ProcessGroup | None,
    *,
    common: torch.Tensor | None = None,
    wide: WideSum | None = None,
) -> None:
    """Sums shard j over all ranks; rank j of the group has the result.

    gloo's own reduce-scatter is made of all-reduces and moves twice the bytes. So on gloo, every
    rank sends shard j to rank j, in pieces. Each rank adds what it receives in the order of ranks:
    the result does not depend on the order of arrival. This needs scratch memory of at most 16 MiB
    for each other rank.

    Args:
        output: This rank's sum, ``(numel,)``; may be its shard.
        shards: A flat tensor for each rank of the group, contiguous. They may have different
            numbers of elements, also none.
        group: The process group; None for the default group.
        common: A small tensor that is summed in place on all ranks.
        wide: How sums are added; by default in the dtype of `output`, with no division.

    Sync: `output` is ready on the current stream. Blocks the host if the backend does.
    """
    output, shards = real(output), list(map(real, shards))
    common = None if common is None else real(common)
    if messages.is_gloo(output, group):
        exchange(output, shards, group, common, wide)
        return
    if wide is not None:
        _reduce_scatter_wide(output, shards, group, common, wide)
        return
    if not _are_equal(shards):
        for owner, shard in enumerate(shards):
            if shard.numel():
                dist.reduce(shard, group_dst=owner, group=group)
        if output.data_ptr() != shards[dist.get_rank(group)].data_ptr():
            output.copy_(shards[dist.get_rank(group)])
    elif hasattr(dist, "reduce_scatter_single"):  # its name from torch 2.13 on
        dist.reduce_scatter_single(output, _joined(shards), group=group)
    else:
        dist.reduce_scatter_tensor(output, _joined(shards), group=group)
    if common is not None:
        dist.all_reduce(common, group=group)


def all_gather(shards: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Copies shard j of rank j to all ranks of the group.

    On gloo, every rank sends its shard to all others, and they receive it directly into their
    `shards`. No copy and no scratch memory is needed.

    Args:
        shards: A flat tensor for each rank of the group, side by side. They may have different
            numbers of elements, also none.
        group: The process group; None for the default group.

    Sync: as `reduce_scatter`.
    """
    me = dist.get_rank(group)
    if messages.is_gloo(shards[me], group):
        peers = [peer for peer in range(len(shards)) if peer != me and shards[peer].numel()]
        readers = [peer for peer in range(len(shards)) if peer != me and shards[me].numel()]
        # All receives are posted first. If sends came first, gloo would use the connection of two
        # ranks in one direction at a time.
        receiving = [messages.receive(shards[peer], peer, group, GATHERED) for peer in peers]
        sending = [messages.send(shards[me], peer, group, GATHERED) for peer in readers]
        for work in receiving:
            RECEIVED(work)
        for work in sending:
            SENT(work)
    elif not _are_equal(shards):
        for owner, shard in enumerate(shards):
            if shard.numel():
                dist.broadcast(shard, group_src=owner, group=group)
    elif hasattr(dist, "all_gather_single"):
        dist.all_gather_single(_joined(shards), shards[me], group=group)
    else:
        dist.all_gather_into_tensor(_joined(shards), shards[me], group=group)


def broadcast_chain(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Copies `tensor` of the first rank to all ranks: each rank sends it to the next rank.

    Sync: as `reduce_scatter`.
    """
    # Each rank sends once. The ranks of a pipeline begin their steps in the order of ranks, so each
    # has the new parameters when it needs them; see step 9 of the journey of a gradient.
    if not can_send(group, tensor.device):
        dist.broadcast(tensor, group_src=0, group=group)
        return
    me, size = dist.get_rank(group), dist.get_world_size(group)
    if me > 0:
        RECEIVED(messages.receive(tensor, me - 1, group, UP))
    if me + 1 < size:
        SENT(messages.send(tensor, me + 1, group, UP))


@dataclass(frozen=True)
class Arriving:
    """A posted receive of the sum that the next rank sends in `reduce_chain`.

    Attributes:
        tensor: Where the sum arrives.
        work: The receive.
    """

    tensor: torch.Tensor
    work: Work


def expect_reduce_chain(into: torch.Tensor, group: dist.ProcessGroup | None) -> Arriving | None:
    """Posts the receive of the sum that the next rank will send; None if no rank sends here.

    Sync: returns at once. Nobody may touch `into` until `reduce_chain` has returned.
    """
    # Step 1 of the journey of a gradient calls this, long before the sum is needed. A send ends
    # only when its receive is posted. So the sender, which ends its step earlier, need not wait.
    me, size = dist.get_rank(group), dist.get_world_size(group)
    if me + 1 == size or not can_send(group, into.device):
        return None
    return Arriving(into, messages.receive(into, me + 1, group, DOWN))


def reduce_chain(
    tensor: torch.Tensor, arriving: Arriving | None, group: dist.ProcessGroup | None
) -> None:
    """Sums over the group; the first rank has the result.

    Each rank adds its part to the sum of the next rank, and sends the new sum to the previous rank.
    All ranks but the first are left with a part of the sum.

    Args:
        tensor: This rank's part, contiguous.
        arriving: The result of `expect_reduce_chain`.
        group: The process group; None for the default group.

    Sync: as `reduce_scatter`.
    """
    # In a pipeline, the last rank has its gradients first. With sums in this order, each rank sends
    # when its backwards are done, and waits for no rank that is done later.
    if not can_send(group, tensor.device):
        dist.reduce(tensor, group_dst=0, group=group)
        return
    if arriving is not None:
        RECEIVED(arriving.work)
        real(tensor).add_(real(arriving.tensor))
    me = dist.get_rank(group)
    if me > 0:
        SENT(messages.send(tensor, me - 1, group, DOWN))


def _reduce_scatter_wide(
    output: torch.Tensor,
    shards: Sequence[torch.Tensor],
    group: dist.ProcessGroup | None,
    common: torch.Tensor | None,
    wide: WideSum,
) -> None:
    """Sends every rank its shard, and adds what arrives."""
    # NCCL adds in the dtype that it sends. This needs scratch memory of the size of all shards.
    parts = torch.empty((len(shards), output.numel()), dtype=output.dtype, device=output.device)
    received, sent = [output.numel()] * len(shards), [shard.numel() for shard in shards]
    dist.all_to_all_single(parts.view(-1), _joined(shards), received, sent, group=group)
    wide.write(iter(parts), output)
    if common is not None:
        parts = torch.empty((len(shards), common.numel()), dtype=common.dtype, device=common.device)
        parts[dist.get_rank(group)].copy_(common)
        all_gather(parts.unbind(), group)
        wide.write(iter(parts), common)


def _are_equal(shards: Sequence[torch.Tensor]) -> bool:
    return len({shard.numel() for shard in shards}) == 1


def _joined(shards: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the shards in one tensor, without a copy if they lie side by side in memory."""
    addresses = [(shard.untyped_storage().data_ptr(), shard.storage_offset()) for shard in shards]
    storage, offset = addresses[0]
    ends = list(accumulate((shard.numel() for shard in shards), initial=0))
    if addresses == [(storage, offset + end) for end in ends[:-1]]:
        return shards[0].as_strided((ends[-1],), (1,))
    return torch.cat(list(shards))
