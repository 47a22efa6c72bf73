"""Entries: gradients of all ranks, each with the ranks that hold it together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from pipegrad.audit.watch import Seen


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
