"""Drift: whether copies of one parameter are still equal. On demand, and in a few steps always."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from pipegrad.comm.agreement import agree
from pipegrad.comm.process_groups import Groups
from pipegrad.errors import DriftError
from pipegrad.gradients.replicas import Lookup
from pipegrad.model.dtensor import local
from pipegrad.plan.buckets import Bucket

Difference = tuple[str, tuple[int, ...]]  # key of a parameter, and ranks that have copies

_ROUNDINGS = 4.0  # of the largest element, for one step: an optimizer rounds a few times
_PIECE = 2**22  # elements

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class DriftCheck:
    """Compares the copies of each parameter over the ranks that hold it.

    Two integers a parameter travel, and one flag over all ranks, on the current stream.

    Args:
        packs: This rank's parameters by route, in the order that all ranks share.
        lookup: Key -> live parameter.
        groups: The communicators; comm stream 0's are used.
        ranks: All ranks.
        agree_seconds: How long the ranks wait for each other, once copies differ.
    """

    def __init__(
        self,
        packs: Sequence[Bucket],
        lookup: Lookup,
        *,
        groups: Groups,
        ranks: Sequence[int],
        agree_seconds: float,
    ) -> None:
        self._packs = packs
        self._lookup = lookup
        self._groups = groups
        self._ranks = ranks
        self._agree_seconds = agree_seconds
        self._num_steps = 0
        self._last_step = 0

    def count(self, step: int) -> bool:
        """Counts a step that reduces; returns whether all ranks compare copies in it.

        They do in the 2nd, 4th, 8th and so on of these steps. All ranks count alike, also steps
        that failed. The second call for a step counts nothing and returns False.

        Args:
            step: Its number; different for each step.
        """
        if self._groups.world is None or step == self._last_step:
            return False
        self._last_step = step
        self._num_steps += 1
        is_power = self._num_steps & (self._num_steps - 1) == 0
        return is_power and self._num_steps > 1

    def refuse(self) -> None:
        """Raises on all ranks if copies differ in a single bit.

        Raises:
            DriftError: Names parameters and ranks.
        """
        if self._groups.world is not None:
            self._refuse_any(self._differing())

    def refuse_growing(self, num_steps: int) -> None:
        """Raises on all ranks if copies differ by more than the roundings of `num_steps` steps.

        Machines of two kinds may round differently: each step an error of an element's last bit.
        Where bits differ the parameter travels as well.

        Raises:
            DriftError: Names parameters and ranks.
        """
        limit = _ROUNDINGS * math.sqrt(num_steps)
        # All ranks that hold a parameter find the same, in one order: each calls `_spread` for it.
        self._refuse_any([found for found in self._differing() if self._spread(*found) > limit])

    def _refuse_any(self, found: Sequence[Difference]) -> None:
        if not self._groups.is_anywhere(bool(found)):
            return
        seconds = self._agree_seconds
        replies = agree("check_replicas", lambda: found, ranks=self._ranks, timeout_seconds=seconds)
        drifted = sorted({difference for reply in replies for difference in reply})
        raise DriftError(
            "copies of one parameter have drifted apart: "
            + "; ".join(f"{key!r} over ranks {list(members)}" for key, members in drifted)
            + ". Something changed them differently: other options of the optimizer (weight_decay, "
            "lr), clipping by the norm of one rank's gradients (call sync.clip_grad_norm_), values "
            "written on one rank, or behind publish(). Correct it, and call "
            "synchronize_parameters()"
        )

    def _differing(self) -> list[Difference]:
        """Returns key and ranks of every parameter whose bits differ over a reduction of its route.

        Every rank of a reduction finds the same ones.
        """
        found: list[Difference] = []
        for pack in self._packs:
            sums = torch.stack([_checksum(local(self._lookup(slot.key))) for slot in pack.slots])
            for reduction_step in pack.route:
                group = self._groups.of(reduction_step.ranks, 0)
                low, high = sums.clone(), sums.clone()
                dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
                dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
                unequal = (low != high).any(dim=1).tolist()
                slots = zip(pack.slots, unequal, strict=True)
                found += [(slot.key, reduction_step.ranks) for slot, differs in slots if differs]
        return found

    def _spread(self, key: str, ranks: tuple[int, ...]) -> float:
        return _spread(local(self._lookup(key)), self._groups.of(ranks, 0))


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
        locations = torch.arange(start, start + len(piece), device=words.device)
        sums += torch.stack([piece.sum(), (piece * (2 * locations + 1)).sum()])
    return sums
