"""Refuses routes that contradict each other, the stages, or the model. Pure.

Each check finds a mistake that would otherwise hang a job, or silently give wrong gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipegrad.errors import PlanError
from pipegrad.model.manifest import Manifest
from pipegrad.model.ties import matches_any
from pipegrad.model.wrappers import FSDP2
from pipegrad.plan.routes import (
    Route,
    Routes,
    shared_routes,
    signature,
    steps_taken,
)
from pipegrad.topology import Topology


def check_routes(
    manifest: Manifest, topology: Topology, routes: Routes, allow_unsynced: Sequence[str]
) -> None:
    """Checks that the routes of all ranks fit together, and cover all that must be reduced.

    Raises:
        PlanError: If they do not. It names the handlers.
    """
    _check_members(routes)
    _check_copies(manifest, topology, routes)
    _check_regions(routes)
    _check_wrappers(manifest, topology, routes)
    _check_shards(manifest, topology, routes)
    _check_left_out(manifest, topology, routes, allow_unsynced)
    _check_ties(manifest, topology, routes, allow_unsynced)


def _check_members(routes: Routes) -> None:
    """All members of a reduction must have it in their routes; otherwise the others would hang."""
    for rank, by_key in routes.items():
        for key, route in by_key.items():
            for step in route:
                # The owner is compared with all members, and each member with the owner. So all
                # pairs are covered, in linear time.
                for member in step.ranks if rank == step.owner else step.ranks[:1]:
                    on_member = routes[member].get(key, ())
                    if step not in on_member:
                        raise PlanError(
                            f"handler {step.handler!r}: rank {rank} reduces {key!r} by {step} "
                            f"over ranks {list(step.ranks)}, but rank {member} has "
                            f"{[str(h) for h in on_member] or 'no reduction of it'}; a handler "
                            f"must say the same for every rank of a reduction"
                        )


def _check_regions(routes: Routes) -> None:
    """All members of a reduction must have the same part of the gradient before it."""
    # Otherwise the reduction would add different shards of one gradient.
    for rank, by_key in routes.items():
        for key, route in by_key.items():
            for number, step in enumerate(route[: steps_taken(route, rank)]):
                for member in step.ranks if rank == step.owner else step.ranks[:1]:
                    if part_of(routes[member][key], number, member) != part_of(route, number, rank):
                        raise PlanError(
                            f"{key!r}: before {step} over ranks {list(step.ranks)}, rank {rank} "
                            f"and rank {member} are left with different parts of it: number the "
                            f"ranks so that they ascend along every dimension of the mesh"
                        )


def part_of(route: Route, num_steps: int, rank: int) -> list[int | bool]:
    """Returns which part of a gradient a rank has after `num_steps` reductions."""
    return [
        h.ranks.index(rank) if h.placement.scatters else rank == h.owner
        for h in route[:num_steps]
        if h.syncs_parameters
    ]


def _check_copies(manifest: Manifest, topology: Topology, routes: Routes) -> None:
    """All copies of a parameter must take the same route; otherwise their buckets would differ."""
    agreed = shared_routes(routes)
    for rank, by_key in routes.items():
        for record in manifest.records(topology.at(rank)):
            route, expected = by_key.get(record.key, ()), agreed.get(record.key, ())
            if route is expected:
                continue
            if signature(route) != signature(expected):
                raise PlanError(
                    f"{record.key!r} takes the route {[str(h) for h in route]} on rank {rank}, but "
                    f"{[str(h) for h in expected]} on another rank that holds it: handlers "
                    f"{sorted({h.handler for h in (*route, *expected)})} must treat copies alike"
                )


def _check_wrappers(manifest: Manifest, topology: Topology, routes: Routes) -> None:
    """A wrapper that reduces gradients must be known, and no handler may reduce them again."""
    for stage, wrapper in manifest.wrappers:
        if wrapper == FSDP2:
            continue
        if stage not in manifest.reduced_by_ddp:
            raise PlanError(
                f"stage {stage} has parameters of {wrapper}, whose flat gradients pipegrad cannot "
                f"reduce: use fully_shard (FSDP2), or plain modules with handler 'data-parallel'"
            )
        rank = next(r for r in routes if stage in topology.at(r).local_stages)
        for key, route in routes[rank].items():
            held = any(s == stage for s, _ in manifest.locations(key))
            for step in route:
                if held and any(map(step.spans, topology.data_axes)):
                    raise PlanError(
                        f"stage {stage} is wrapped by DistributedDataParallel and handler "
                        f"{step.handler!r} reduces {key!r} over {step.axes} too: it would be "
                        f"reduced twice; unwrap the stage, or drop the handler"
                    )


def _check_shards(manifest: Manifest, topology: Topology, routes: Routes) -> None:
    """A reduction of a DTensor must join equal parts, and no two ranks of the DTensor's mesh."""
    # The ranks of the mesh already reduce among themselves.
    if not manifest.shards:
        return
    for rank, by_key in routes.items():
        for key, route in by_key.items():
            shard = manifest.shard(rank, key)
            if shard is None:
                continue
            layout = manifest.entries(key)[0].layout
            for step in route:
                subject = (
                    f"handler {step.handler!r} reduces {key!r} by {step} over {list(step.ranks)}"
                )
                if step.syncs_parameters:
                    raise PlanError(
                        f"{subject}, but it is a DTensor, {layout}: only whole parameters can be "
                        f"stepped elsewhere; take REPLICATE, FSDP2 shards what is stepped"
                    )
                twice = set(step.ranks) & set(shard.members)
                if len(twice) > 1:
                    of_data = twice <= set(topology.at(rank).ranks_along(topology.data_axes))
                    way_out = (
                        "drop the handler, ['pipeline-shared'] is enough"
                        if of_data
                        else "leave it out of the parameters that the handler is given"
                    )
                    raise PlanError(
                        f"{subject}, but it is a DTensor, {layout}, on ranks "
                        f"{list(shard.members)}, which reduce it among themselves: it would be "
                        f"reduced twice; {way_out}"
                    )
                locations = {r: manifest.shard(r, key) for r in step.ranks}
                parts = {r: s and (s.coordinate, s.shape) for r, s in locations.items()}
                if len(set(parts.values())) > 1:
                    raise PlanError(
                        f"{subject}, where it is a DTensor, {layout}, but these ranks have "
                        f"different parts of it, (coordinate, shape): {parts}; number the ranks "
                        f"of its mesh alike in all stages"
                    )


def _check_left_out(
    manifest: Manifest, topology: Topology, routes: Routes, allow_unsynced: Sequence[str]
) -> None:
    """If FSDP2 wraps a stage only in part, a handler must reduce the other parameters."""
    # FSDP2 reduces over its mesh only the parameters that it shards. The other parameters of the
    # stage see different data on each rank of the mesh, too.
    for stage, wrapper in manifest.wrappers:
        rank = next(r for r in routes if stage in topology.at(r).local_stages)
        held = [
            (record.key, manifest.shard(rank, record.key))
            for record in manifest.records(topology.at(rank))
            if record.requires_grad and any(s == stage for s, _ in manifest.locations(record.key))
        ]
        shards = [shard for _, shard in held if shard is not None]
        meshes = {shard.members for shard in shards if len(shard.members) > 1}
        if wrapper != FSDP2 or not meshes:
            continue
        members = min(meshes)
        for key, shard in held:
            covered = any(set(members) <= set(step.ranks) for step in routes[rank].get(key, ()))
            names = (key, *(name for _, name in manifest.locations(key)))
            if shard is None and not covered and not matches_any(allow_unsynced, names):
                raise PlanError(
                    f"{key!r} is a whole parameter in stage {stage}, of which FSDP2 shards others "
                    f"over ranks {list(members)}, and nobody reduces its gradient over them: call "
                    f"fully_shard on the stage itself, or name it in allow_unsynced"
                )


def _check_ties(
    manifest: Manifest,
    topology: Topology,
    routes: Routes,
    allow_unsynced: Sequence[str],
) -> None:
    """A tied parameter must be reduced over all ranks that hold it."""
    for rank in routes:
        view = topology.at(rank)
        for record in filter(lambda r: r.shared, manifest.records(view)):
            ranks = set(view.ranks_of(record.holders))
            covered = any(ranks <= set(step.ranks) for step in routes[rank].get(record.key, ()))
            names = (record.key, *(name for _, name in manifest.locations(record.key)))
            if len(ranks) > 1 and not covered and not matches_any(allow_unsynced, names):
                locations = [f"{name!r} on stage {s}" for s, name in manifest.locations(record.key)]
                raise PlanError(
                    f"{' and '.join(locations)} are one parameter, but no handler reduces its "
                    f"gradient over ranks {sorted(ranks)}: add 'pipeline-shared' to the handlers, "
                    f"or name it in allow_unsynced to let the copies drift apart"
                )
