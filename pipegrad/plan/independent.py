"""Independent axes: along them replicas train alone, and no gradient is sent. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipegrad.errors import PlanError, in_words
from pipegrad.model.manifest import Manifest
from pipegrad.plan.routes import Route, Routes, is_counted, part_of
from pipegrad.plugins.handler import GradientHandler
from pipegrad.topology import Topology


def independent_axes(
    manifest: Manifest,
    topology: Topology,
    handlers: Sequence[tuple[str, GradientHandler]],
    routes: Routes,
) -> tuple[tuple[str, ...], str]:
    """Returns the dimensions of several ranks along which replicas train alone, and the handler.

    Raises:
        PlanError: If several handlers have such dimensions, if they are not of data, if a gradient
            is reduced along them, or if replicas step different parts.
    """
    found = [(name, axes) for name, handler in handlers if (axes := _axes(name, handler, topology))]
    if not found:
        return (), ""
    (name, axes), *others = found
    if others or not set(axes) <= set(topology.data_axes):
        listing = " and ".join(f"along {'+'.join(a)!r} by handler {by!r}" for by, a in found)
        raise PlanError(
            f"replicas train alone {listing}: expected one handler, and one or several dimensions "
            f"of {list(topology.data_axes)}, along which ranks see different data"
        )
    replica = {rank: topology.at(rank).coordinate(axes) for rank in topology.ranks}
    for subject, ranks in _reducing(manifest, topology, routes):
        if len({replica[rank] for rank in ranks}) > 1:
            raise PlanError(
                f"{subject} over ranks {list(ranks)}, of replicas that train alone along "
                f"{'+'.join(axes)!r} and are joined by handler {name!r}: drop one of them, or give "
                f"each an axis of its own"
            )
    for rank, by_key in routes.items():
        other = topology.at(rank).ranks_along(axes)[0]
        for key, route in by_key.items():
            there = routes[other].get(key, ())
            if _stepped(route, rank) != _stepped(there, other):
                raise PlanError(
                    f"{key!r}: rank {rank} and rank {other}, of replicas that train alone, step "
                    f"different parts of it: number the ranks so that they ascend along every "
                    f"dimension of the mesh"
                )
    return axes, name


def _stepped(route: Route, rank: int) -> tuple[list[int | bool], bool]:
    """Returns which part of a parameter a rank steps, and whether it counts."""
    return part_of(route, len(route), rank), is_counted(route, rank)


def _axes(name: str, handler: GradientHandler, topology: Topology) -> tuple[str, ...]:
    """Returns the dimensions of a handler that have several ranks."""
    try:
        return tuple(a for a in handler.independent_axes(topology) if topology.size(a) > 1)
    except (Exception, SystemExit) as error:
        raise PlanError(
            f"handler {name!r}: independent_axes() failed: {in_words(error)}"
        ) from error


def _reducing(
    manifest: Manifest, topology: Topology, routes: Routes
) -> Iterator[tuple[str, Sequence[int]]]:
    """Yields who reduces gradients, and over which ranks."""
    steps = (s for by_key in routes.values() for route in by_key.values() for s in route)
    # By identity: comparing steps of thousands of ranks takes long.
    for step in {id(step): step for step in steps}.values():
        yield f"handler {step.handler!r} reduces gradients by {step}", step.ranks
    for stage in manifest.reduced_by_ddp:
        yield f"DistributedDataParallel reduces gradients of stage {stage}", topology.ranks
    for rank in topology.ranks:
        for record in manifest.records(topology.at(rank)) if manifest.shards else ():
            if (shard := manifest.shard(rank, record.key)) is not None:
                yield f"{record.key!r} is a DTensor, whose gradient is reduced", shard.members
