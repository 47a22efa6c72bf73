"""Collectives that torch spells differently from version to version, or does badly on a backend."""

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

# Of our messages, so that they match no other's between the same two ranks; and not each other's,
# since what is expected from behind is posted long before the others that come between.
_SHARDS, _COMMON, _GATHERED, _UP, _DOWN, COUNTS, BACK = range(0x70670, 0x70677)
_PIECE_BYTES, _AHEAD = 2**23, 2  # smaller ones cost time, larger ones scratch memory


def backend_of(group: dist.ProcessGroup | None, device: torch.device) -> str:
    """Returns the name of the backend that `group` (None: the default one) has for `device`."""
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
    """Sums shard j over all ranks on rank j of the group.

    On gloo, whose own reduce-scatter is made of all-reduces and moves twice the bytes, every rank
    sends shard j to rank j, in pieces, and adds up what it gets in the order of ranks: the bits do
    not depend on which message is first. Scratch memory: 16 MiB for each other rank at most.

    Args:
        output: This rank's sum, ``(numel,)``; may be its shard.
        shards: One tensor ``(numel,)`` for each rank of the group, contiguous.
        group: The process group; None for the default one.
        common: Something small that every rank gets the sum of, in place.

    Sync: `output` is ready on the current stream; where the backend blocks the host, so does this.
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
    """Gives every rank what rank j of the group has in shard j.

    On gloo every rank sends its shard to all others, into its place: no copy, no scratch memory.

    Args:
        shards: One tensor ``(numel,)`` for each rank of the group, side by side.
        group: The process group; None for the default one.

    Sync: as `reduce_scatter`.
    """
    me = dist.get_rank(group)
    if _is_gloo(shards[me], group):
        peers = [peer for peer in range(len(shards)) if peer != me]
        # All receives first: on gloo the other way a pair of ranks runs half duplex.
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
    """Whether one rank can send to another what lies on `device`: gloo cannot, but from the CPU."""
    return device.type == "cpu" or backend_of(group, device) != "gloo"


def broadcast_chain(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Gives every rank of the group the bits of its first one, handed on from rank to rank.

    So each rank sends once, and a pipeline's ranks get it in the order in which they begin.

    Sync: as `reduce_scatter`.
    """
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
    """What the rank behind this one sends by `reduce_chain`: its receive is posted."""

    tensor: torch.Tensor
    work: Work


def expect_reduce_chain(into: torch.Tensor, group: dist.ProcessGroup | None) -> Arriving | None:
    """Posts the receive of what the rank behind sends, long before it is needed.

    For a sender is not rid of a message before its receive is posted. None where none sends.

    Sync: returns at once; nobody may touch `into` until the sum is made.
    """
    me, size = dist.get_rank(group), dist.get_world_size(group)
    if me + 1 == size or not can_send(group, into.device):
        return None
    return Arriving(into, receive(into, me + 1, group, _DOWN))


def reduce_chain(
    tensor: torch.Tensor, arriving: Arriving | None, group: dist.ProcessGroup | None
) -> None:
    """Sums over the group on its first rank: each adds its own to what the one behind it sends.

    So a pipeline's ranks send when they are done, the last one first, and none waits for another
    that is done later. Others than the first are left with a part of the sum.

    Args:
        tensor: This rank's part, contiguous.
        arriving: What was expected from behind.
        group: The process group; None for the default one.

    Sync: as `reduce_scatter`.
    """
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
    """Returns a flat tensor; of a complex one its parts, one by one, which is what backends add."""
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
    """Sends every rank its shard in pieces, and sums up what comes, two pieces ahead."""
    peers = [peer for peer in range(len(shards)) if peer != me]
    numel = max(1, _PIECE_BYTES // output.itemsize)
    pieces = [slice(at, at + numel) for at in range(0, output.numel(), numel)]
    room = [{peer: torch.empty_like(output[pieces[0]]) for peer in peers} for _ in pieces[:_AHEAD]]
    arriving: list[dict[int, Work]] = []
    for number, piece in enumerate(pieces[:_AHEAD]):
        arriving.append(_expected(room[number], output[piece], group, tag))
    # All receives first: on gloo the other way a pair of ranks runs half duplex.
    leaving = [send(shards[peer][piece], peer, group, tag) for piece in pieces for peer in peers]
    for number, piece in enumerate(pieces):
        terms = {peer: term[: len(output[piece])] for peer, term in room[number % _AHEAD].items()}
        _add_up(output[piece], shards[me][piece], me, terms, arriving[number])
        if number + _AHEAD < len(pieces):
            later = output[pieces[number + _AHEAD]]
            arriving.append(_expected(room[number % _AHEAD], later, group, tag))
    for work in leaving:
        SENT(work)


def _expected(
    room: Mapping[int, torch.Tensor],
    piece: torch.Tensor,
    group: dist.ProcessGroup | None,
    tag: int,
) -> dict[int, Work]:
    return {peer: receive(term[: len(piece)], peer, group, tag) for peer, term in room.items()}


def _add_up(
    output: torch.Tensor,
    own: torch.Tensor,
    me: int,
    terms: Mapping[int, torch.Tensor],
    arriving: Mapping[int, Work],
) -> None:
    """Sums in the order of ranks; `output` and `own`, that of rank `me`, may be one."""
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
    assert work is not None  # torch returns None to ranks outside of the group only
    return work


def _joined(shards: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the shards in one tensor: no copy if they lie side by side, as in a full buffer."""
    first = shards[0]
    places = [(shard.untyped_storage().data_ptr(), shard.storage_offset()) for shard in shards]
    storage, offset = places[0]
    if places == [(storage, offset + i * first.numel()) for i in range(len(shards))]:
        return first.as_strided((len(shards) * first.numel(),), (1,))
    return torch.cat(list(shards))
