"""Drift: compares the copies of each parameter, on demand and in a few steps of every run."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from pipegrad.comm.agreement import agree
from pipegrad.comm.process_groups import Groups
from pipegrad.errors import DriftError
from pipegrad.gradients.drift.checksum import bytes_of, checksum, full_checksum
from pipegrad.gradients.drift.copies import Copies, Copy
from pipegrad.gradients.drift.odd_copies import Facts, OddCopies, find_odd

T = TypeVar("T")

_ROUNDINGS = 4.0  # allowed in one step, of the largest element: an optimizer rounds a few times
_WHY = (
    "Something changed them differently: other options of the optimizer (weight_decay, lr), "
    "clipping by the norm of one rank's gradients (call sync.clip_grad_norm_), values written on "
    "one rank, or behind publish(); or a bit has flipped in memory."
)
_GONE = "none that differs still, so they are written while they are compared"


def is_compared(number: int, every: int) -> bool:
    """Whether copies are compared in a step: 2, 4, 8 and so on, and then every `every` steps.

    Args:
        number: Of the step, from 1.
        every: 0 for never.
    """
    # A mistake in a program makes copies differ in its first steps, so comparisons are frequent
    # there. Later they look for what happens once in a long run.
    is_early = 1 < number < every and number & (number - 1) == 0
    return every > 0 and (is_early or number % every == 0)


class DriftCheck:
    """Compares the copies of each parameter over the ranks that hold it.

    It sends two integers for each copy, and one flag over all ranks, on the current stream.

    Args:
        copies: All copies of this rank.
        groups: The communicators; those of comm stream 0 are used.
        ranks: All ranks.
        device: Of this rank.
        agree_seconds: How long the ranks wait for each other if copies differ.
        every: Steps between two comparisons; see `is_compared`.
        repairs: Whether copies that differ are set right, instead of an error.
        is_exact: Whether ranks round alike, so that copies must be equal bit by bit.

    Attributes:
        num_repaired: Copies that were set right so far, of all ranks.
    """

    def __init__(
        self,
        copies: Copies,
        *,
        groups: Groups,
        ranks: Sequence[int],
        device: torch.device,
        agree_seconds: float,
        every: int,
        repairs: bool,
        is_exact: bool,
    ) -> None:
        self._copies = copies
        self._groups = groups
        self._ranks = ranks
        self._device = device
        self._agree_seconds = agree_seconds
        self._every = every
        self._repairs = repairs
        self._is_exact = is_exact
        self.num_repaired = 0
        self._num_steps = 0
        self._first = 0  # steps before the first one that was counted
        self._last_step = 0
        self._last_equal: int | None = None
        self._is_wanted = False  # whether the next step must compare

    def continue_from(self, num_steps: int) -> None:
        """Counts steps from `num_steps` on in messages, for a run that was resumed."""
        self._first = num_steps - self._num_steps

    def look_next_step(self) -> None:
        """Makes the next step compare, unless no step does. All ranks must call it."""
        self._is_wanted = self._every > 0

    def count(self, step: int) -> bool:
        """Counts a step that reduces; returns whether all ranks compare copies in it.

        All ranks have the same count, with the steps that failed. The second call for a step counts
        nothing and returns False.

        Args:
            step: Its number; different for each step.
        """
        if self._groups.world is None or step == self._last_step:
            return False
        self._last_step = step
        self._num_steps += 1
        is_wanted, self._is_wanted = self._is_wanted, False
        return is_wanted or is_compared(self._num_steps, self._every)

    def look(self) -> None:
        """Compares copies in a step; repairs those that differ, or raises an error on all ranks.

        Machines of two kinds may round differently, in each step the last bit of an element. There,
        if the bits of a parameter differ, the parameter itself is sent too.

        Raises:
            DriftError: If they differ, by more than roundings explain. It names parameters and
                ranks.
        """
        differing = self._copies.differing(checksum)
        if not self._is_exact:
            # Errors of independent roundings grow with the square root of their number.
            limit = _ROUNDINGS * math.sqrt(self._num_steps)
            # `_spread` runs collectives. All ranks that hold a parameter have the same differences,
            # in the same order, so they run the same collectives.
            differing = [
                (copy, ranks)
                for copy, ranks in differing
                if not copy.is_main and self._spread(copy, ranks) > limit
            ]
        self._settle([copy for copy, _ in differing])

    def refuse(self) -> None:
        """Repairs copies that differ in a single bit, or raises an error on all ranks.

        Raises:
            DriftError: If they differ. It names parameters and ranks.
        """
        if self._groups.world is not None:
            self._settle([copy for copy, _ in self._copies.differing(full_checksum)])

    def _settle(self, differing: Sequence[Copy]) -> None:
        """Repairs copies that differ, or raises an error, on all ranks."""
        # Other ranks may hold none of the parameters that differ. They must raise too, so all ranks
        # reduce a flag first.
        number = self._first + self._num_steps
        if not self._groups.is_anywhere(bool(differing)):
            self._last_equal = number
            return
        odd = self._find_odd(differing)
        last, self._last_equal = self._last_equal, number
        when = f"in step {number}" + ("" if last is None else f", and were equal in step {last}")
        listing = "; ".join(map(str, odd)) or _GONE
        if not self._repairs:
            raise DriftError(
                f"copies of one parameter have drifted apart: {listing}. They differ {when}. "
                f"{_WHY} Correct it, and call synchronize_parameters()"
            )
        for each in odd:
            self._repair(each)
        self.num_repaired += sum(len(each.odd) for each in odd)
        if self._ranks[0] == dist.get_rank():
            remedies = "; ".join(each.remedy for each in odd) or _GONE
            warnings.warn(
                f"copies of one parameter were different, and are equal again: {remedies}. They "
                f"differed {when}. {_WHY} If it happens again, their optimizer's states differ "
                f"too: go on from a checkpoint",
                stacklevel=4,
            )

    def _find_odd(self, differing: Sequence[Copy]) -> list[OddCopies]:
        """Returns which copies differ from which, the same on all ranks."""
        names = self._agree("check_replicas", lambda: [copy.name for copy in differing])
        wanted = sorted({name for reply in names for name in reply})

        def describe() -> dict[tuple[str, bool], Facts]:
            return {
                copy.name: Facts(tuple(full_checksum(t).tolist()), copy.groups, bytes_of(t).numel())
                for copy, t in self._copies.named(wanted)
            }

        replies = dict(zip(self._ranks, self._agree("checksums", describe), strict=True))
        facts = {
            name: {rank: reply[name] for rank, reply in replies.items() if name in reply}
            for name in wanted
        }
        return [odd for name in wanted for odd in find_odd(name, facts[name])]

    def _repair(self, odd: OddCopies) -> None:
        """Sends the values of one rank to all ranks, and takes them where a copy differs."""
        # All ranks take part: no group has exactly the ranks of these copies, and it is seldom.
        rank = dist.get_rank()
        values = torch.empty(odd.nbytes, dtype=torch.uint8, device=self._device)
        own = [t for copy, t in self._copies.named([odd.name]) if rank in odd.ranks]
        if rank == odd.source:
            values.copy_(bytes_of(own[0]))
        dist.broadcast(values, src=odd.source, group=self._groups.world)
        if rank in odd.odd:
            own[0].copy_(values.view(own[0].dtype).view(own[0].shape))

    def _agree(self, what: str, function: Callable[[], T]) -> list[T]:
        seconds = self._agree_seconds
        return agree(what, function, ranks=self._ranks, timeout_seconds=seconds)

    def _spread(self, copy: Copy, ranks: tuple[int, ...]) -> float:
        tensor = self._copies.tensor(copy)
        assert tensor is not None
        return _spread(tensor, self._groups.of(ranks, 0))


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
