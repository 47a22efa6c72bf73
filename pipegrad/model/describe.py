"""The description of each rank, and the agreed model that is made of all; or an error."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn
from torch.fx import GraphModule

from pipegrad.comm.agreement import same
from pipegrad.errors import PlanError, TopologyError
from pipegrad.model.dtensor import described
from pipegrad.model.main_grad import MainGrad, gradient_dtype
from pipegrad.model.manifest import Location, Manifest, ParameterEntry, RankManifest
from pipegrad.model.suspects import fingerprint
from pipegrad.model.ties import (
    Tie,
    Tied,
    declared,
    declared_locations,
    different_starts,
    held,
    named,
    plain_name,
    united,
)
from pipegrad.model.wrappers import FSDP1, unwrapped, wrapper_of
from pipegrad.topology import Topology


def check_stages(modules: Mapping[int, nn.Module], topology: Topology) -> None:
    """Refuses stages that do not fit the topology, or that have no values yet.

    Raises:
        TopologyError: If these are other stages than this rank's, or the topology lacks ranks.
        PlanError: If a stage is no module, or has a parameter on the meta device.
    """
    if sorted(modules) != list(topology.local_stages):
        raise TopologyError(
            f"rank {topology.rank} was given modules for stages {sorted(modules)}, but the "
            f"topology puts stages {list(topology.local_stages)} on it"
        )
    for stage, module in modules.items():
        if not isinstance(module, nn.Module):
            raise PlanError(f"stage {stage} is {module!r}, expected an nn.Module")
    world = dist.get_world_size() if dist.is_initialized() else 1
    if set(topology.ranks) != set(range(world)):
        raise TopologyError(
            f"the topology has ranks {list(topology.ranks)}, the default process group {world}: "
            f"give a mesh of all ranks, with further dimensions if need be"
        )
    for (stage, name), _, parameter in named(modules):
        if parameter.is_meta:
            raise PlanError(
                f"parameter {name!r} of stage {stage} is on the meta device: materialise the stage"
            )


def describe_rank(
    modules: Mapping[int, nn.Module],
    main_grad: MainGrad | None,
    settings: Mapping[str, object],
    ties: Sequence[Tie] = (),
) -> RankManifest:
    """Returns this rank's manifest. Reads a sample of every parameter, and sends nothing.

    Raises:
        PlanError: If parameters are on several devices.
    """
    devices = sorted({str(p.device) for module in modules.values() for p in module.parameters()})
    if len(devices) > 1:
        raise PlanError(f"parameters of one rank are on several devices, {devices}: choose one")
    wrappers = {stage: kind for stage in sorted(modules) if (kind := wrapper_of(modules[stage]))}
    names: dict[tuple[int, nn.Parameter], list[str]] = defaultdict(list)
    for (stage, _), full_name, parameter in named(modules):
        names[stage, parameter].append(full_name)
    entries = {
        (stage, parameter): _entry(
            unwrapped(modules[stage]), full_names, parameter, main_grad, wrappers.get(stage)
        )
        for (stage, parameter), full_names in names.items()
    }
    locations: dict[nn.Parameter, list[Location]] = defaultdict(list)
    for (stage, parameter), entry in entries.items():
        locations[parameter].append((stage, entry.name))
    return RankManifest(
        stages=tuple(
            (stage, tuple(entry for (at, _), entry in entries.items() if at == stage))
            for stage in sorted(modules)
        ),
        wrappers=tuple(wrappers.items()),
        linked=tuple(tuple(group) for group in locations.values() if len(group) > 1),
        device_type=torch.device(devices[0]).type if devices else "",
        settings=tuple((name, str(value)) for name, value in settings.items()),
        held=tuple((i, at) for i, group in enumerate(held(modules, ties)) for at in sorted(group)),
        traced=tuple(s for s in sorted(modules) if isinstance(modules[s], GraphModule)),
        buffers=tuple(
            ((stage, plain_name(name)), digest)
            for stage in sorted(modules)
            for name, buffer in unwrapped(modules[stage]).named_buffers()
            if (digest := "".join(filter(None, fingerprint(buffer))))
        ),
    )


def _entry(
    module: nn.Module,
    full_names: Sequence[str],
    parameter: nn.Parameter,
    main_grad: MainGrad | None,
    wrapper: str | None,
) -> ParameterEntry:
    """Returns a parameter of a stage as plain data, with a digest of a sample of its bits."""
    owners = [module.get_submodule(name.rpartition(".")[0]) for name in full_names]
    first, *aliases = map(plain_name, full_names)
    # Do not read a parameter of FSDP1, because that would need a collective. The plan refuses such
    # a stage later, on all ranks.
    digest, constant = (None, None) if wrapper == FSDP1 else fingerprint(parameter)
    layout, shard = described(parameter)
    return ParameterEntry(
        name=first,
        aliases=tuple(aliases),
        shape=tuple(parameter.shape),
        stride=tuple(parameter.stride()),
        dtype=parameter.dtype,
        gradient_dtype=gradient_dtype(parameter, main_grad),
        requires_grad=parameter.requires_grad,
        layout=layout,
        kind=type(owners[0]).__name__,
        tied_in_stage=any(owner is not owners[0] for owner in owners),
        digest=digest,
        constant=constant,
        shard=shard,
    )


def device_of(modules: Mapping[int, nn.Module], manifests: Sequence[RankManifest]) -> torch.device:
    """Returns the device of this rank's parameters; without parameters, other ranks' device."""
    devices = (p.device for module in modules.values() for p in module.parameters())
    kinds = (torch.device(m.device_type) for m in manifests if m.device_type)
    return next(chain(devices, kinds), torch.device("cpu"))


def make_manifest(
    modules: Mapping[int, nn.Module],
    topology: Topology,
    *,
    tied: Tied = (),
    main_grad: MainGrad | None = None,
) -> Manifest:
    """Returns the model on which the ranks of a job would agree, from all stages in one process.

    It needs no process group, and the stages may be on the meta device. `make_plan` makes the plan
    of any rank from it.

    Args:
        modules: Every stage of the model, ``{stage: module}``.
        topology: The topology, from the view of any rank.
        tied: Ties; see `GradientSync`.
        main_grad: The accessor of gradients; None for ``.grad``.

    Raises:
        TopologyError: If the modules do not match the topology's stages.
        PlanError: If a tie names a parameter that no stage holds, or parameters that cannot be
            one parameter.
    """
    if sorted(modules) != list(range(topology.num_stages)):
        raise TopologyError(
            f"the topology has stages 0..{topology.num_stages - 1}, but the modules given are "
            f"those of stages {sorted(modules)}: give all of them"
        )
    ties = declared(tied)
    held_by = [topology.at(rank).local_stages for rank in sorted(topology.ranks)]
    # Describe modules once, because the same rank of every pipeline holds the same modules.
    of_stages = {
        stages: describe_rank({s: modules[s] for s in stages}, main_grad, {}, ties)
        for stages in sorted(set(held_by))
    }
    return merge([of_stages[stages] for stages in held_by], topology, ties)


def merge(manifests: Sequence[RankManifest], topology: Topology, ties: Sequence[Tie]) -> Manifest:
    """Returns the model that the manifests of all ranks describe. Pure.

    Raises:
        AgreementError: If ranks disagree. It lists the ranks and their values.
        PlanError: If a tie names a parameter that no stage holds, or parameters that cannot be
            one parameter.
    """
    # All ranks have the same result, or the same error, because each runs this on the same
    # manifests. Settings come first, because other differences often follow from an option.
    by_rank = dict(zip(sorted(topology.ranks), manifests, strict=True))
    for name in dict.fromkeys(name for m in manifests for name, _ in m.settings):
        same(name, {r: dict(m.settings).get(name, "nothing") for r, m in by_rank.items()})
    same("the device type", {r: m.device_type for r, m in by_rank.items() if m.device_type})
    stages: list[tuple[ParameterEntry, ...]] = []
    wrappers: list[tuple[int, str]] = []
    stages_of = {rank: topology.at(rank).local_stages for rank in by_rank}
    for stage in range(topology.num_stages):
        holders = [rank for rank in by_rank if stage in stages_of[rank]]
        copies = {rank: dict(by_rank[rank].stages).get(stage, ()) for rank in holders}
        same(
            f"the parameters of stage {stage}",
            {r: "\n".join(map(str, e)) for r, e in copies.items()},
        )
        wrapped = {rank: dict(by_rank[rank].wrappers).get(stage, "") for rank in holders}
        same(f"the wrapper of stage {stage}", wrapped)
        stages.append(tuple(map(_merged, zip(*copies.values(), strict=True))))
        wrappers += [(stage, kind) for kind in {*wrapped.values()} - {""}]
    shards = {
        rank: held
        for rank, m in by_rank.items()
        if (held := {at: e.shard for at, e in m.entries.items() if e.shard is not None})
    }
    return Manifest(tuple(stages), _find_ties(stages, manifests, ties), tuple(wrappers), shards)


def _merged(copies: Sequence[ParameterEntry]) -> ParameterEntry:
    """Returns the entry of the lowest rank; a DTensor gets the shape of its largest local shard."""
    # The lowest rank that holds a parameter determines its initial values, because replicas are
    # made equal to it before the first step.
    entry = copies[0]
    if entry.layout is None:
        return entry
    # The largest shard determines the shape, because a slot must have the same size on all ranks of
    # a collective, and local shards may differ by a row.
    shapes = [copy.shard.shape for copy in copies if copy.shard is not None]
    shape = tuple(map(max, zip(*shapes, strict=True)))
    row_major = torch.empty(shape, device="meta").stride()
    return replace(entry, shape=shape, stride=row_major, shard=None)


def _find_ties(
    stages: Sequence[Sequence[ParameterEntry]],
    manifests: Sequence[RankManifest],
    ties: Sequence[Tie],
) -> tuple[tuple[Location, ...], ...]:
    """Returns the locations of each tied parameter, with its first name in each stage.

    Raises:
        PlanError: If a tie names a parameter that no stage holds, or parameters that cannot be
            one parameter.
    """
    entries = {
        (stage, name): entry
        for stage, of_stage in enumerate(stages)
        for entry in of_stage
        for name in (entry.name, *entry.aliases)
    }
    by_name: dict[str, list[Location]] = defaultdict(list)
    for location in entries:
        by_name[location[1]].append(location)

    def first_names(locations: Iterable[Location]) -> set[Location]:
        return {(location[0], entries[location].name) for location in locations}

    are_traced = {s for m in manifests for s in m.traced} == set(range(len(stages)))
    claims: list[tuple[Tie, set[Location]]] = []
    # Locations that surely hold their tie's parameter: by identity or bits, not only by name.
    certain: set[Location] = set()
    for index, tie in enumerate(ties):
        sure = {at for m in manifests for i, at in m.held if i == index and at in entries}
        claimed = declared_locations(tie, by_name) | sure
        _refuse_missing(tie, claimed, by_name, are_traced=are_traced)
        claims.append((tie, first_names(claimed)))
        certain |= first_names(claimed if tie.traced else sure)
    for tie in ties if not are_traced else ():
        for name in tie.names if len(tie.names) > 1 else ():
            holders = first_names(by_name.get(name, ()))
            starts = {at: entries[at].constant for at in sorted(holders)}
            _refuse_ambiguous(tie, name, starts, certain)
    # A tie may be declared, or one rank may hold one object at several locations. Unite both kinds,
    # because a parameter that is tied in both ways must have one group.
    linked = [group for m in manifests for group in m.linked]
    united_locations = united([*(locations for _, locations in claims), *linked])
    groups = sorted(tuple(sorted(group)) for group in united_locations)
    for group in groups:
        _check_tie(group, entries)
        _refuse_different_starts(group, entries, certain, claims)
    return tuple(groups)


def _refuse_missing(
    tie: Tie,
    claimed: set[Location],
    by_name: Mapping[str, Sequence[Location]],
    *,
    are_traced: bool,
) -> None:
    """Refuses a tie that names a parameter that no stage holds."""
    missing = [at for at in tie.locations if at not in claimed]
    missing_names = [name for name in tie.names if name not in by_name]
    # A name of the uncut model that no stage has is an error only if the tie has fewer locations
    # than names, because a cut may rename parameters, and a tracer may drop aliases.
    is_complete = are_traced or len(claimed) >= len(tie.names)
    if missing or (missing_names and not (claimed and is_complete)):
        absent = missing_names or [f"{name!r} on stage {stage}" for stage, name in missing]
        raise PlanError(
            f"tie {tie}: no such parameter: {absent}. Names are those of the stages' modules; "
            f"where they differ from the uncut model's, declare the tie as {{stage: name}}, or "
            f"give Pipe.replicated_params if torch's tracer has cut the model"
        )


def _refuse_ambiguous(
    tie: Tie, name: str, starts: Mapping[Location, str | None], certain: set[Location]
) -> None:
    """Refuses a name that several stages have, if their initial values do not differ."""
    unclear = [at for at, constant in starts.items() if constant is not None and at not in certain]
    if unclear and len({stage for stage, _ in starts}) > 1:
        raise PlanError(
            f"tie {tie}: stages {[stage for stage, _ in starts]} all have a parameter {name!r}, "
            f"and it starts constant, so nothing tells which of them is meant. Declare the tie as "
            f"{{stage: name, ...}}"
        )


def _check_tie(group: Sequence[Location], entries: Mapping[Location, ParameterEntry]) -> None:
    if len({stage for stage, _ in group}) < len(group):
        raise PlanError(
            f"tie {list(group)}: one stage holds it as several objects; tie them inside the stage, "
            f"or declare the tie by name on the rank that holds them"
        )
    (first_stage, first_name), first = group[0], entries[group[0]]
    for stage, name in group[1:]:
        entry = entries[stage, name]
        for trait in ("layout", "shape", "dtype", "gradient_dtype", "requires_grad"):
            values = [getattr(e, trait) for e in (entry, first)]
            if values[0] != values[1]:
                if trait == "layout":
                    values = [e.layout or f"{e.shape} whole" for e in (entry, first)]
                raise PlanError(
                    f"{name!r} on stage {stage} is tied to {first_name!r} on stage {first_stage}, "
                    f"but its {trait} is {values[0]} and the other's {values[1]}: make them the "
                    f"same"
                )


def _refuse_different_starts(
    group: Sequence[Location],
    entries: Mapping[Location, ParameterEntry],
    certain: set[Location],
    claims: Sequence[tuple[Tie, set[Location]]],
) -> None:
    """Refuses locations of one tie with different initial values, because one would be lost.

    Different values are allowed if both locations surely hold the parameter, as each rank may use
    its own seed. They are also allowed if the overwritten values are zeros.
    """
    first = entries[group[0]]
    for location in group[1:]:
        other = entries[location]
        starts = {(first.digest, first.constant), (other.digest, other.constant)}
        is_known = (None, None) not in starts
        are_certain = certain.issuperset((group[0], location))
        are_zeros = other.constant is not None and not other.constant.strip("0")
        if len(starts) > 1 and is_known and not are_certain and not are_zeros:
            of_both = (tie for tie, locations in claims if locations & {group[0], location})
            raise PlanError(different_starts(next(of_both, "of one rank"), group[0], location))
