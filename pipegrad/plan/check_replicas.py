"""Refuses copies of parameters that no handler keeps equal.

Along dimensions of the same data, such as tensor parallelism, copies are recognised by their
initial values. Along data-parallel dimensions, all parameters are copies.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

from torch import nn

from pipegrad.errors import PlanError
from pipegrad.model.manifest import Manifest
from pipegrad.model.suspects import Location
from pipegrad.model.ties import matches_any
from pipegrad.plan.routes import Route
from pipegrad.plugins.handler import ParameterRecord
from pipegrad.topology import Topology

Starts = Mapping[ParameterRecord, Sequence[str | None]]
"""A digest for each rank along a dimension; None if all elements are equal, as for zeros."""


def refuse_suspected_replicas(
    manifest: Manifest,
    view: Topology,
    routes: Mapping[str, Route],
    fingerprints: Mapping[int, Mapping[Location, str]],
    allow_unsynced: Sequence[str],
) -> None:
    """Refuses copies along a dimension of the same data that are not reduced along it.

    A handler reduces them, or the ranks of a DTensor do. Parameters with different initial values
    are shards, not copies: a reduction of them is refused. If all elements are equal at the start,
    it is unknown whether they are copies: then it warns.

    Args:
        manifest: The agreed model.
        view: The topology of the rank whose parameters are checked.
        routes: Of that rank.
        fingerprints: Rank -> location -> digest of a parameter that is not constant.
        allow_unsynced: Shell-style patterns of keys or names that need no reduction.

    Raises:
        PlanError: If there are such parameters. It names one, and the option to write.
    """

    def is_unreduced(record: ParameterRecord, ranks: Sequence[int]) -> bool:
        shard = manifest.shard(view.rank, record.key)
        reduced = [step.ranks for step in routes.get(record.key, ())]
        reduced += [shard.members] if shard else []
        is_covered = any(set(ranks) <= set(others) for others in reduced)
        allowed = matches_any(allow_unsynced, (record.key, record.name))
        return record.requires_grad and not is_covered and not allowed

    # All ranks along such a dimension see the same data. Without a reduction, rounding alone makes
    # their copies drift apart, so slowly that no loss curve shows it.
    for axis, size in view.axes:
        if size == 1 or axis in (view.pipeline, *view.data_axes):
            continue
        ranks = view.ranks_along(axis)
        starts = {
            record: [fingerprints[r].get((record.stage, record.name)) for r in ranks]
            for record in manifest.records(view)
        }
        _refuse_reduced_shards(axis, ranks, starts, routes)
        unreduced = {record: d for record, d in starts.items() if is_unreduced(record, ranks)}
        _refuse_copies(axis, ranks, unreduced)
        _warn_of_constants(axis, ranks, unreduced)


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
    handler may also divide a gradient by the size of the remaining dimensions: then each rank has
    its own parameters, as with experts.

    Args:
        manifest: The agreed model.
        view: The topology of the rank whose parameters are checked.
        routes: Of that rank.
        divisors: Key -> divisor of its gradient.
        allow_unsynced: Shell-style patterns of keys or names that need no reduction.
        independent_axes: Dimensions along which replicas train alone.

    Raises:
        PlanError: If there are such parameters. It names one, and the handler to add.
    """
    along = {a: set(view.ranks_along(a)) for a in view.data_axes if a not in independent_axes}

    def is_bare(record: ParameterRecord) -> bool:
        reduced = [set(step.ranks) for step in routes.get(record.key, ())]
        shard = manifest.shard(view.rank, record.key)
        reduced += [set(shard.members)] if shard else []
        rest = tuple(axis for axis, ranks in along.items() if not any(ranks <= r for r in reduced))
        allowed = matches_any(allow_unsynced, (record.key, record.name))
        allowed = allowed or record.stage in manifest.reduced_by_ddp
        is_left = view.size(rest) not in (1, divisors.get(record.key))
        return record.requires_grad and is_left and not allowed

    bare = [record.key for record in manifest.records(view) if is_bare(record)]
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

    Args:
        buffers: Rank -> location -> digest.
        topology: Of any rank.
        allow_unsynced: Shell-style patterns of names, with or without ``stage.`` before them.

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


def _refuse_reduced_shards(
    axis: str, ranks: Sequence[int], starts: Starts, routes: Mapping[str, Route]
) -> None:
    # If the ranks hold different shards, a reduction would add gradients of different parameters.
    for record, digests in starts.items():
        by_rank = dict(zip(ranks, digests, strict=True))
        for step in routes.get(record.key, ()):
            along = sorted(set(step.ranks) & set(ranks))
            if len({by_rank[rank] for rank in along}) > 1:
                raise PlanError(
                    f"handler {step.handler!r} reduces {record.key!r} by {step} over ranks "
                    f"{list(step.ranks)}, but it starts with different bits on ranks {along}, "
                    f"along {axis!r}: if each has a shard of its own, leave it out of the "
                    f"handler's parameters; if they are copies, give all these ranks the same start"
                )


def _refuse_copies(axis: str, ranks: Sequence[int], unreduced: Starts) -> None:
    alike = [r.key for r, d in unreduced.items() if d[0] is not None and len(set(d)) == 1]
    if alike:
        raise PlanError(
            f"{alike[0]!r} and {len(alike) - 1} more start with the same bits on ranks "
            f"{list(ranks)}, along {axis!r}, but no handler reduces their gradients there: "
            f"they would drift apart, or count several times in the norm. Add "
            f"'sequence-parallel' to the handlers and them to its parameters, with op = 'sum' "
            f"where each rank has a part of the gradient and 'mean' where each has all of it, or "
            f"name them in allow_unsynced"
        )


def _warn_of_constants(axis: str, ranks: Sequence[int], unreduced: Starts) -> None:
    constant = [record.key for record, digests in unreduced.items() if not any(digests)]
    if constant:
        more = f" and {len(constant) - 3} more" if len(constant) > 3 else ""
        warnings.warn(
            f"{', '.join(map(repr, constant[:3]))}{more} start constant on ranks {list(ranks)}, "
            f"along {axis!r}, and no handler reduces them there: list copies in the parameters of "
            f"'sequence-parallel', and in allow_unsynced what each rank has a part of its own of",
            stacklevel=2,
        )


def refuse_loss_parameters(loss: object, modules: Sequence[nn.Module], topology: Topology) -> None:
    """Refuses a loss with its own parameters, which would not be averaged over replicas.

    Args:
        loss: A function, a module, or a method of a module.
        modules: This rank's stages.
        topology: Ranks.

    Raises:
        PlanError: If it has parameters that no stage holds. It names them.
    """
    owner = getattr(loss, "func", loss)  # the function of a functools.partial
    owner = getattr(owner, "__self__", owner)
    if not isinstance(owner, nn.Module) or len(topology.pipelines) == 1:
        return
    held = {id(parameter) for module in modules for parameter in module.parameters()}
    bare = [n for n, p in owner.named_parameters() if p.requires_grad and id(p) not in held]
    if bare:
        raise PlanError(
            f"the loss has parameters {bare} that no stage holds, so nobody would average their "
            f"gradients over the replicas: make the loss's module a part of the last stage's"
        )
