"""Makes the agreed model from the manifests of all ranks, or names the ranks that disagree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from pipegrad.comm.agreement import same
from pipegrad.errors import PlanError, TopologyError
from pipegrad.model.claims import Claims
from pipegrad.model.describe import describe_rank
from pipegrad.model.dtensor import largest
from pipegrad.model.gradient_storage import GradAttribute, GradientAccessor
from pipegrad.model.manifest import Manifest, ParameterEntry, RankManifest
from pipegrad.model.suspects import Location, Start
from pipegrad.model.ties import Tie, Tied, declared, united
from pipegrad.topology import Topology


def make_manifest(
    modules: Mapping[int, nn.Module],
    topology: Topology,
    *,
    tied: Tied = (),
    accessor: GradientAccessor | None = None,
) -> Manifest:
    """Returns the model on which the ranks of a job would agree, from all stages in one process.

    It needs no process group, and the stages may be on the meta device. `make_plan` makes the plan
    of any rank from it.

    Args:
        modules: Every stage of the model, ``{stage: module}``.
        topology: Of any rank.
        tied: As `GradientSync` takes it.
        accessor: Where gradients live; ``parameter.grad`` by default.

    Raises:
        TopologyError: If the modules are not those of the topology's stages.
        PlanError: If a tie names a parameter that no stage holds, or parameters that cannot be
            one parameter.
    """
    if sorted(modules) != list(range(topology.num_stages)):
        raise TopologyError(
            f"the topology has stages 0..{topology.num_stages - 1}, but the modules given are "
            f"those of stages {sorted(modules)}: give all of them"
        )
    ties = declared(tied)
    # The same rank of every pipeline holds the same modules: they are described once.
    described: dict[tuple[int, ...], RankManifest] = {}
    for rank in topology.one_replica:
        stages = topology.at(rank).local_stages
        local = {stage: modules[stage] for stage in stages}
        described[stages] = describe_rank(local, accessor or GradAttribute(), {}, ties)
    manifests = [described[topology.at(rank).local_stages] for rank in sorted(topology.ranks)]
    return merge(manifests, topology, ties)


def merge(manifests: Sequence[RankManifest], topology: Topology, ties: Sequence[Tie]) -> Manifest:
    """Returns the model that the manifests of all ranks describe. Pure.

    Args:
        manifests: One for each rank of the topology, by ascending rank.
        topology: Of any rank.
        ties: The declarations, the same on all ranks.

    Raises:
        AgreementError: If ranks disagree. It lists the ranks and their values.
        PlanError: If a tie names a parameter that no stage holds, or parameters that cannot be
            one parameter.
    """
    # Every rank runs this on the same manifests, so all ranks have the same result, or the same
    # error. Settings come first: other differences often follow from a different option.
    by_rank = dict(zip(sorted(topology.ranks), manifests, strict=True))
    names = dict.fromkeys(name for m in manifests for name, _ in m.settings)
    for name in names:
        same(name, {r: dict(m.settings).get(name, "nothing") for r, m in by_rank.items()})
    same("the device type", {r: m.device_type for r, m in by_rank.items() if m.device_type})
    holders_of: dict[int, list[int]] = {stage: [] for stage in range(topology.num_stages)}
    for rank in by_rank:
        for stage in topology.at(rank).local_stages:
            holders_of[stage].append(rank)
    stages: list[tuple[ParameterEntry, ...]] = []
    wrappers: list[tuple[int, str]] = []
    for stage, holders in holders_of.items():
        entries = {r: dict(by_rank[r].stages).get(stage, ()) for r in holders}
        same(f"the parameters of stage {stage}", {r: _lines(e) for r, e in entries.items()})
        wrapped = {r: dict(by_rank[r].wrappers).get(stage, "") for r in holders}
        same(f"the wrapper of stage {stage}", wrapped)
        stages.append(_sharded(stage, entries[holders[0]], [by_rank[r] for r in holders]))
        wrappers += [(stage, wrapped[holders[0]])] if wrapped[holders[0]] else []
    # A tie may be declared, or one rank may hold one object at several locations. Both kinds are
    # united, so a parameter that is tied in both ways has one group.
    linked = [group for m in manifests for group in m.linked]
    claims = Claims(stages, manifests, ties)
    groups = [tuple(sorted(group)) for group in united([*claims.locations, *linked])]
    for group in groups:
        _check_tie(group, stages)
        claims.refuse_different_starts(group)
    return Manifest(
        stages=tuple(stages),
        ties=tuple(sorted(groups)),
        wrappers=tuple(wrappers),
        shards=tuple((rank, m.shards) for rank, m in by_rank.items() if m.shards),
    )


def _sharded(
    stage: int, entries: tuple[ParameterEntry, ...], holders: Sequence[RankManifest]
) -> tuple[ParameterEntry, ...]:
    """Returns a stage's entries; those of DTensors have the shape of their largest local shard."""
    if not any(entry.layout for entry in entries):
        return entries
    shards = [dict(manifest.shards) for manifest in holders]
    resized: list[ParameterEntry] = []
    for entry in entries:
        if entry.layout is None:
            resized.append(entry)
            continue
        # A slot must have the same size on all ranks of a collective, and local shards may differ
        # by a row. So the largest shard decides.
        shape = largest(held[stage, entry.name] for held in shards)
        row_major = tuple(torch.empty(shape, device="meta").stride())
        resized.append(replace(entry, shape=shape, stride=row_major))
    return tuple(resized)


def starts_of(manifests: Sequence[RankManifest]) -> dict[Location, Start]:
    """Returns how each location starts, as on the lowest rank that holds it."""
    starts: dict[Location, Start] = {}
    for manifest in manifests:
        digests = dict(manifest.fingerprints)
        for stage, entries in manifest.stages:
            for e in entries:
                start = Start(e.kind, e.shape, e.requires_grad, digests.get((stage, e.name)))
                starts.setdefault((stage, e.name), start)
    return starts


def _lines(entries: Sequence[ParameterEntry]) -> str:
    return "; ".join(map(str, entries)) or "nothing"


def _check_tie(group: Sequence[Location], stages: Sequence[Sequence[ParameterEntry]]) -> None:
    if len({stage for stage, _ in group}) < len(group):
        raise PlanError(
            f"tie {list(group)}: one stage holds it as several objects; tie them inside the stage, "
            f"or declare the tie by name on the rank that holds them"
        )
    entries = [next(e for e in stages[s] if e.name == name) for s, name in group]
    for (stage, name), entry in zip(group[1:], entries[1:], strict=True):
        traits = ("layout", "shape", "dtype", "gradient_dtype", "requires_grad")
        for trait in traits:
            value, first = getattr(entry, trait), getattr(entries[0], trait)
            if trait == "layout" and value != first:
                value, first = (e.layout or f"{e.shape} whole" for e in (entry, entries[0]))
            if value != first:
                raise PlanError(
                    f"{name!r} on stage {stage} is tied to {group[0][1]!r} on stage {group[0][0]}, "
                    f"but its {trait} is {value} and the other's {first}: make them the same"
                )
