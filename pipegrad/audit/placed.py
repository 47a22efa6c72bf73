"""Placed: gradients of a `GradientSync` that lie in shards, in copies, or on their owner alone.

[Note: pieces] With SHARD a rank has elements of a gradient, with OWNER and WHOLE one rank has all
of it, and with a master dtype its copy has it. So each rank sends its piece, and rank 0 puts them
together: the ranks whose reductions place a gradient among them have it together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pipegrad.gradients.parameter import LiveParameter
from pipegrad.gradients.sync import GradientSync, open_syncs
from pipegrad.model.dtensor import is_dtensor
from pipegrad.plugins.handler import Placement

if TYPE_CHECKING:
    from pipegrad.audit.seen import Seen


@dataclass(frozen=True)
class Piece:
    """Where a rank's elements of a gradient belong.

    Attributes:
        ranks: Among which the gradient is placed.
        begin: Of the elements, in the order of the parameter's memory.
        shape: Of the parameter.
        stride: Of the parameter.
    """

    ranks: tuple[int, ...]
    begin: int
    shape: torch.Size
    stride: tuple[int, ...]


class Placed:
    """What the syncs of this process know of a rank's parameters.

    Args:
        own: Name -> parameter.
    """

    def __init__(self, own: Mapping[str, nn.Parameter]) -> None:
        self._live: dict[str, LiveParameter] = {}
        self._routes: dict[str, Sequence[tuple[int, ...]]] = {}
        self._syncs = list[GradientSync]()
        names: dict[int, list[str]] = {}
        for name, parameter in own.items():
            if not is_dtensor(parameter):
                names.setdefault(id(parameter), []).append(name)
        for sync in open_syncs():
            routes = dict(sync.plan.routes)
            known = [(n, live) for live in sync.live() for n in names.get(id(live.parameter), ())]
            for name, live in known:
                self._live[name] = live
                self._routes[name] = [
                    tuple(step.ranks)
                    for step in routes.get(live.record.key, ())
                    if step.placement is not Placement.REPLICATE
                ]
            if known:
                self._syncs.append(sync)

    def knows(self, name: str) -> bool:
        """Whether a sync has this parameter."""
        return name in self._live

    def gradient(self, name: str) -> Tensor | None:
        """Returns the gradient that this rank's optimizer steps with."""
        live = self._live[name]
        return live.main_gradient if live.main_parameter is not None else None

    def stepped(self) -> dict[int, str]:
        """Returns the ids of tensors that an optimizer steps for parameters -> their names."""
        main = {name: live.main_parameter for name, live in self._live.items()}
        return {
            id(tensor): name
            for name, tensor in main.items()
            if tensor is not None and tensor.dtype == self._live[name].parameter.dtype
        }

    def pieces(self) -> dict[str, Piece]:
        """Returns where the gradients of parameters that are placed belong, by name."""
        found = {}
        for name, steps in self._routes.items():
            if steps:
                live = self._live[name]
                shard, parameter = live.main_shard, live.parameter
                found[name] = Piece(
                    tuple(sorted({rank for step in steps for rank in step})),
                    0 if shard is None else shard.main_range.begin,
                    parameter.shape,
                    parameter.stride(),
                )
        return found

    def wait(self) -> None:
        """Waits for parameters that other ranks have stepped. All ranks must call it."""
        for sync in self._syncs:
            sync.wait_parameters()

    def restored(self) -> None:
        """Tells syncs that all parameters have other values. All ranks must call it."""
        for sync in self._syncs:
            if sync.steps_elsewhere:
                sync.synchronize_parameters()


def joined(seen: Sequence[Seen], first: Mapping[str, str]) -> list[Seen]:
    """Returns what ranks had, with whole gradients in the place of pieces, each on one rank.

    Args:
        seen: By each rank.
        first: Name of a parameter -> the first of its names.
    """
    found = list(seen)
    by_name: dict[str, list[tuple[int, str]]] = {}
    for index, of_rank in enumerate(seen):
        for name in of_rank.pieces:
            by_name.setdefault(first[name], []).append((index, name))
    for members in by_name.values():
        for ranks in _together(seen[index].pieces[name].ranks for index, name in members):
            group = [(i, name) for i, name in members if seen[i].rank in ranks]
            has = [(i, name) for i, name in group if seen[i].gradients.get(name) is not None]
            home, _ = (has or group)[0]
            for index, name in group:
                own = [(seen[i], n) for i, n in group] if index == home else []
                of_rank = found[index]
                found[index] = replace(
                    of_rank,
                    groups={**of_rank.groups, name: tuple(sorted(ranks))},
                    gradients=_instead(of_rank.gradients, name, "gradients", own),
                    unclipped=_instead(of_rank.unclipped, name, "unclipped", own),
                )
    return found


def _together(every: Iterable[tuple[int, ...]]) -> list[set[int]]:
    """Returns the sets that these make where they overlap."""
    found = list[set[int]]()
    for ranks in every:
        own = set(ranks)
        for other in [other for other in found if other & own]:
            found.remove(other)
            own |= other
        found.append(own)
    return found


def _instead(
    values: Mapping[str, Tensor | None], name: str, what: str, own: Sequence[tuple[Seen, str]]
) -> dict[str, Tensor | None]:
    """Returns gradients with a whole one in the place of a piece, or without it on other ranks."""
    found = {other: value for other, value in values.items() if other != name}
    if own and name in values:
        found[name] = _whole(own, what)
    return found


def _whole(members: Sequence[tuple[Seen, str]], what: str) -> Tensor | None:
    """Returns a gradient made of the pieces of some ranks; None if there is none."""
    pieces = list[tuple[Piece, Tensor]]()
    for of_rank, name in members:
        value: Tensor | None = getattr(of_rank, what).get(name)
        if value is not None:
            pieces.append((of_rank.pieces[name], value))
    if not pieces:
        return None
    first, value = pieces[0]
    flat = value.new_zeros(first.shape.numel())
    for piece, own in pieces:
        if own.shape == piece.shape:
            return own
        flat[piece.begin : piece.begin + own.numel()] = own.reshape(-1)
    return flat.as_strided(first.shape, first.stride)


@dataclass(frozen=True)
class Entry:
    """A gradient that some ranks hold together.

    Attributes:
        name: First name of the parameter in the uncut model.
        ranks: That hold it, or parts of it.
        replicas: Whose data they have had.
        uses: Names of the parameter on these ranks.
        gradient: None if they have none.
    """

    name: str
    ranks: tuple[int, ...]
    replicas: tuple[int, ...]
    uses: tuple[str, ...]
    gradient: Tensor | None


def entries_of(
    seen: Sequence[Seen],
    gradients: Sequence[Mapping[str, Tensor | None]],
    first: Mapping[str, str],
) -> list[Entry]:
    """Returns gradients with the ranks that hold them; a parameter once for each group of ranks.

    Args:
        seen: By each rank.
        gradients: Of each rank, by name.
        first: Name of a parameter -> the first of its names.
    """
    replicas = {of_rank.rank: of_rank.replica for of_rank in seen}
    found: dict[tuple[str, tuple[int, ...]], Entry] = {}
    for of_rank, held in zip(seen, gradients, strict=True):
        for name, gradient in held.items():
            group = of_rank.groups[name]
            own = tuple(sorted({replicas[rank] for rank in group}))
            entry = Entry(first[name], group, own, of_rank.uses[name], gradient)
            found.setdefault((entry.name, group), entry)
    return list(found.values())
