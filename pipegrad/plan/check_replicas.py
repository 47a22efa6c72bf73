"""Copies along dimensions of one and the same data: told by their bits, refused if left alone."""

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
"""A digest a rank along some dimension; None where all bits are alike, as those of zeros."""


def refuse_suspected_replicas(
    manifest: Manifest,
    view: Topology,
    routes: Mapping[str, Route],
    fingerprints: Mapping[int, Mapping[Location, str]],
    allow_unsynced: Sequence[str],
) -> None:
    """Refuses copies along a dimension of one and the same data that nobody reduces.

    A handler does, or a DTensor's own ranks do. What starts differently is no copy but a shard: a
    reduction of it is refused. Of what is constant at the start, nobody can tell: a warning asks.

    Args:
        manifest: The agreed model.
        view: The topology, as the rank sees it whose copies are looked at.
        routes: Of that rank.
        fingerprints: Rank -> place -> digest of a parameter with non-constant bits.
        allow_unsynced: Shell-style patterns of keys or names that may stay without a reduction.

    Raises:
        PlanError: Names one, and what to write.
    """

    def is_loose(record: ParameterRecord, ranks: Sequence[int]) -> bool:
        shard = manifest.shard(view.rank, record.key)
        reduced = [step.ranks for step in routes.get(record.key, ())]
        reduced += [shard.members] if shard else []
        is_covered = any(set(ranks) <= set(others) for others in reduced)
        allowed = matches_any(allow_unsynced, (record.key, record.name))
        return record.requires_grad and not is_covered and not allowed

    for axis, size in view.axes:
        if size == 1 or axis in (view.pipeline, *view.data_axes):
            continue
        ranks = view.ranks_along(axis)
        starts = {
            record: [fingerprints[r].get((record.stage, record.name)) for r in ranks]
            for record in manifest.records(view)
        }
        _refuse_reduced_shards(axis, ranks, starts, routes)
        loose = {record: told for record, told in starts.items() if is_loose(record, ranks)}
        _refuse_copies(axis, ranks, loose)
        _warn_of_constants(axis, ranks, loose)


def refuse_bare_replicas(
    manifest: Manifest,
    view: Topology,
    routes: Mapping[str, Route],
    divisors: Mapping[str, float],
    allow_unsynced: Sequence[str],
) -> None:
    """Refuses trained parameters that nobody averages over ranks that see different data.

    A handler does, or DistributedDataParallel, or a DTensor's own ranks do. Where a handler divides
    a gradient by the size of the dimensions that are left, each rank has a part of its own, as
    experts are.

    Args:
        manifest: The agreed model.
        view: The topology, as the rank sees it whose parameters are looked at.
        routes: Of that rank.
        divisors: Key -> what handlers divide its gradient by.
        allow_unsynced: Shell-style patterns of keys or names that may stay without a reduction.

    Raises:
        PlanError: Names one, and what to write.
    """
    along = {axis: set(view.ranks_along(axis)) for axis in view.data_axes}

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
    """Refuses buffers that start differently on replicas of a stage: they would stay different.

    Args:
        buffers: Rank -> place -> digest.
        topology: From any rank's point of view.
        allow_unsynced: Shell-style patterns of names, plain or behind ``stage.``.

    Raises:
        PlanError: Names one, and what to write.
    """
    for rank in sorted(topology.ranks):
        replicas = topology.at(rank).ranks_along(topology.data_axes)
        for stage, name in buffers[rank]:
            told = {buffers[replica].get((stage, name)) for replica in replicas}
            if len(told) > 1 and not matches_any(allow_unsynced, (name, f"{stage}.{name}")):
                raise PlanError(
                    f"buffer {name!r} of stage {stage} starts with different bits on ranks "
                    f"{list(replicas)}, which train replicas of that stage, and buffers are never "
                    f"sent: make the model after the same torch.manual_seed on every rank, load "
                    f"the same checkpoint, or name the buffer in allow_unsynced"
                )


def _refuse_reduced_shards(
    axis: str, ranks: Sequence[int], starts: Starts, routes: Mapping[str, Route]
) -> None:
    for record, digests in starts.items():
        told = dict(zip(ranks, digests, strict=True))
        for step in routes.get(record.key, ()):
            along = sorted(set(step.ranks) & set(ranks))
            if len({told[rank] for rank in along}) > 1:
                raise PlanError(
                    f"handler {step.handler!r} reduces {record.key!r} by {step} over ranks "
                    f"{list(step.ranks)}, but it starts with different bits on ranks {along}, "
                    f"along {axis!r}: if each has a shard of its own, leave it out of the "
                    f"handler's parameters; if they are copies, give all these ranks the same start"
                )


def _refuse_copies(axis: str, ranks: Sequence[int], loose: Starts) -> None:
    alike = [r.key for r, told in loose.items() if told[0] is not None and len(set(told)) == 1]
    if alike:
        raise PlanError(
            f"{alike[0]!r} and {len(alike) - 1} more start with the same bits on ranks "
            f"{list(ranks)}, along {axis!r}, but no handler reduces their gradients there: "
            f"they would drift apart, or count several times in the norm. Add "
            f"'sequence-parallel' to the handlers and them to its parameters, with op = 'sum' "
            f"where each rank has a part of the gradient and 'mean' where each has all of it, or "
            f"name them in allow_unsynced"
        )


def _warn_of_constants(axis: str, ranks: Sequence[int], loose: Starts) -> None:
    constant = [record.key for record, told in loose.items() if not any(told)]
    if constant:
        more = f" and {len(constant) - 3} more" if len(constant) > 3 else ""
        warnings.warn(
            f"{', '.join(map(repr, constant[:3]))}{more} start constant on ranks {list(ranks)}, "
            f"along {axis!r}, and no handler reduces them there: list copies in the parameters of "
            f"'sequence-parallel', and in allow_unsynced what each rank has a part of its own of",
            stacklevel=2,
        )


def refuse_loss_parameters(loss: object, modules: Sequence[nn.Module], topology: Topology) -> None:
    """Refuses a loss with parameters of its own, which nobody would average over replicas.

    Args:
        loss: A function, a module or a method of one.
        modules: This rank's stages.
        topology: Ranks.

    Raises:
        PlanError: Names them.
    """
    owner = getattr(loss, "func", loss)  # of a functools.partial
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
