"""Replicas of a parameter are one parameter: made equal at the start, and after a checkpoint."""

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
    """Gives every replica the bits of the lowest rank that holds it.

    Args:
        packs: This rank's parameters by route, in the order that all ranks share.
        lookup: Key -> live parameter.
        groups: The communicators; comm stream 0's are used.
        device: Where the parameters live.

    Sync: on the current stream; one broadcast for each reduction of a pack, through a flat copy.
    """
    for pack in packs:
        flat = _gather(pack, lookup, device)
        for step in pack.route:
            # As bytes: no backend lacks a dtype then.
            dist.broadcast(flat.view(torch.uint8), src=step.owner, group=groups.of(step.ranks, 0))
        with torch.no_grad():
            for slot in pack.slots:
                local(lookup(slot.key)).copy_(flat.as_strided(slot.shape, slot.stride, slot.offset))
        del flat  # or two would be there at a time


def _gather(pack: Bucket, lookup: Lookup, device: torch.device) -> torch.Tensor:
    flat = torch.zeros(pack.payload_numel, dtype=pack.dtype, device=device)
    for slot in pack.slots:
        view = flat.as_strided(slot.shape, slot.stride, slot.offset)
        view.copy_(local(lookup(slot.key)).detach())
    return flat
