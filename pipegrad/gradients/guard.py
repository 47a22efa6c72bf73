"""Replicas of a parameter are one parameter: made equal at the start, checked on demand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from pipegrad.agreement import agree
from pipegrad.errors import DriftError
from pipegrad.gradients.bucket import Bucket
from pipegrad.gradients.groups import Groups
from pipegrad.gradients.shards import local

Lookup = Callable[[str], nn.Parameter]

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def anywhere(flag: bool, groups: Groups, device: torch.device) -> bool:
    """Returns whether `flag` is set on any rank; every rank must call it.

    Sync: on the current stream; the host waits.
    """
    if groups.world is None:
        return flag
    found = torch.tensor([float(flag)], device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=groups.world)
    return bool(found.item())


def make_equal(
    packs: Sequence[Bucket], lookup: Lookup, groups: Groups, device: torch.device
) -> None:
    """Gives every replica the bits of the lowest rank that holds it.

    Args:
        packs: This rank's parameters by route, in the order that all ranks share.
        lookup: Key -> live parameter.
        groups: The communicators; lane 0's are used.
        device: Where the parameters live.

    Sync: on the current stream; one broadcast for each pack and hop, through a temporary flat copy.
    """
    for pack in packs:
        flat = _gather(pack, lookup, device)
        for hop in pack.route:
            dist.broadcast(flat, src=hop.ranks[0], group=groups.of(hop.ranks, 0))
        with torch.no_grad():
            for slot in pack.slots:
                local(lookup(slot.key)).copy_(flat.as_strided(slot.shape, slot.stride, slot.offset))
        del flat  # or two would be there at a time


def refuse_drift(
    packs: Sequence[Bucket],
    lookup: Lookup,
    groups: Groups,
    device: torch.device,
    ranks: Sequence[int],
) -> None:
    """Does nothing if all replicas of each parameter have the same bits.

    Sync: two integers a parameter travel, and one flag for all `ranks`, on the current stream.

    Raises:
        DriftError: On every rank alike, wherever the difference is; names parameters and ranks.
    """
    if groups.world is None:
        return
    found = differing(packs, lookup, groups)
    anywhere = torch.tensor(float(bool(found)), device=device)
    dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=groups.world)
    if bool(anywhere):
        everywhere = agree("check_replicas", lambda: found, ranks=ranks)
        drifted = sorted({difference for one in everywhere for difference in one})
        raise DriftError(
            "copies of one parameter have drifted apart; call synchronize_parameters() and find "
            "what changed one of them: "
            + "; ".join(f"{key!r} over ranks {list(members)}" for key, members in drifted)
        )


def differing(
    packs: Sequence[Bucket], lookup: Lookup, groups: Groups
) -> list[tuple[str, tuple[int, ...]]]:
    """Returns key and ranks of every parameter whose bits differ over a hop of its route.

    Every rank of a hop finds the same ones. Memory and traffic are two integers a parameter.
    """
    found: list[tuple[str, tuple[int, ...]]] = []
    for pack in packs:
        sums = torch.stack([_checksum(local(lookup(slot.key))) for slot in pack.slots])
        for hop in pack.route:
            group = groups.of(hop.ranks, 0)
            low, high = sums.clone(), sums.clone()
            dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
            dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
            unequal = (low != high).any(dim=1).tolist()
            found += [(s.key, hop.ranks) for s, bad in zip(pack.slots, unequal, strict=True) if bad]
    return found


def _gather(pack: Bucket, lookup: Lookup, device: torch.device) -> torch.Tensor:
    flat = torch.zeros(pack.payload_numel, dtype=pack.dtype, device=device)
    for slot in pack.slots:
        view = flat.as_strided(slot.shape, slot.stride, slot.offset)
        view.copy_(local(lookup(slot.key)).detach())
    return flat


def _checksum(parameter: torch.Tensor) -> torch.Tensor:
    """Returns two int64 sums ``(2,)`` over the bits: plain, and weighted by position."""
    words = parameter.detach().contiguous().view(-1).view(_INTEGERS[parameter.itemsize])
    weights = 2 * torch.arange(words.numel(), device=words.device) + 1
    return torch.stack([words.sum(dtype=torch.int64), (words * weights).sum(dtype=torch.int64)])
