"""Collectives that torch spells differently from version to version, or does badly on a backend."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from pipegrad.gradients import order

RECEIVED = order.WaitWork("collective.received", "a sum must not read what is still arriving")
SENT = order.WaitWork("collective.sent", "who reuses the rows must not overwrite what is leaving")

_TAG = 0x70670  # of our messages, so that they match no other's between the same two ranks


def backend_of(group: dist.ProcessGroup | None, device: torch.device) -> str:
    """Returns the name of the backend that `group` (None: the default one) has for `device`."""
    backends = dist.get_backend_config(group)
    pairs = dict(pair.split(":") for pair in backends.split(",") if ":" in pair)
    return pairs.get(device.type, backends)


def blocks_host(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Whether waiting for a collective on `device` blocks the calling thread (gloo does)."""
    return device.type == "cpu" or backend_of(group, device) == "gloo"


def reduce_scatter(
    output: torch.Tensor, rows: Sequence[torch.Tensor], group: dist.ProcessGroup | None
) -> None:
    """Sums row j over all ranks on rank j of the group.

    On gloo, whose own reduce-scatter is made of all-reduces and moves twice the bytes, every rank
    sends row j to rank j and adds up what it gets, in the order of ranks: the bits do not depend on
    which message is first. That needs scratch memory of the size of the other ranks' rows.

    Args:
        output: This rank's sum, ``(numel,)``.
        rows: One tensor ``(numel,)`` for each rank of the group, contiguous.
        group: The process group; None for the default one.

    Sync: `output` is ready on the current stream; where the backend blocks the host, so does this.
    """
    if output.is_complex():
        output, rows = _parts(output), list(map(_parts, rows))
    if output.device.type == "cpu" and backend_of(group, output.device) == "gloo":
        _exchange(output, rows, group)
    elif hasattr(dist, "reduce_scatter_single"):  # its name from torch 2.13 on
        dist.reduce_scatter_single(output, _joined(rows), group=group)
    else:
        dist.reduce_scatter_tensor(output, _joined(rows), group=group)


def _exchange(
    output: torch.Tensor, rows: Sequence[torch.Tensor], group: dist.ProcessGroup | None
) -> None:
    me = dist.get_rank(group)
    peers = [peer for peer in range(len(rows)) if peer != me]
    terms = {peer: torch.empty_like(output) for peer in peers} | {me: rows[me]}
    # All receives first: on gloo the other way a pair of ranks runs half duplex.
    receiving = {p: dist.irecv(terms[p], group=group, group_src=p, tag=_TAG) for p in peers}
    sending = [dist.isend(rows[p], group=group, group_dst=p, tag=_TAG) for p in peers]
    for rank in range(len(rows)):
        if rank != me:
            RECEIVED(_work(receiving[rank]))
        if rank == 0:
            output.copy_(terms[rank])
        else:
            output.add_(terms[rank])
    for work in sending:
        SENT(_work(work))


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None  # torch returns None to ranks outside of the group only
    return work


def _joined(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the rows in one tensor: no copy if they lie side by side, as in a full buffer."""
    first = rows[0]
    places = [(row.untyped_storage().data_ptr(), row.storage_offset()) for row in rows]
    storage, offset = places[0]
    if places == [(storage, offset + i * first.numel()) for i in range(len(rows))]:
        return first.as_strided((len(rows) * first.numel(),), (1,))
    return torch.cat(list(rows))


def _parts(tensor: torch.Tensor) -> torch.Tensor:
    """Returns real and imaginary parts, which is what backends add."""
    return torch.view_as_real(tensor).view(-1)
