"""Messages between two ranks of a group, and collectives that torch does badly on a backend.

Names of some collectives differ between versions of torch. Over gloo, each rank sends the others
their shards by messages, and adds what arrives.

To add a collective, give its messages a separate tag, and each wait a sync point with a name and a
reason. A program in tests/support/ordering/programs.py must be wrong without it, because the
mutation gate switches each sync point off. gradients/reductions.py maps placements to collectives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, zip_longest

import torch
import torch.distributed as dist

from pipegrad.comm import sync_points
from pipegrad.comm.sync_points import Started, Work, on_host

RECEIVED = sync_points.WaitWork(
    "collective.received", "nobody reads or passes on what is still arriving"
)
SENT = sync_points.WaitWork(
    "collective.sent", "who writes there next must not overwrite what is leaving"
)

# Their names from torch 2.13 on, and before.
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# Tags of pipegrad's messages. They differ from the tags of other messages between the same two
# ranks. They also differ from each other, because the receive of a reduce chain is posted at the
# start of a step, and other messages arrive between it and its send.
SHARDS, COMMON, GATHERED, UP, DOWN, COUNTS, BACK = range(0x70670, 0x70677)
HEADERS, VALUES = 0x70678, 0x70679  # `ending` uses one more
_PIECE_BYTES, _AHEAD = 2**23, 2  # smaller pieces cost time, larger pieces scratch memory
TRANSFERS = 2**20  # the first one of a step's values and gradients


def backend_of(group: dist.ProcessGroup | None, device: torch.device) -> str:
    """Returns the backend of `group` for `device`; None means the default group."""
    backends = dist.get_backend_config(group)
    pairs = dict(pair.split(":") for pair in backends.split(",") if ":" in pair)
    return pairs.get(device.type, backends)


def blocks_host(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """True if waiting for a collective on `device` blocks the calling thread (gloo does)."""
    return device.type == "cpu" or backend_of(group, device) == "gloo"


def can_send(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """True if a tensor on `device` can be sent to one rank. gloo can only send from the CPU."""
    return device.type == "cpu" or backend_of(group, device) != "gloo"


def is_gloo(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> bool:
    """True if gloo sends this tensor, from the CPU."""
    return tensor.device.type == "cpu" and backend_of(group, tensor.device) == "gloo"


def real(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a flat tensor; for complex numbers, their real and imaginary parts, side by side."""
    # Not every backend adds complex numbers.
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


def receive(tensor: torch.Tensor, peer: int, group: dist.ProcessGroup | None, tag: int) -> Work:
    """Starts to receive from a rank of the group."""
    return on_host(dist.irecv(tensor, group=group, group_src=peer, tag=tag), tensor)


def send(tensor: torch.Tensor, peer: int, group: dist.ProcessGroup | None, tag: int) -> Work:
    """Starts to send to a rank of the group."""
    return on_host(dist.isend(tensor, group=group, group_dst=peer, tag=tag), tensor)


def all_reduce(
    tensor: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> None:
    """Reduces a tensor in place over a group. Sync: the current stream, on CPU the host."""
    on_host(dist.all_reduce(tensor, op=op, group=group, async_op=True), tensor).wait()


def broadcast(tensor: torch.Tensor, source: int, group: dist.ProcessGroup | None) -> None:
    """Copies a tensor of a global rank to a group. Sync: the current stream, on CPU the host."""
    on_host(dist.broadcast(tensor, src=source, group=group, async_op=True), tensor).wait()


def wide_all_reduce(tensor: torch.Tensor, wide: WideSum, group: dist.ProcessGroup | None) -> None:
    """Sums `tensor` in place over the group, in a wider dtype than its own.

    All ranks have the same bits, because each rank sums a shard and sends the rounded result to
    all others. It moves as many bytes as a ring all-reduce of the narrow dtype.

    Sync: as `reduce_scatter`.
    """
    tensor = real(tensor)
    me, size = dist.get_rank(group), dist.get_world_size(group)
    numel = tensor.numel() // size
    shards, rest = tensor[: numel * size].view(size, -1), tensor[numel * size :]
    reduce_scatter(shards[me], shards.unbind(), group, common=rest, wide=wide)
    # With fewer elements than ranks all of them are in `rest`, which every rank has summed already.
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

    On gloo, every rank sends shard j to rank j, in pieces, because gloo's own reduce-scatter is
    made of all-reduces and moves twice the bytes. Each rank adds the pieces in the order of ranks,
    because the result must not depend on the order of arrival. This needs scratch memory of at
    most 16 MiB for each other rank.

    Args:
        output: This rank's sum, ``(numel,)``; may be its shard.
        shards: A flat tensor for each rank of the group, contiguous. They may have different
            numbers of elements, also none.
        group: The process group; None for the default group.
        common: A small tensor that is summed in place on all ranks.
        wide: A wider dtype and a divisor; by default `output`'s dtype, and no division.

    Sync: `output` is ready on the current stream. Blocks the host if the backend does.
    """
    output, shards = real(output), list(map(real, shards))
    common = None if common is None else real(common)
    if is_gloo(output, group):
        if common is not None:
            # A copy: `common` is sent to all ranks while the sum is written into it.
            _exchange_shards(common, [common.clone()] * len(shards), group, COMMON, wide)
        _exchange_shards(output, shards, group, SHARDS, wide)
        return
    if wide is not None:
        _reduce_scatter_wide(output, shards, group, common, wide)
        return
    # torch scatters only shards of equal size. All ranks leave out the same reductions, because
    # each has all sizes.
    if not _are_equal(shards):
        for owner, shard in enumerate(shards):
            if shard.numel():
                dist.reduce(shard, group_dst=owner, group=group)
        if output.data_ptr() != shards[dist.get_rank(group)].data_ptr():
            output.copy_(shards[dist.get_rank(group)])
    else:
        _reduce_scatter_single(output, _joined(shards), group=group)
    if common is not None:
        dist.all_reduce(common, group=group)


def start_sum(numbers: torch.Tensor, group: dist.ProcessGroup) -> tuple[Started, torch.Tensor]:
    """Starts to add a few numbers, ``(numel,)``, of all ranks; `summed` returns the sums.

    On gloo each rank sends its numbers to all others at once, because this takes one round trip.
    gloo's all-reduce goes round a ring of n ranks: 2 (n - 1) messages one after the other, each of
    them with the latency of the slowest link.

    Sync: `numbers` and the result belong to the work until it has ended.
    """
    if not is_gloo(numbers, group):
        return on_host(dist.all_reduce(numbers, group=group, async_op=True), numbers), numbers
    rows = numbers.new_empty(dist.get_world_size(group), numbers.numel())
    return to_all(rows, numbers, group), rows


def to_all(rows: torch.Tensor, numbers: torch.Tensor, group: dist.ProcessGroup) -> Started:
    """Starts to send numbers, ``(numel,)``, to all ranks; row j receives the numbers of rank j."""
    own = numbers.repeat(len(rows))
    work = dist.all_to_all_single(rows.view(-1), own, group=group, async_op=True)
    return on_host(work, rows)


def summed(numbers: torch.Tensor) -> torch.Tensor:
    """Returns the sums of `start_sum`'s result, when its work has ended.

    All ranks have the same bits, because all add the rows in the same order.
    """
    return reduce(torch.add, numbers.unbind()) if numbers.dim() > 1 else numbers


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
    if is_gloo(shards[me], group):
        peers = [peer for peer in range(len(shards)) if peer != me and shards[peer].numel()]
        readers = [peer for peer in range(len(shards)) if peer != me and shards[me].numel()]
        # Post all receives first, because gloo would otherwise use the connection of two ranks in
        # one direction at a time.
        receiving = [receive(shards[peer], peer, group, GATHERED) for peer in peers]
        sending = [send(shards[me], peer, group, GATHERED) for peer in readers]
        for work in receiving:
            RECEIVED(work)
        for work in sending:
            SENT(work)
    elif not _are_equal(shards):
        for owner, shard in enumerate(shards):
            if shard.numel():
                dist.broadcast(shard, group_src=owner, group=group)
    else:
        _all_gather_single(_joined(shards), shards[me], group=group)


def broadcast_chain(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Copies `tensor` of the first rank to all ranks: each rank sends it to the next rank.

    Sync: as `reduce_scatter`.
    """
    # Each rank sends once. Each has the new parameters when it needs them, because the ranks of a
    # pipeline begin their steps in the order of ranks; see step 9 of the journey of a gradient.
    if not can_send(group, tensor.device):
        dist.broadcast(tensor, group_src=0, group=group)
        return
    me, size = dist.get_rank(group), dist.get_world_size(group)
    if me > 0:
        RECEIVED(receive(tensor, me - 1, group, UP))
    if me + 1 < size:
        SENT(send(tensor, me + 1, group, UP))


@dataclass(frozen=True)
class Arriving:
    """A posted receive of the sum that the next rank sends in `reduce_chain`.

    Attributes:
        tensor: The memory in which the sum arrives.
        work: The receive.
    """

    tensor: torch.Tensor
    work: Work


def expect_reduce_chain(into: torch.Tensor, group: dist.ProcessGroup | None) -> Arriving | None:
    """Posts the receive of the sum that the next rank will send; None if no rank sends here.

    Sync: returns at once. Do not touch `into` until `reduce_chain` has returned.
    """
    # Step 1 of the journey of a gradient calls this, long before the sum is needed, because a send
    # ends only when its receive is posted. The sender ends its step earlier, and must not wait.
    me, size = dist.get_rank(group), dist.get_world_size(group)
    if me + 1 == size or not can_send(group, into.device):
        return None
    return Arriving(into, receive(into, me + 1, group, DOWN))


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
        # The wait is short, because the receiver has posted this at the start of its step. After
        # it, the bucket may be written again.
        SENT(send(tensor, me - 1, group, DOWN))


def _reduce_scatter_wide(
    output: torch.Tensor,
    shards: Sequence[torch.Tensor],
    group: dist.ProcessGroup | None,
    common: torch.Tensor | None,
    wide: WideSum,
) -> None:
    """Sends every rank its shard, and adds the received shards."""
    # Not a reduction of NCCL, because NCCL adds in the dtype that it sends. This needs scratch
    # memory of the size of all shards.
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


@dataclass(frozen=True)
class WideSum:
    """Adds the parts of ranks in a wider dtype than theirs, and rounds the result once.

    Attributes:
        dtype: Dtype of the additions. For complex numbers, the dtype of the real part.
        divisor: The sum is divided by this, before it is rounded.
    """

    dtype: torch.dtype
    divisor: float = 1.0

    def write(self, parts: Iterator[torch.Tensor], output: torch.Tensor) -> None:
        """Writes the sum of `parts` to `output`, which may be one of them."""
        # Add in the order of ranks, because the bits must be the same in every run.
        total = next(parts).to(self.dtype)
        for part in parts:
            total.add_(part)
        output.copy_(total.div_(self.divisor))


def _exchange_shards(
    output: torch.Tensor,
    shards: Sequence[torch.Tensor],
    group: dist.ProcessGroup | None,
    tag: int,
    wide: WideSum | None,
) -> None:
    """Sends every rank its shard in pieces, and sums the pieces that other ranks send."""
    me = dist.get_rank(group)
    peers = [peer for peer in range(len(shards)) if peer != me]
    pieces = _pieces(output)
    away = {peer: _pieces(shards[peer]) for peer in peers}
    # Two sets of receive buffers: a piece arrives in one set while the other set is summed.
    buffers = [
        {peer: torch.empty_like(output[pieces[0]]) for peer in peers} for _ in pieces[:_AHEAD]
    ]
    arriving: list[dict[int, Work]] = []
    for number, piece in enumerate(pieces[:_AHEAD]):
        arriving.append(_post_receives(buffers[number], output[piece], group, tag))
    # Receives before sends, as in `all_gather`.
    # Send the first piece for each rank before the second piece for any, because all ranks can
    # then begin to add.
    leaving = [
        send(shards[peer][piece], peer, group, tag)
        for at_once in zip_longest(*away.values())
        for peer, piece in zip(peers, at_once, strict=True)
        if piece is not None
    ]
    for number, piece in enumerate(pieces):
        received = buffers[number % _AHEAD]
        own = shards[me][piece]
        parts = _in_order(own, me, received, arriving[number])
        if wide is None:
            _add_up(parts, own, output[piece])
        else:
            wide.write(parts, output[piece])
        # The next receives may write into this set of buffers, because the sum has read it.
        if number + _AHEAD < len(pieces):
            later = output[pieces[number + _AHEAD]]
            arriving.append(_post_receives(received, later, group, tag))
    for work in leaving:
        SENT(work)


def _pieces(shard: torch.Tensor) -> list[slice]:
    numel = max(1, _PIECE_BYTES // shard.itemsize)
    return [slice(at, at + numel) for at in range(0, shard.numel(), numel)]


def _post_receives(
    buffers: Mapping[int, torch.Tensor],
    piece: torch.Tensor,
    group: dist.ProcessGroup | None,
    tag: int,
) -> dict[int, Work]:
    """Starts to receive the same piece from each other rank."""
    return {peer: receive(term[: len(piece)], peer, group, tag) for peer, term in buffers.items()}


def _in_order(
    own: torch.Tensor, me: int, terms: Mapping[int, torch.Tensor], arriving: Mapping[int, Work]
) -> Iterator[torch.Tensor]:
    """Yields the parts of all ranks in the order of ranks, each when it has arrived."""
    for rank in range(len(terms) + 1):
        if rank != me:
            RECEIVED(arriving[rank])
        yield own if rank == me else terms[rank][: len(own)]


def _add_up(parts: Iterator[torch.Tensor], own: torch.Tensor, output: torch.Tensor) -> None:
    """Adds parts in their order, for the same bits on all ranks; `output` may be `own`."""
    total: torch.Tensor | None = None
    for part in parts:
        if part is not own:  # added in the memory of the first one, until the own part has come
            total = part if total is None else total.add_(part)
        elif total is not None:
            total = torch.add(total, own, out=output)
        else:
            total = output if output.data_ptr() == own.data_ptr() else output.copy_(own)
