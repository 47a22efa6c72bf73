"""Replicas of a parameter are one parameter: made equal at the start, checked on demand."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import nn

from pipegrad.agreement import agree
from pipegrad.errors import DriftError
from pipegrad.gradients.bucket import Bucket
from pipegrad.gradients.groups import Groups
from pipegrad.gradients.shards import local

Lookup = Callable[[str], nn.Parameter]
Difference = tuple[str, tuple[int, ...]]  # key of a parameter, and ranks that have copies

_ROUNDINGS = 4.0  # of the largest element, for one step: an optimizer rounds a few times
_PIECE = 2**22  # elements

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
            # As bytes: no backend lacks a dtype then.
            dist.broadcast(flat.view(torch.uint8), src=hop.ranks[0], group=groups.of(hop.ranks, 0))
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
    if is_anywhere(found, groups, device):
        report_drift(found, ranks)


def growing_drift(
    packs: Sequence[Bucket],
    lookup: Lookup,
    groups: Groups,
    device: torch.device,
    num_steps: int,
) -> list[Difference]:
    """Returns which replicas differ by more than `num_steps` steps' roundings explain.

    Machines of two kinds may round differently: each step an error of an element's last bit.

    Sync: as `refuse_drift`; where bits differ the parameters travel as well.
    """
    found = differing(packs, lookup, groups)
    if not is_anywhere(found, groups, device):
        return []
    drifted = set[Difference]()
    for pack in packs:
        for hop in pack.route:
            group = groups.of(hop.ranks, 0)
            for slot in pack.slots:
                if _spread(local(lookup(slot.key)), group) > _ROUNDINGS * math.sqrt(num_steps):
                    drifted.add((slot.key, hop.ranks))
    return sorted(drifted)


def is_anywhere(found: Collection[Difference], groups: Groups, device: torch.device) -> bool:
    """Whether any rank has found something."""
    anywhere = torch.tensor(float(bool(found)), device=device)
    dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=groups.world)
    return bool(anywhere)


def report_drift(found: Sequence[Difference], ranks: Sequence[int]) -> NoReturn:
    """Raises what all ranks have found, on all of them.

    Raises:
        DriftError: Names parameters and ranks.
    """
    everywhere = agree("check_replicas", lambda: found, ranks=ranks)
    drifted = sorted({difference for one in everywhere for difference in one})
    raise DriftError(
        "copies of one parameter have drifted apart: "
        + "; ".join(f"{key!r} over ranks {list(members)}" for key, members in drifted)
        + ". Something changed them differently: other options of the optimizer (weight_decay, "
        "lr), clipping by the norm of one rank's gradients (call sync.clip_grad_norm_), values "
        "written on one rank, or behind publish(). Correct it, and call synchronize_parameters()"
    )


def differing(packs: Sequence[Bucket], lookup: Lookup, groups: Groups) -> list[Difference]:
    """Returns key and ranks of every parameter whose bits differ over a hop of its route.

    Every rank of a hop finds the same ones. Memory and traffic are two integers a parameter.
    """
    found: list[Difference] = []
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


def _spread(parameter: torch.Tensor, group: dist.ProcessGroup) -> float:
    """Returns how far copies lie apart, in roundings of the largest element; inf if not finite."""
    low = torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter.detach()
    low = low.to(torch.promote_types(low.dtype, torch.float32), copy=True).contiguous()
    high = low.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
    if not parameter.numel() or not (parameter.is_floating_point() or parameter.is_complex()):
        return math.inf if bool((low != high).any()) else 0.0
    largest = torch.maximum(low.abs(), high.abs()).max() * torch.finfo(parameter.dtype).eps
    spread = ((high - low).max() / largest).item() if bool(largest) else 0.0
    return math.inf if math.isnan(spread) else spread


def _checksum(parameter: torch.Tensor) -> torch.Tensor:
    """Returns two int64 sums ``(2,)`` over the bits: plain, and weighted by position."""
    flat = parameter.detach().contiguous().view(-1)
    words = flat.view(_INTEGERS.get(parameter.itemsize, torch.int64))
    sums = torch.zeros(2, dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), _PIECE):  # eight bytes an element are there meanwhile
        piece = words[start : start + _PIECE].long()
        places = torch.arange(start, start + len(piece), device=words.device)
        sums += torch.stack([piece.sum(), (piece * (2 * places + 1)).sum()])
    return sums
