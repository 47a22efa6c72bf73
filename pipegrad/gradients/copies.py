"""Copies along dimensions of one and the same data: told by their bits, refused if left alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pipegrad.errors import PlanError
from pipegrad.gradients.route import Route
from pipegrad.gradients.shared import Place, matches_any

if TYPE_CHECKING:
    from pipegrad.gradients.manifest import Manifest
    from pipegrad.topology import Topology


def refuse_loose_copies(
    manifest: Manifest,
    view: Topology,
    routes: Mapping[str, Route],
    fingerprints: Mapping[int, Mapping[Place, str]],
    allow_unsynced: Sequence[str],
) -> None:
    """Refuses copies along a dimension of one and the same data that nobody reduces.

    A handler does, or a DTensor's own ranks do.

    Args:
        manifest: The agreed model.
        view: The topology, as the rank sees it whose copies are looked at.
        routes: Of that rank.
        fingerprints: Rank -> place -> digest of a parameter with non-constant bits.
        allow_unsynced: Shell-style patterns of keys or names that may stay without a reduction.

    Raises:
        PlanError: Names one, and what to write.
    """

    def reduced(key: str) -> list[tuple[int, ...]]:
        shard = manifest.shard(view.rank, key)
        return [hop.ranks for hop in routes.get(key, ())] + ([shard.members] if shard else [])

    for axis in (name for name, _ in view.axes):
        if axis in (view.pipeline, *view.data_axes):
            continue
        ranks = view.ranks_along(axis)
        loose = [
            record.key
            for record in manifest.records(view)
            if record.requires_grad
            and _start_alike([fingerprints[r].get((record.stage, record.name)) for r in ranks])
            and not any(set(ranks) <= set(others) for others in reduced(record.key))
            and not matches_any(allow_unsynced, (record.key, record.name))
        ]
        if loose:
            raise PlanError(
                f"{loose[0]!r} and {len(loose) - 1} more start with the same bits on ranks "
                f"{list(ranks)}, along {axis!r}, but no handler reduces their gradients there: "
                f"they would drift apart, or count several times in the norm. Add "
                f"'sequence-parallel' to the handlers, with op = 'sum' where each rank has a part "
                f"of the gradient and 'mean' where each has all of it, or name them in "
                f"allow_unsynced"
            )


def _start_alike(digests: Sequence[str | None]) -> bool:
    return len(digests) > 1 and digests[0] is not None and len(set(digests)) == 1
