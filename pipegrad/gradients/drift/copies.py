"""Copies: the tensors of this rank that must be equal on other ranks, and which of them differ."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pipegrad.comm.process_groups import Groups
from pipegrad.gradients.replicas import Lookup
from pipegrad.model.dtensor import local
from pipegrad.plan.buckets import Bucket
from pipegrad.plugins.handler import Placement

Sums = Callable[[torch.Tensor], torch.Tensor]  # `checksum` or `full_checksum`

_LEAST = torch.iinfo(torch.int64).min


@dataclass(frozen=True, order=True)
class Copy:
    """A tensor of this rank of which other ranks have copies.

    Attributes:
        key: Of the parameter.
        is_main: Whether it is the parameter's master copy, which the optimizer steps.
        groups: Ranks of each reduction along which copies are equal.
    """

    key: str
    is_main: bool
    groups: tuple[tuple[int, ...], ...]

    @property
    def name(self) -> tuple[str, bool]:
        """Equal on all ranks."""
        return self.key, self.is_main


class Copies:
    """All copies of this rank: of parameters, also frozen ones, and of their master copies.

    Args:
        packs: This rank's parameters by route, in the order of all ranks.
        lookup: Key -> live parameter.
        main_of: Key -> its master copy on this rank, or the part that this rank steps; None if
            another rank steps it.
        with_main: Keys of the parameters that have master copies, the same on all ranks.
        groups: The communicators; those of comm stream 0 are used.
        device: Of this rank.
    """

    def __init__(
        self,
        packs: Sequence[Bucket],
        lookup: Lookup,
        main_of: Callable[[str], torch.Tensor | None],
        with_main: Collection[str],
        *,
        groups: Groups,
        device: torch.device,
    ) -> None:
        self._lookup = lookup
        self._main_of = main_of
        self._groups = groups
        self._device = device
        self._all: list[Copy] = []
        self._over: dict[tuple[int, ...], list[int]] = {}  # ranks -> indices of their copies
        for pack in packs:
            everywhere = tuple(dict.fromkeys(step.ranks for step in pack.route))
            # With SHARD each rank has another part of a master copy. With OWNER one rank has it.
            mains = (s.ranks for s in pack.route if s.placement is Placement.REPLICATE)
            replicated = tuple(dict.fromkeys(mains))
            for slot in pack.slots:
                self._all.append(Copy(slot.key, is_main=False, groups=everywhere))
                if slot.key in with_main and replicated:
                    self._all.append(Copy(slot.key, is_main=True, groups=replicated))
        for index, copy in enumerate(self._all):
            for ranks in copy.groups:
                self._over.setdefault(ranks, []).append(index)

    def tensor(self, copy: Copy) -> torch.Tensor | None:
        """Returns the tensor of a copy, without version counter of the parameter; or None."""
        tensor = self._main_of(copy.key) if copy.is_main else local(self._lookup(copy.key))
        return None if tensor is None else tensor.data

    def named(self, names: Collection[tuple[str, bool]]) -> list[tuple[Copy, torch.Tensor]]:
        """Returns those of some names that this rank has, with their tensors."""
        return [
            (copy, tensor)
            for copy in self._all
            if copy.name in names and (tensor := self.tensor(copy)) is not None
        ]

    def differing(self, sums: Sums) -> list[tuple[Copy, tuple[int, ...]]]:
        """Returns the copies that differ over the ranks of a reduction, with these ranks.

        All ranks of a reduction have the same result.

        Sync: on the current stream; one all-reduce over each set of ranks. The host waits for it.
        """
        rows = [self._row(copy, sums) for copy in self._all]
        found = []
        # All ranks go through the sets of ranks in one order, so they cannot wait in a circle.
        for ranks, indices in sorted(self._over.items()):
            table = torch.stack([rows[index] for index in indices])
            dist.all_reduce(table, op=dist.ReduceOp.MAX, group=self._groups.of(ranks, 0))
            unequal = zip(indices, _unequal(table).tolist(), strict=True)
            found += [(self._all[index], ranks) for index, differs in unequal if differs]
        return found

    def _row(self, copy: Copy, sums: Sums) -> torch.Tensor:
        """Returns the sums and their complements; the least numbers if the tensor is not here."""
        # The maximum of the complements is the complement of the minimum. So one reduction compares
        # any number of copies: they are equal if maximum and minimum are.
        tensor = self.tensor(copy)
        if tensor is None:
            number = 2 * len(sums(torch.zeros(0)))
            return torch.full((number,), _LEAST, device=self._device)
        own = sums(tensor)
        return torch.cat([own, ~own])


def _unequal(table: torch.Tensor) -> torch.Tensor:
    """Returns for each row of maxima, ``(copies, 2 * sums)``, whether any rank has other sums."""
    largest, complements = table.chunk(2, dim=1)
    is_nowhere = (largest == _LEAST) & (complements == _LEAST)
    return ((largest != ~complements) & ~is_nowhere).any(dim=1)
