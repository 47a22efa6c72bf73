"""Shard sums: over gloo, each rank sends the others their shards, and adds what arrives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
import torch.distributed as dist

from pipegrad.comm import messages
from pipegrad.comm.messages import COMMON, RECEIVED, SENT, SHARDS
from pipegrad.comm.work import Work

_PIECE_BYTES, _AHEAD = 2**23, 2  # smaller pieces cost time, larger pieces scratch memory


@dataclass(frozen=True)
class WideSum:
    """Adds the parts of ranks in a wider dtype than theirs, and rounds the result once.

    Attributes:
        dtype: In which they are added. For complex numbers, that of their real part.
        divisor: The sum is divided by this, before it is rounded.
    """

    dtype: torch.dtype
    divisor: float = 1.0

    def write(self, parts: Iterator[torch.Tensor], output: torch.Tensor) -> None:
        """Writes the sum of `parts` to `output`, which may be one of them."""
        total = next(parts).to(self.dtype)
        for part in parts:
            total.add_(part)
        output.copy_(total.div_(self.divisor))


def exchange(
    output: torch.Tensor,
    shards: Sequence[torch.Tensor],
    group: dist.ProcessGroup | None,
    common: torch.Tensor | None,
    wide: WideSum | None,
) -> None:
    """Sums shards by messages; the arguments are those of `collectives.reduce_scatter`."""
    if common is not None:
        _exchange_shards(common, [common.clone()] * len(shards), group, COMMON, wide)
    _exchange_shards(output, shards, group, SHARDS, wide)


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
    leaving = [
        messages.send(shards[peer][piece], peer, group, tag)
        for at_once in zip_longest(*away.values())
        for peer, piece in zip(peers, at_once, strict=True)
        if piece is not None
    ]
    for number, piece in enumerate(pieces):
        received = buffers[number % _AHEAD]
        terms = {peer: term[: len(output[piece])] for peer, term in received.items()}
        if wide is None:
            _add_up(output[piece], shards[me][piece], me, terms, arriving[number])
        else:
            wide.write(_in_order(shards[me][piece], me, terms, arriving[number]), output[piece])
        # The sum has read this set of buffers, so the next receives may write into it.
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
    return {
        peer: messages.receive(term[: len(piece)], peer, group, tag)
        for peer, term in buffers.items()
    }


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


def _in_order(
    own: torch.Tensor, me: int, terms: Mapping[int, torch.Tensor], arriving: Mapping[int, Work]
) -> Iterator[torch.Tensor]:
    """Yields the parts of all ranks in the order of ranks, each when it has arrived."""
    for rank in range(len(terms) + 1):
        if rank == me:
            yield own
        else:
            RECEIVED(arriving[rank])
            yield terms[rank]
