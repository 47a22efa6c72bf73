"""Makes the replicas of each parameter equal: at the start, and after a checkpoint was loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from pipegrad.comm.process_groups import Groups
from pipegrad.model.dtensor import local
from pipegrad.plan.buckets import Bucket

Lookup = Callable[[str], nn.Parameter]


def make_equal(
    packs: Sequence[Bucket], lookup: Lookup, groups: Groups, device: torch.device
) -> None:
    """Copies every parameter from the lowest rank that holds it to all replicas.

    Args:
        packs: This rank's parameters by route, in the order of all ranks.
        lookup: Key -> live parameter.
        groups: The communicators; those of comm stream 0 are used.
        device: Of the parameters.

    Sync: on the current stream. One broadcast for each reduction of a pack, of a flat copy.
    """
    # Each broadcast starts at the owner of one reduction. Along a route, the owner of a later
    # reduction already has the values of the owners before it, so all ranks end with the same bits.
    for pack in packs:
        flat = _gather(pack, lookup, device)
        for step in pack.route:
            # Bytes can be sent on every backend. Some backends lack other dtypes.
            dist.broadcast(flat.view(torch.uint8), src=step.owner, group=groups.of(step.ranks, 0))
        with torch.no_grad():
            for slot in pack.slots:
                local(lookup(slot.key)).copy_(flat.as_strided(slot.shape, slot.stride, slot.offset))
        del flat  # otherwise two copies would exist at a time


def _gather(pack: Bucket, lookup: Lookup, device: torch.device) -> torch.Tensor:
    flat = torch.zeros(pack.payload_numel, dtype=pack.dtype, device=device)
    for slot in pack.slots:
        view = flat.as_strided(slot.shape, slot.stride, slot.offset)
        view.copy_(local(lookup(slot.key)).detach())
    return flat
