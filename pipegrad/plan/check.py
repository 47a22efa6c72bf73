"""Refuses plans that contradict each other, the stages, or the model. Pure.

Each check finds a mistake that would otherwise hang a job, or silently give wrong gradients. One
such mistake is a copy that no handler keeps equal. Along dimensions of the same data, such as
tensor parallelism, copies are recognised by their initial values. Along data-parallel dimensions,
all parameters are copies.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

from torch import nn

from pipegrad.errors import PlanError
from pipegrad.model.manifest import Location, Manifest
from pipegrad.model.wrappers import FSDP2
from pipegrad.plan.buckets import Bucket
from pipegrad.plan.routes import (
    Route,
    Routes,
    part_of,
    shared_routes,
    signature,
    steps_taken,
)
from pipegrad.plugins.handler import GradientHandler, Placement, ReductionStep, matches_any
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
    _check_wrappers(manifest, topology, routes, allow_unsynced)
    _check_shards(manifest, topology, routes)
    _check_ties(manifest, topology, routes, allow_unsynced)


def _is_covered(
    manifest: Manifest,
    key: str,
    ranks: Iterable[int],
    reduced: Iterable[Sequence[int]],
    allow_unsynced: Sequence[str],
) -> bool:
    """True if a parameter is reduced over `ranks`, or needs no reduction."""
    names = (key, *(name for _, name in manifest.locations[key]))
    return any(set(ranks) <= set(each) for each in reduced) or matches_any(allow_unsynced, names)


def _reduced_over(manifest: Manifest, rank: int, key: str, route: Route) -> list[Sequence[int]]:
    """Returns the groups of ranks that reduce a parameter: by handlers, or as a DTensor."""
    shard = manifest.shard(rank, key)
    return [*(step.ranks for step in route), *([shard.members] if shard else [])]


def _pairs(routes: Routes) -> Iterator[tuple[str, int, ReductionStep, int, int]]:
    """Yields each step of each route with two ranks to compare: key, number, step, rank, member."""
    # Compare the owner with all members, and each member with the owner, because this covers all
    # pairs in linear time.
    for rank, by_key in routes.items():
        for key, route in by_key.items():
            for number, step in enumerate(route):
                for member in step.ranks if rank == step.owner else step.ranks[:1]:
                    yield key, number, step, rank, member


def _check_members(routes: Routes) -> None:
    """All members of a reduction must have it in their routes, and the same part before it."""
    # The others would hang otherwise, or the reduction would add different shards of one gradient.
    for key, number, step, rank, member in _pairs(routes):
        route, on_member = routes[rank][key], routes[member].get(key, ())
        if step not in on_member:
            raise PlanError(
                f"handler {step.handler!r}: rank {rank} reduces {key!r} by {step} over ranks "
                f"{list(step.ranks)}, but rank {member} has "
                f"{[str(h) for h in on_member] or 'no reduction of it'}; a handler must say the "
                f"same for every rank of a reduction"
            )
        differ = part_of(on_member, number, member) != part_of(route, number, rank)
        if differ and number < steps_taken(route, rank):
            raise PlanError(
                f"{key!r}: before {step} over ranks {list(step.ranks)}, rank {rank} and rank "
                f"{member} are left with different parts of it: number the ranks so that they "
                f"ascend along every dimension of the mesh"
            )


def _check_copies(manifest: Manifest, topology: Topology, routes: Routes) -> None:
    """All copies of a parameter must take the same route; otherwise their buckets would differ."""
    agreed = shared_routes(routes)
    for rank, by_key in routes.items():
        for record in manifest.records(topology.at(rank)):
            route, expected = by_key.get(record.key, ()), agreed.get(record.key, ())
            if route is not expected and signature(route) != signature(expected):
                raise PlanError(
                    f"{record.key!r} takes the route {[str(h) for h in route]} on rank {rank}, but "
                    f"{[str(h) for h in expected]} on another rank that holds it: handlers "
                    f"{sorted({h.handler for h in (*route, *expected)})} must treat copies alike"
                )


def _check_wrappers(
    manifest: Manifest, topology: Topology, routes: Routes, allow_unsynced: Sequence[str]
) -> None:
    """A wrapper that reduces gradients must be known, and no handler may reduce them again.

    If FSDP2 wraps a stage only in part, a handler must reduce the other parameters.
    """
    for stage, wrapper in manifest.wrappers:
        if wrapper != FSDP2 and stage not in manifest.reduced_by_ddp:
            raise PlanError(
                f"stage {stage} has parameters of {wrapper}, whose flat gradients pipegrad cannot "
                f"reduce: use fully_shard (FSDP2), or plain modules with handler 'data-parallel'"
            )
        rank = next(r for r in routes if stage in topology.at(r).local_stages)
        held = [
            (record, routes[rank].get(record.key, ()), manifest.shard(rank, record.key))
            for record in manifest.records(topology.at(rank))
            if any(s == stage for s, _ in manifest.locations[record.key])
        ]
        # The other parameters of the stage need a handler, because FSDP2 reduces only the ones that
        # it shards, and each rank of its mesh sees different data.
        shards = [x for r, _, x in held if x and r.requires_grad and wrapper == FSDP2]
        members = min((x.members for x in shards if len(x.members) > 1), default=())
        for record, route, shard in held:
            for step in route if wrapper != FSDP2 else ():
                if any(map(step.spans, topology.data_axes)):
                    raise PlanError(
                        f"stage {stage} is wrapped by DistributedDataParallel and handler "
                        f"{step.handler!r} reduces {record.key!r} over {step.axes} too: it would "
                        f"be reduced twice; unwrap the stage, or drop the handler"
                    )
            reduced = [step.ranks for step in route]
            if (
                members
                and record.requires_grad
                and shard is None
                and not _is_covered(manifest, record.key, members, reduced, allow_unsynced)
            ):
                raise PlanError(
                    f"{record.key!r} is a whole parameter in stage {stage}, of which FSDP2 shards "
                    f"others over ranks {list(members)}, and nobody reduces its gradient over "
                    f"them: call fully_shard on the stage itself, or name it in allow_unsynced"
                )


def _check_shards(manifest: Manifest, topology: Topology, routes: Routes) -> None:
    """A reduction of a DTensor must join equal parts, and no two ranks of the DTensor's mesh."""
    # The ranks of the mesh already reduce among themselves.
    steps = (
        (rank, key, step, shard)
        for rank in manifest.shards
        for key, route in routes[rank].items()
        for step in route
        if (shard := manifest.shard(rank, key)) is not None
    )
    for rank, key, step, shard in steps:
        layout = manifest.entries(key)[0].layout
        subject = f"handler {step.handler!r} reduces {key!r} by {step} over {list(step.ranks)}"
        if step.syncs_parameters:
            raise PlanError(
                f"{subject}, but it is a DTensor, {layout}: only whole parameters can be "
                f"stepped elsewhere; take REPLICATE, FSDP2 shards what is stepped"
            )
        twice = set(step.ranks) & set(shard.members)
        if len(twice) > 1:
            way_out = "leave it out of the parameters that the handler is given"
            if twice <= set(topology.at(rank).ranks_along(topology.data_axes)):
                way_out = "drop the handler, ['pipeline-shared'] is enough"
            raise PlanError(
                f"{subject}, but it is a DTensor, {layout}, on ranks {list(shard.members)}, which "
                f"reduce it among themselves: it would be reduced twice; {way_out}"
            )
        parts = {r: (s := manifest.shard(r, key)) and (s.coordinate, s.shape) for r in step.ranks}
        if len(set(parts.values())) > 1:
            raise PlanError(
                f"{subject}, where it is a DTensor, {layout}, but these ranks have different "
                f"parts of it, (coordinate, shape): {parts}; number the ranks of its mesh alike "
                f"in all stages"
            )


def _check_ties(
    manifest: Manifest,
    topology: Topology,
    routes: Routes,
    allow_unsynced: Sequence[str],
) -> None:
    """A tied parameter must be reduced over all ranks that hold it."""
    for rank, by_key in routes.items():
        view = topology.at(rank)
        for record in filter(lambda r: topology.crosses(r.holders), manifest.records(view)):
            ranks = view.ranks_of(record.holders)
            reduced = [step.ranks for step in by_key.get(record.key, ())]
            if not _is_covered(manifest, record.key, ranks, reduced, allow_unsynced):
                locations = [f"{name!r} on stage {s}" for s, name in manifest.locations[record.key]]
                raise PlanError(
                    f"{' and '.join(locations)} are one parameter, but no handler reduces its "
                    f"gradient over ranks {list(ranks)}: add 'pipeline-shared' to the handlers, "
                    f"or name it in allow_unsynced to let the copies drift apart"
                )


def check_sums(buckets: Iterable[Bucket], handlers: Mapping[str, GradientHandler]) -> None:
    """Refuses a `sum_dtype` with communication hooks, and with chains of more than two ranks.

    Raises:
        PlanError: If there is such a reduction. It names the handler and a parameter.
    """
    for bucket in (bucket for bucket in buckets if bucket.sum_dtype != bucket.wire_dtype):
        for step in bucket.route:
            words = f"sum_dtype={bucket.sum_dtype}, but handler {step.handler!r} reduces "
            if handlers[step.handler].leaves == "mean":
                raise PlanError(
                    f"{words}{bucket.names} by a communication hook, which adds in the dtype that "
                    f"it sends: drop its hook, or sum_dtype"
                )
            # Refuse longer chains, because each rank of a chain rounds the sum that it sends. Two
            # ranks add once.
            if step.placement is Placement.OWNER and len(step.ranks) > 2:
                raise PlanError(
                    f"{words}{bucket.names} along a chain of {len(step.ranks)} ranks, which round "
                    f"the sum one after the other: use the placement 'replicate', or drop sum_dtype"
                )


def refuse_suspected_replicas(
    manifest: Manifest,
    view: Topology,
    routes: Mapping[str, Route],
    fingerprints: Mapping[int, Mapping[Location, str]],
    allow_unsynced: Sequence[str],
) -> None:
    """Refuses copies along a dimension of the same data that are not reduced along it.

    A handler reduces them, or the ranks of a DTensor do. Parameters with different initial values
    are shards, not copies, and must not be reduced. If all elements are equal at the start, it only
    warns, because it is unknown if they are copies.

    Args:
        manifest: The agreed model.
        view: The topology of the rank whose parameters are checked.
        routes: Routes of that rank.
        fingerprints: Rank -> location -> digest of a parameter that is not constant.
        allow_unsynced: Shell-style patterns of keys or names that need no reduction.

    Raises:
        PlanError: If there are such parameters. It names one, and the option to write.
    """
    # All ranks along such a dimension see the same data. Without a reduction, rounding alone makes
    # their copies drift apart, too slowly for a loss curve to show it.
    for axis, size in view.axes:
        if size == 1 or axis in (view.pipeline, *view.data_axes):
            continue
        ranks = view.ranks_along(axis)
        unreduced: dict[str, set[str | None]] = {}
        for record in manifest.records(view):
            route, location = routes.get(record.key, ()), (record.stage, record.name)
            starts = {rank: fingerprints[rank].get(location) for rank in ranks}
            for step in route:
                # Refuse different starts, because a reduction of different shards would add
                # gradients of different parameters.
                along = sorted(set(step.ranks) & set(ranks))
                if len({starts[rank] for rank in along}) > 1:
                    raise PlanError(
                        f"handler {step.handler!r} reduces {record.key!r} by {step} over ranks "
                        f"{list(step.ranks)}, but it starts with different bits on ranks {along}, "
                        f"along {axis!r}: if each has a shard of its own, leave it out of the "
                        f"handler's parameters; if they are copies, give all these ranks the same "
                        f"start"
                    )
            reduced = _reduced_over(manifest, view.rank, record.key, route)
            if record.requires_grad and not _is_covered(
                manifest, record.key, ranks, reduced, allow_unsynced
            ):
                unreduced[record.key] = set(starts.values())
        alike = [key for key, found in unreduced.items() if len(found) == 1 and None not in found]
        constant = [key for key, found in unreduced.items() if found == {None}]
        if alike:
            raise PlanError(
                f"{alike[0]!r} and {len(alike) - 1} more start with the same bits on ranks "
                f"{list(ranks)}, along {axis!r}, but no handler reduces their gradients there: "
                f"they would drift apart, or count several times in the norm. Add "
                f"'sequence-parallel' to the handlers and them to its parameters, with op = 'sum' "
                f"where each rank has a part of the gradient and 'mean' where each has all of it, "
                f"or name them in allow_unsynced"
            )
        if constant:
            more = f" and {len(constant) - 3} more" if len(constant) > 3 else ""
            warnings.warn(
                f"{', '.join(map(repr, constant[:3]))}{more} start constant on ranks "
                f"{list(ranks)}, along {axis!r}, and no handler reduces them there: list copies in "
                f"the parameters of 'sequence-parallel', and in allow_unsynced what each rank has "
                f"a part of its own of",
                stacklevel=2,
            )


def refuse_bare_replicas(
    manifest: Manifest,
    view: Topology,
    routes: Mapping[str, Route],
    divisors: Mapping[str, float],
    allow_unsynced: Sequence[str],
    *,
    independent_axes: Sequence[str],
) -> None:
    """Refuses trained parameters that are not averaged over ranks that see different data.

    A handler averages them, or DistributedDataParallel does, or the ranks of a DTensor do. A
    handler may also divide a gradient by the size of the remaining dimensions, because each rank
    then has separate parameters, as with experts.

    Args:
        manifest: The agreed model.
        view: The topology of the rank whose parameters are checked.
        routes: Routes of that rank.
        divisors: Key -> divisor of its gradient.
        allow_unsynced: Shell-style patterns of keys or names that need no reduction.
        independent_axes: Dimensions along which replicas train alone.

    Raises:
        PlanError: If there are such parameters. It names one, and the handler to add.
    """
    bare = []
    for record in manifest.records(view):
        key, stage = record.key, record.stage
        reduced = _reduced_over(manifest, view.rank, key, routes.get(key, ()))
        rest = tuple(
            axis
            for axis in view.data_axes
            if axis not in independent_axes
            and not _is_covered(manifest, key, view.ranks_along(axis), reduced, allow_unsynced)
        )
        is_ours = record.requires_grad and stage not in manifest.reduced_by_ddp
        if is_ours and view.size(rest) not in (1, divisors.get(key)):
            bare.append(key)
    if bare:
        raise PlanError(
            f"no handler reduces the gradients of {bare[0]!r} and {len(bare) - 1} more over the "
            f"data-parallel ranks {list(view.ranks_along(view.data))}: these copies would drift "
            f"apart. Add 'data-parallel' to the handlers, or name them in allow_unsynced"
        )


def refuse_different_buffers(
    buffers: Mapping[int, Mapping[Location, str]], topology: Topology, allow_unsynced: Sequence[str]
) -> None:
    """Refuses buffers that start differently on replicas of a stage. They would stay different.

    Raises:
        PlanError: If there is such a buffer. It names it, and the ways to repair it.
    """
    for rank in sorted(topology.ranks):
        replicas = topology.at(rank).ranks_along(topology.data_axes)
        for stage, name in buffers[rank]:
            digests = {buffers[replica].get((stage, name)) for replica in replicas}
            if len(digests) > 1 and not matches_any(allow_unsynced, (name, f"{stage}.{name}")):
                raise PlanError(
                    f"buffer {name!r} of stage {stage} starts with different bits on ranks "
                    f"{list(replicas)}, which train replicas of that stage, and buffers are never "
                    f"sent: make the model after the same torch.manual_seed on every rank, load "
                    f"the same checkpoint, or name the buffer in allow_unsynced"
                )


def refuse_loss_parameters(loss: object, modules: Sequence[nn.Module]) -> None:
    """Refuses a loss with parameters that no stage holds, because they would not be reduced.

    Args:
        loss: A function, a module, or a method of a module.
        modules: This rank's stages.

    Raises:
        PlanError: If it has parameters that no stage holds. It names them.
    """
    parts: list[object] = [loss]
    if isinstance(loss, partial):
        parts = [loss.func, *loss.args, *loss.keywords.values()]
    owners = [getattr(part, "__self__", part) for part in parts]  # of methods
    named = [("of functools.partial", part) for part in parts if isinstance(part, nn.Parameter)]
    named += [pair for x in owners if isinstance(x, nn.Module) for pair in x.named_parameters()]
    held = {id(parameter) for module in modules for parameter in module.parameters()}
    bare = [name for name, p in named if p.requires_grad and id(p) not in held]
    if bare:
        raise PlanError(
            f"the loss has parameters {bare} that no stage holds, so nobody would divide or "
            f"reduce their gradients: make the loss's module a part of the last stage's"
        )
