"""Collectives whose names differ between versions of torch, or that are slow on a backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pipegrad.comm import sync_points
from pipegrad.comm.work import Work

RECEIVED = sync_points.WaitWork(
    "collective.received", "nobody reads or passes on what is still arriving"
)
SENT = sync_points.WaitWork(
    "collective.sent", "who writes there next must not overwrite what is leaving"
)

# Tags of pipegrad's messages. They differ from the tags of other messages between the same two
# ranks. They also differ from each other: the receive of a reduce chain is posted at the beginning
# of a step, and other messages arrive between it and its send.
_SHARDS, _COMMON, _GATHERED, _UP, _DOWN, COUNTS, BACK = range(0x70670, 0x70677)
_PIECE_BYTES, _AHEAD = 2**23, 2  # smaller pieces cost time, larger pieces scratch memory


def backend_of(group: dist.ProcessGroup | None, device: torch.device) -> str:
    """Returns the backend of `group` for `device`; None means the default group."""
    backends = dist.get_backend_config(group)
    pairs = dict(pair.split(":") for pair in backends.split(",") if ":" in pair)
    return pairs.get(device.type, backends)


def blocks_host(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Whether waiting for a collective on `device` blocks the calling thread (gloo does)."""
    return device.type == "cpu" or backend_of(group, device) == "gloo"


def reduce_scatter(
    output: torch.Tensor,
    shards: Sequence[torch.Tensor],
    group: dist.ProcessGroup | None,
    *,
    common: torch.Tensor | None = None,
) -> None:
    """Sums shard j over all ranks; rank j of the group has the result.

    gloo's own reduce-scatter is made of all-reduces and moves twice the bytes. So on gloo, every
    rank sends shard j to rank j, in pieces. Each rank adds what it receives in the order of ranks:
    the result does not depend on the order of arrival. This needs scratch memory of at most 16 MiB
    for each other rank.

    Args:
        output: This rank's sum, ``(numel,)``; may be its shard.
        shards: A tensor ``(numel,)`` for each rank of the group, contiguous.
        group: The process group; None for the default group.
        common: A small tensor that is summed in place on all ranks.

    Sync: `output` is ready on the current stream. Blocks the host if the backend does.
    """
    output, shards = real(output), list(map(real, shards))
    if _is_gloo(output, group):
        _exchange(output, shards, group, common)
        return
    if hasattr(dist, "reduce_scatter_single"):  # its name from torch 2.13 on
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
        shards: A tensor ``(numel,)`` for each rank of the group, side by side.
        group: The process group; None for the default group.

    Sync: as `reduce_scatter`.
    """
    me = dist.get_rank(group)
    if _is_gloo(shards[me], group):
        peers = [peer for peer in range(len(shards)) if peer != me]
        # All receives are posted first. If sends came first, gloo would use the connection of two
        # ranks in one direction at a time.
        receiving = [receive(shards[peer], peer, group, _GATHERED) for peer in peers]
        sending = [send(shards[me], peer, group, _GATHERED) for peer in peers]
        for work in receiving:
            RECEIVED(work)
        for work in sending:
            SENT(work)
    elif hasattr(dist, "all_gather_single"):
        dist.all_gather_single(_joined(shards), shards[me], group=group)
    else:
        dist.all_gather_into_tensor(_joined(shards), shards[me], group=group)


def can_send(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Whether a tensor on `device` can be sent to one rank. gloo can only send from the CPU."""
    return device.type == "cpu" or backend_of(group, device) != "gloo"


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
        RECEIVED(receive(tensor, me - 1, group, _UP))
    if me + 1 < size:
        SENT(send(tensor, me + 1, group, _UP))


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
    return Arriving(into, receive(into, me + 1, group, _DOWN))


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
        SENT(send(tensor, me - 1, group, _DOWN))


def real(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a flat tensor; for complex numbers, their real and imaginary parts, side by side."""
    # Not every backend adds complex numbers.
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


def receive(tensor: torch.Tensor, peer: int, group: dist.ProcessGroup | None, tag: int) -> Work:
    """Starts to receive from a rank of the group."""
    return _work(dist.irecv(tensor, group=group, group_src=peer, tag=tag))


def send(tensor: torch.Tensor, peer: int, group: dist.ProcessGroup | None, tag: int) -> Work:
    """Starts to send to a rank of the group."""
    return _work(dist.isend(tensor, group=group, group_dst=peer, tag=tag))


def _exchange(
    output: torch.Tensor,
    shards: Sequence[torch.Tensor],
    group: dist.ProcessGroup | None,
    common: torch.Tensor | None,
) -> None:
    me = dist.get_rank(group)
    if common is not None:
        _exchange_shards(common, [common.clone()] * len(shards), me, group, _COMMON)
    _exchange_shards(output, shards, me, group, _SHARDS)


def _exchange_shards(
    output: torch.Tensor,
    shards: Sequence[torch.Tensor],
    me: int,
    group: dist.ProcessGroup | None,
    tag: int,
) -> None:
    """Sends every rank its shard in pieces, and sums the pieces that other ranks send."""
    peers = [peer for peer in range(len(shards)) if peer != me]
    numel = max(1, _PIECE_BYTES // output.itemsize)
    pieces = [slice(at, at + numel) for at in range(0, output.numel(), numel)]
    # Two sets of receive buffers: a piece arrives in one set while the other set is summed.
    buffers = [
        {peer: torch.empty_like(output[pieces[0]]) for peer in peers} for _ in pieces[:_AHEAD]
    ]
    arriving: list[dict[int, Work]] = []
    for number, piece in enumerate(pieces[:_AHEAD]):
        arriving.append(_post_receives(buffers[number], output[piece], group, tag))
    # Receives before sends, as in `all_gather`.
    leaving = [send(shards[peer][piece], peer, group, tag) for piece in pieces for peer in peers]
    for number, piece in enumerate(pieces):
        received = buffers[number % _AHEAD]
        terms = {peer: term[: len(output[piece])] for peer, term in received.items()}
        _add_up(output[piece], shards[me][piece], me, terms, arriving[number])
        # The sum has read this set of buffers, so the next receives may write into it.
        if number + _AHEAD < len(pieces):
            later = output[pieces[number + _AHEAD]]
            arriving.append(_post_receives(received, later, group, tag))
    for work in leaving:
        SENT(work)


def _post_receives(
    buffers: Mapping[int, torch.Tensor],
    piece: torch.Tensor,
    group: dist.ProcessGroup | None,
    tag: int,
) -> dict[int, Work]:
    """Starts to receive the same piece from each other rank."""
    return {peer: receive(term[: len(piece)], peer, group, tag) for peer, term in buffers.items()}


def _add_up(
    output: torch.Tensor,
    own: torch.Tensor,
    me: int,
    terms: Mapping[int, torch.Tensor],
    arriving: Mapping[int, Work],
) -> None:
    """Sums in the order of ranks. `own` is the part of rank `me`; `output` may be the same."""
    # The terms of lower ranks are summed apart first, since `output` may still hold this rank's own
    # part. So every rank adds in the order of ranks, and the result has the same bits everywhere.
    before: torch.Tensor | None = None
    for rank in range(me):
        RECEIVED(arriving[rank])
        before = terms[rank] if before is None else before.add_(terms[rank])
    if before is not None:
        torch.add(before, own, out=output)
    elif output.data_ptr() != own.data_ptr():
        output.copy_(own)
    for rank in range(me + 1, len(terms) + 1):
        RECEIVED(arriving[rank])
        output.add_(terms[rank])


def _is_gloo(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> bool:
    return tensor.device.type == "cpu" and backend_of(group, tensor.device) == "gloo"


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None  # torch returns None only on ranks that are not in the group
    return work


def _joined(shards: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the shards in one tensor, without a copy if they lie side by side in memory."""
    first = shards[0]
    addresses = [(shard.untyped_storage().data_ptr(), shard.storage_offset()) for shard in shards]
    storage, offset = addresses[0]
    if addresses == [(storage, offset + i * first.numel()) for i in range(len(shards))]:
        return first.as_strided((len(shards) * first.numel(),), (1,))
    return torch.cat(list(shards))
