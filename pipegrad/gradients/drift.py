"""Drift: compares the copies of each parameter, on demand and in a few steps of every run."""

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

Difference = tuple[str, tuple[int, ...]]  # key of a parameter, and the ranks of its copies

_ROUNDINGS = 4.0  # allowed in one step, of the largest element: an optimizer rounds a few times
_PIECE = 2**22  # elements

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class DriftCheck:
    """Compares the copies of each parameter over the ranks that hold it.

    It sends two integers for each parameter, and one flag over all ranks, on the current stream.

    Args:
        packs: This rank's parameters by route, in the order of all ranks.
        lookup: Key -> live parameter.
        groups: The communicators; those of comm stream 0 are used.
        ranks: All ranks.
        agree_seconds: How long the ranks wait for each other if copies differ.
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

        They do in the 2nd, 4th, 8th and so on of these steps. All ranks have the same count, with
        the steps that failed. The second call for a step counts nothing and returns False.

        Args:
            step: Its number; different for each step.
        """
        # A mistake in a program makes copies differ in its first steps, so comparisons are frequent
        # there. Later they are rare enough to cost nothing.
        if self._groups.world is None or step == self._last_step:
            return False
        self._last_step = step
        self._num_steps += 1
        is_power = self._num_steps & (self._num_steps - 1) == 0
        return is_power and self._num_steps > 1

    def refuse(self) -> None:
        """Raises an error on all ranks if copies differ in a single bit.

        Raises:
            DriftError: If they differ. It names parameters and ranks.
        """
        if self._groups.world is not None:
            self._refuse_any(self._differing())

    def refuse_growing(self, num_steps: int) -> None:
        """Raises an error on all ranks if copies differ by more than roundings explain.

        Machines of two kinds may round differently, in each step the last bit of an element. If
        the bits of a parameter differ, the parameter itself is sent too.

        Args:
            num_steps: Steps in which copies have rounded differently.

        Raises:
            DriftError: If they differ by more. It names parameters and ranks.
        """
        # Errors of independent roundings grow with the square root of their number.
        limit = _ROUNDINGS * math.sqrt(num_steps)
        # `_spread` runs collectives. All ranks that hold a parameter have the same differences, in
        # the same order, so they run the same collectives.
        differing = self._differing()
        self._refuse_any([each for each in differing if self._spread(*each) > limit])

    def _refuse_any(self, differences: Sequence[Difference]) -> None:
        # Other ranks may hold none of the parameters that differ. They must raise too, so all ranks
        # reduce a flag first.
        if not self._groups.is_anywhere(bool(differences)):
            return
        replies = agree(
            "check_replicas",
            lambda: differences,
            ranks=self._ranks,
            timeout_seconds=self._agree_seconds,
        )
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

        All ranks of a reduction have the same result.
        """
        # If the smallest and the largest checksum over the ranks are equal, all are equal. So two
        # reductions compare any number of copies.
        differences: list[Difference] = []
        for pack in self._packs:
            sums = torch.stack([_checksum(local(self._lookup(slot.key))) for slot in pack.slots])
            for reduction_step in pack.route:
                group = self._groups.of(reduction_step.ranks, 0)
                low, high = sums.clone(), sums.clone()
                dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
                dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
                unequal = (low != high).any(dim=1).tolist()
                slots = zip(pack.slots, unequal, strict=True)
                ranks = reduction_step.ranks
                differences += [(slot.key, ranks) for slot, differs in slots if differs]
        return differences

    def _spread(self, key: str, ranks: tuple[int, ...]) -> float:
        return _spread(local(self._lookup(key)), self._groups.of(ranks, 0))


def _spread(parameter: torch.Tensor, group: dist.ProcessGroup) -> float:
    """Returns the largest difference, in roundings of the largest element; inf if not finite."""
    low = torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter.detach()
    low = low.to(torch.promote_types(low.dtype, torch.float32), copy=True).contiguous()
    high = low.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
    if not parameter.numel() or not (parameter.is_floating_point() or parameter.is_complex()):
        return math.inf if bool((low != high).any()) else 0.0
    # Small elements may differ by many of their own roundings, after a subtraction in the optimizer
    # for example. So the largest element is the measure.
    largest = torch.maximum(low.abs(), high.abs()).max() * torch.finfo(parameter.dtype).eps
    spread = ((high - low).max() / largest).item() if bool(largest) else 0.0
    return math.inf if math.isnan(spread) else spread


def _checksum(parameter: torch.Tensor) -> torch.Tensor:
    """Returns two int64 sums ``(2,)`` over the bits: plain, and weighted by position."""
    # Integers, so that the order of additions does not matter. The second sum sees exchanged
    # elements. Its weights are odd, so a change of any single element changes it.
    flat = parameter.detach().contiguous().view(-1)
    integers = flat.view(_INTEGERS.get(parameter.itemsize, torch.int64))
    sums = torch.zeros(2, dtype=torch.int64, device=integers.device)
    # In pieces: each element needs eight bytes of scratch memory.
    for start in range(0, integers.numel(), _PIECE):
        piece = integers[start : start + _PIECE].long()
        positions = torch.arange(start, start + len(piece), device=integers.device)
        sums += torch.stack([piece.sum(), (piece * (2 * positions + 1)).sum()])
    return sums
