"""What each rank holds, and the agreed model that is made of it; or which ranks disagree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.fx import GraphModule

from pipegrad.comm.agreement import same
from pipegrad.errors import PlanError, TopologyError
from pipegrad.model.dtensor import Shard, largest, layout_of, shard_of
from pipegrad.model.main_grad import MainGrad, gradient_dtype
from pipegrad.model.manifest import Manifest, ParameterEntry, RankManifest
from pipegrad.model.suspects import Location, Start, fingerprint, is_zero
from pipegrad.model.ties import (
    Tie,
    Tied,
    declared,
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
        TopologyError: If the stages are not those of this rank, or the topology lacks ranks.
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
    seen = _Seen()
    for stage in sorted(modules):
        _see_stage(seen, stage, modules[stage], main_grad, is_flat=wrappers.get(stage) == FSDP1)
    return RankManifest(
        stages=tuple(
            (stage, tuple(e for (at, _), e in seen.entries.items() if at == stage))
            for stage in sorted(modules)
        ),
        wrappers=tuple(wrappers.items()),
        linked=tuple(tuple(locations) for locations in seen.objects.values() if len(locations) > 1),
        device_type=torch.device(devices[0]).type if devices else "",
        fingerprints=tuple(seen.fingerprints),
        settings=tuple((name, str(value)) for name, value in settings.items()),
        shards=tuple(seen.shards),
        constants=tuple(seen.constants),
        held=tuple((i, at) for i, locations in enumerate(held(modules, ties)) for at in locations),
        traced=tuple(s for s in sorted(modules) if isinstance(modules[s], GraphModule)),
        buffers=tuple(
            ((stage, plain_name(name)), digest)
            for stage in sorted(modules)
            for name, buffer in unwrapped(modules[stage]).named_buffers()
            if (digest := "".join(filter(None, fingerprint(buffer))))
        ),
    )


@dataclass
class _Seen:
    """The parameters of this rank, collected stage by stage.

    Attributes:
        entries: By location.
        objects: Locations of each parameter object, by its id.
        fingerprints: Digests of values that vary.
        constants: Values of parameters that are constant.
        shards: Local parts of DTensors.
    """

    entries: dict[Location, ParameterEntry] = field(default_factory=dict)
    objects: dict[int, list[Location]] = field(default_factory=dict)
    fingerprints: list[tuple[Location, str]] = field(default_factory=list)
    constants: list[tuple[Location, str]] = field(default_factory=list)
    shards: list[tuple[Location, Shard]] = field(default_factory=list)


def _see_stage(
    seen: _Seen, stage: int, module: nn.Module, main_grad: MainGrad | None, *, is_flat: bool
) -> None:
    """Adds the parameters of one stage.

    Args:
        seen: Gets them.
        stage: The number of the stage.
        module: The stage.
        main_grad: Where gradients live; None for ``.grad``.
        is_flat: Whether FSDP1 has wrapped it.
    """
    names: dict[int, str] = {}
    owners: dict[int, nn.Module] = {}  # the module of the first name
    for location, full_name, parameter in named({stage: module}):
        owner = unwrapped(module).get_submodule(full_name.rpartition(".")[0])
        # A parameter that a stage holds under several names is one entry with aliases.
        if id(parameter) in names:
            first = seen.entries[stage, names[id(parameter)]]
            seen.entries[stage, first.name] = replace(
                first,
                aliases=(*first.aliases, location[1]),
                tied_in_stage=first.tied_in_stage or owner is not owners[id(parameter)],
            )
            continue
        names[id(parameter)], owners[id(parameter)] = location[1], owner
        entry = _entry(location[1], parameter, main_grad)
        seen.entries[location] = replace(entry, kind=type(owner).__name__)
        seen.objects.setdefault(id(parameter), []).append(location)
        if (shard := shard_of(parameter)) is not None:
            seen.shards.append((location, shard))
        # To read a parameter of FSDP1 would need a collective. The plan refuses such a stage later,
        # on all ranks.
        if is_flat:
            continue
        # Initial values are compared by digests of a sample. So manifests stay small, although
        # every rank receives those of all ranks.
        varying, constant = fingerprint(parameter)
        if varying is not None:
            seen.fingerprints.append((location, varying))
        if constant is not None:
            seen.constants.append((location, constant))


def _entry(name: str, parameter: nn.Parameter, main_grad: MainGrad | None) -> ParameterEntry:
    return ParameterEntry(
        name=name,
        aliases=(),
        shape=tuple(parameter.shape),
        stride=tuple(parameter.stride()),
        dtype=parameter.dtype,
        gradient_dtype=gradient_dtype(parameter, main_grad),
        requires_grad=parameter.requires_grad,
        layout=layout_of(parameter),
    )


def device_of(modules: Mapping[int, nn.Module], manifests: Sequence[RankManifest]) -> torch.device:
    """Returns the device of this rank's parameters; without parameters, that of other ranks."""
    for module in modules.values():
        for parameter in module.parameters():
            return parameter.device
    kind = next((m.device_type for m in manifests if m.device_type), "cpu")
    return torch.device(kind)


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
        topology: Of any rank.
        tied: As `GradientSync` takes it.
        main_grad: Where gradients live; None for ``.grad``.

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
        described[stages] = describe_rank(local, main_grad, {}, ties)
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
    return "\n".join(map(str, entries))


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


class Claims:
    """The locations of each declared tie, and the check that they may be one parameter.

    Args:
        stages: The agreed parameters of each stage.
        manifests: Of all ranks, ascending.
        ties: The declarations.

    Attributes:
        locations: For each tie, the locations of its parameter, with the first name in each stage.

    Raises:
        PlanError: If a tie names a parameter that no stage holds.
    """

    def __init__(
        self,
        stages: Sequence[Sequence[ParameterEntry]],
        manifests: Sequence[RankManifest],
        ties: Sequence[Tie],
    ) -> None:
        self._homes: dict[Location, Location] = {}  # location under any name -> under its first
        self._by_name: dict[str, list[Location]] = {}
        for stage, entries in enumerate(stages):
            for entry in entries:
                for name in (entry.name, *entry.aliases):
                    self._homes[stage, name] = (stage, entry.name)
                    self._by_name.setdefault(name, []).append((stage, name))
        held: dict[int, set[Location]] = {}
        for manifest in manifests:
            for index, location in manifest.held:
                held.setdefault(index, set()).add(location)
        self._all_traced = {s for m in manifests for s in m.traced} == set(range(len(stages)))
        # The lowest rank that holds a location decides how it starts: replicas are made equal to
        # it before the first step.
        # The lowest rank that holds a location decides how it starts: replicas are made equal to
        # it before the first step.
        self._starts: dict[Location, tuple[str | None, str | None]] = {}
        for manifest in manifests:
            for location, digest in manifest.fingerprints:
                self._starts.setdefault(location, (digest, None))
            for location, bits in manifest.constants:
                self._starts.setdefault(location, (None, bits))
        self._tie_of: dict[Location, Tie] = {}
        # Locations that surely hold their tie's parameter: by identity or bits, not only by name.
        self._certain: set[Location] = set()
        self.locations: list[set[Location]] = []
        for index, tie in enumerate(ties):
            self.locations.append(self._claimed(tie, held.get(index, set())))

    def _claimed(self, tie: Tie, held: set[Location]) -> set[Location]:
        claimed = {*held, *(location for location in tie.locations if location in self._homes)}
        claimed.update(location for name in tie.names for location in self._by_name.get(name, ()))
        missing = [p for p in tie.locations if p not in self._homes]
        missing_names = [n for n in tie.names if n not in self._by_name]
        # A cut may rename parameters, and a tracer may drop aliases. So a name of the uncut model
        # that no stage has is an error only if the tie has fewer locations than names.
        is_complete = self._all_traced or len(claimed) >= len(tie.names)
        if missing or (missing_names and not (claimed and is_complete)):
            absent = missing_names or [f"{name!r} on stage {stage}" for stage, name in missing]
            raise PlanError(
                f"tie {tie}: no such parameter: {absent}. Names are those of the stages' modules; "
                f"where they differ from the uncut model's, declare the tie as {{stage: name}}, or "
                f"give Pipe.replicated_params if torch's tracer has cut the model"
            )
        certain = claimed if tie.traced else held
        homes = {self._homes[location] for location in claimed}
        self._certain.update(self._homes[location] for location in certain)
        self._tie_of.update(dict.fromkeys(homes, tie))
        self._refuse_ambiguous(tie)
        return homes

    def _refuse_ambiguous(self, tie: Tie) -> None:
        """Refuses a name that several stages have, if their initial values do not differ."""
        for name in tie.names if len(tie.names) > 1 and not self._all_traced else ():
            homes = sorted({self._homes[location] for location in self._by_name.get(name, ())})
            unclear = [
                home
                for home in homes
                if home not in self._certain and self._starts.get(home, ("", None))[1] is not None
            ]
            if len({stage for stage, _ in homes}) > 1 and unclear:
                raise PlanError(
                    f"tie {tie}: stages {[stage for stage, _ in homes]} all have a parameter "
                    f"{name!r}, and it starts constant, so nothing tells which of them is meant. "
                    f"Declare the tie as {{stage: name, ...}}"
                )

    def refuse_different_starts(self, group: Sequence[Location]) -> None:
        """Refuses locations of one tie that start with different values: one would be overwritten.

        Different values are allowed if both locations surely hold the parameter, as each rank may
        use its own seed. They are also allowed if the overwritten values are zeros.

        Raises:
            PlanError: If they differ. It names two locations.
        """
        first, *others = group
        for location in others:
            start, other = self._starts.get(first), self._starts.get(location)
            are_certain = first in self._certain and location in self._certain
            if start is None or other is None or start == other or are_certain or is_zero(other[1]):
                continue
            tie = self._tie_of.get(location) or self._tie_of.get(first) or "of one rank"
            raise PlanError(different_starts(tie, first, location))
