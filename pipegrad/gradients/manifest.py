"""Agree: what each rank says of itself, and the one model all ranks make of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.fx import GraphModule
from torch.nn.parallel import DistributedDataParallel

from pipegrad.errors import AgreementError, PlanError, TopologyError
from pipegrad.gradients.accessor import GradAttribute, GradientAccessor
from pipegrad.gradients.shards import Layout, Shard, largest, layout_of, shard_of
from pipegrad.gradients.shared import (
    Shared,
    Tie,
    declared,
    different_starts,
    held,
    named,
    plain_name,
    united,
    unwrapped,
)
from pipegrad.gradients.starts import Place, Start, fingerprint, is_zero
from pipegrad.handler import ParameterRecord

if TYPE_CHECKING:
    from pipegrad.topology import Topology


@dataclass(frozen=True)
class ParameterEntry:
    """One parameter as one stage holds it; `aliases` are its other names in that stage.

    Where it lies over ranks, `layout` says how; the shape is that of the largest local shard then,
    and before the ranks have agreed on it that of the whole.
    """

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    gradient_dtype: torch.dtype
    requires_grad: bool
    layout: Layout | None = None
    kind: str = field(default="", compare=False)

    def __str__(self) -> str:
        trained = "trained" if self.requires_grad else "frozen"
        shape = self.layout or self.shape
        return f"{self.name} {shape} {self.dtype} grad {self.gradient_dtype} {trained}"


@dataclass(frozen=True)
class RankManifest:
    """What one rank brings to the agreement. Everything but the fingerprints must match somebody.

    Attributes:
        stages: Stage -> its parameters, in the order of ``named_parameters``.
        wrappers: Stage -> class name of what reduces its gradients already, where there is one.
        linked: Places that are one object on this rank.
        device_type: Where the parameters live; "" without any.
        fingerprints: Digest of a sample of the bits of each parameter that is not constant.
        settings: What every rank must say alike, by name.
        shards: What this rank has of each parameter that lies over ranks.
        constants: The bits of each parameter that is constant.
        held: Index of a tie, and a place that is known to be its parameter in the uncut model.
        traced: Stages that torch's tracer has made.
        buffers: Digest of a sample of the bits of each buffer.
    """

    stages: tuple[tuple[int, tuple[ParameterEntry, ...]], ...]
    wrappers: tuple[tuple[int, str], ...]
    linked: tuple[tuple[Place, ...], ...]
    device_type: str
    fingerprints: tuple[tuple[Place, str], ...]
    settings: tuple[tuple[str, str], ...]
    shards: tuple[tuple[Place, Shard], ...] = ()
    constants: tuple[tuple[Place, str], ...] = ()
    held: tuple[tuple[int, Place], ...] = ()
    traced: tuple[int, ...] = ()
    buffers: tuple[tuple[Place, str], ...] = ()


def describe_rank(
    modules: Mapping[int, nn.Module],
    accessor: GradientAccessor,
    settings: Mapping[str, object],
    ties: Sequence[Tie] = (),
) -> RankManifest:
    """Returns this rank's manifest. Reads a sample of every parameter, communicates nothing.

    Raises:
        PlanError: If parameters are on several devices.
    """
    devices = sorted({str(p.device) for module in modules.values() for p in module.parameters()})
    if len(devices) > 1:
        raise PlanError(f"parameters of one rank are on several devices, {devices}: choose one")
    wrappers = {stage: kind for stage in sorted(modules) if (kind := _wrapper(modules[stage]))}
    entries: dict[Place, ParameterEntry] = {}
    objects: dict[int, list[Place]] = {}
    fingerprints: list[tuple[Place, str]] = []
    constants: list[tuple[Place, str]] = []
    shards: list[tuple[Place, Shard]] = []
    for stage in sorted(modules):
        seen: dict[int, str] = {}
        for place, full_name, parameter in named({stage: modules[stage]}):
            if id(parameter) in seen:
                first = entries[stage, seen[id(parameter)]]
                aliases = (*first.aliases, place[1])
                entries[stage, first.name] = replace(first, aliases=aliases)
                continue
            seen[id(parameter)] = place[1]
            owner = unwrapped(modules[stage]).get_submodule(full_name.rpartition(".")[0])
            entries[place] = replace(
                _entry(place[1], parameter, accessor), kind=type(owner).__name__
            )
            objects.setdefault(id(parameter), []).append(place)
            if (shard := shard_of(parameter)) is not None:
                shards.append((place, shard))
            # Reading a parameter of FSDP1 would communicate; the plan refuses its stage.
            is_flat = wrappers.get(stage) == FullyShardedDataParallel.__name__
            varying, constant = (None, None) if is_flat else fingerprint(parameter)
            if varying is not None:
                fingerprints.append((place, varying))
            if constant is not None:
                constants.append((place, constant))
    return RankManifest(
        stages=tuple(
            (stage, tuple(e for (at, _), e in entries.items() if at == stage))
            for stage in sorted(modules)
        ),
        wrappers=tuple(wrappers.items()),
        linked=tuple(tuple(places) for places in objects.values() if len(places) > 1),
        device_type=torch.device(devices[0]).type if devices else "",
        fingerprints=tuple(fingerprints),
        settings=tuple((name, str(value)) for name, value in settings.items()),
        shards=tuple(shards),
        constants=tuple(constants),
        held=tuple((i, at) for i, places in enumerate(held(modules, ties)) for at in places),
        traced=tuple(s for s in sorted(modules) if isinstance(modules[s], GraphModule)),
        buffers=tuple(
            ((stage, plain_name(name)), digest)
            for stage in sorted(modules)
            for name, buffer in unwrapped(modules[stage]).named_buffers()
            if (digest := "".join(filter(None, fingerprint(buffer))))
        ),
    )


def _entry(name: str, parameter: nn.Parameter, accessor: GradientAccessor) -> ParameterEntry:
    return ParameterEntry(
        name=name,
        aliases=(),
        shape=tuple(parameter.shape),
        stride=tuple(parameter.stride()),
        dtype=parameter.dtype,
        gradient_dtype=accessor.dtype(parameter),
        requires_grad=parameter.requires_grad,
        layout=layout_of(parameter),
    )


def _wrapper(stage: nn.Module) -> str:
    """Returns the class name of the first wrapper of a stage that reduces by itself."""
    for module in stage.modules():
        for kind in (DistributedDataParallel, FullyShardedDataParallel, FSDPModule):
            if isinstance(module, kind):
                return kind.__name__
    return ""


@dataclass(frozen=True)
class Manifest:
    """The model all ranks agreed on: every stage's parameters, and which are one parameter.

    Attributes:
        stages: For each stage its parameters.
        ties: Places that are one parameter, ascending, at most one a stage.
        wrappers: Stage -> class name of what reduces its gradients already.
        shards: Rank -> what it has of each parameter that lies over ranks.
    """

    stages: tuple[tuple[ParameterEntry, ...], ...]
    ties: tuple[tuple[Place, ...], ...]
    wrappers: tuple[tuple[int, str], ...] = ()
    shards: tuple[tuple[int, tuple[tuple[Place, Shard], ...]], ...] = ()

    def records(self, topology: Topology) -> tuple[ParameterRecord, ...]:
        """Returns what ``topology.rank`` holds: one record a parameter, by stage and position."""
        found: dict[str, ParameterRecord] = {}
        for stage in topology.local_stages:
            for entry in self.stages[stage]:
                record = self._records[stage, entry.name]
                found.setdefault(record.key, record)
        return tuple(found.values())

    @property
    def parameters(self) -> tuple[ParameterRecord, ...]:
        """One record a parameter, of all stages, seen from its lowest holder."""
        return tuple({r.key: r for r in reversed(self._records.values())}.values())[::-1]

    def places(self, key: str) -> tuple[Place, ...]:
        """Returns where the parameter `key` lives, by stage."""
        return self._places[key]

    def entries(self, key: str) -> tuple[ParameterEntry, ...]:
        """Returns the entries of the parameter `key`, by stage."""
        return tuple(self._entries[place] for place in self._places[key])

    def shard(self, rank: int, key: str) -> Shard | None:
        """Returns what `rank` has of the parameter `key`; None if it does not lie over ranks."""
        held = self._shards.get(rank, {})
        return next((held[place] for place in self._places[key] if place in held), None)

    def is_counted(self, rank: int, key: str) -> bool:
        """Whether `rank` is the one whose part counts, of those that hold the same."""
        shard, layout = self.shard(rank, key), self.entries(key)[0].layout
        return shard is None or layout is None or shard.is_counted(layout)

    @cached_property
    def reduced_by_ddp(self) -> frozenset[int]:
        """Stages whose gradients DistributedDataParallel averages over the data ranks."""
        name = DistributedDataParallel.__name__
        return frozenset(stage for stage, wrapper in self.wrappers if wrapper == name)

    @cached_property
    def _shards(self) -> dict[int, dict[Place, Shard]]:
        return {rank: dict(shards) for rank, shards in self.shards}

    @cached_property
    def _entries(self) -> dict[Place, ParameterEntry]:
        return {(s, e.name): e for s, entries in enumerate(self.stages) for e in entries}

    @cached_property
    def _places(self) -> dict[str, tuple[Place, ...]]:
        tied = {place: tie for tie in self.ties for place in tie}
        return {r.key: tied.get(place, (place,)) for place, r in self._records.items()}

    @cached_property
    def _records(self) -> dict[Place, ParameterRecord]:
        tied = {place: tie for tie in self.ties for place in tie}
        position = {
            (s, e.name): i for s, entries in enumerate(self.stages) for i, e in enumerate(entries)
        }
        records: dict[Place, ParameterRecord] = {}
        for place, entry in self._entries.items():
            homes = tied.get(place, (place,))
            records[place] = ParameterRecord(
                key=f"{homes[0][0]}.{homes[0][1]}",
                name=entry.name,
                stage=place[0],
                shape=entry.shape,
                dtype=entry.dtype,
                requires_grad=entry.requires_grad,
                holders=tuple(stage for stage, _ in homes),
                position=position[homes[0]],
            )
        return records


def merge(manifests: Sequence[RankManifest], topology: Topology, ties: Sequence[Tie]) -> Manifest:
    """Returns the one model that the ranks' manifests describe. Pure.

    Args:
        manifests: One a rank of the topology, by ascending rank.
        topology: From any rank's point of view.
        ties: The declarations, the same on all ranks.

    Raises:
        AgreementError: If ranks disagree; names what, and who says which.
        PlanError: If a tie names what no stage holds, or parameters that cannot be one.
    """
    by_rank = dict(zip(sorted(topology.ranks), manifests, strict=True))
    names = dict.fromkeys(name for m in manifests for name, _ in m.settings)
    for name in names:
        same(name, {r: dict(m.settings).get(name, "nothing") for r, m in by_rank.items()})
    same("the device type", {r: m.device_type for r, m in by_rank.items() if m.device_type})
    stages: list[tuple[ParameterEntry, ...]] = []
    wrappers: list[tuple[int, str]] = []
    for stage in range(topology.num_stages):
        holders = [r for r in by_rank if stage in topology.at(r).local_stages]
        said = {r: dict(by_rank[r].stages).get(stage, ()) for r in holders}
        same(f"the parameters of stage {stage}", {r: _lines(e) for r, e in said.items()})
        wrapped = {r: dict(by_rank[r].wrappers).get(stage, "") for r in holders}
        same(f"the wrapper of stage {stage}", wrapped)
        stages.append(_sharded(stage, said[holders[0]], [by_rank[r] for r in holders]))
        wrappers += [(stage, wrapped[holders[0]])] if wrapped[holders[0]] else []
    linked = [group for m in manifests for group in m.linked]
    claims = Claims(stages, manifests, ties)
    groups = [tuple(sorted(group)) for group in united([*claims.places, *linked])]
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
    """Returns a stage's entries, those that lie over ranks with their largest local shard."""
    if not any(entry.layout for entry in entries):
        return entries
    shards = [dict(manifest.shards) for manifest in holders]
    found: list[ParameterEntry] = []
    for entry in entries:
        if entry.layout is None:
            found.append(entry)
            continue
        shape = largest(held[stage, entry.name] for held in shards)
        row_major = tuple(torch.empty(shape, device="meta").stride())
        found.append(replace(entry, shape=shape, stride=row_major))
    return tuple(found)


def make_manifest(
    modules: Mapping[int, nn.Module],
    topology: Topology,
    *,
    shared: Shared = (),
    accessor: GradientAccessor | None = None,
) -> Manifest:
    """Returns the model that the ranks of a job would agree on, from all its stages at hand.

    Offline: needs no process group, and the stages may be on the meta device. `make_plan` makes of
    it the plan of any rank.

    Args:
        modules: Every stage of the model, ``{stage: module}``.
        topology: From any rank's point of view.
        shared: As `GradientSync` takes it.
        accessor: Where gradients live; ``parameter.grad`` by default.

    Raises:
        TopologyError: If the modules are not those of the topology's stages.
        PlanError: If a tie names what no stage holds, or parameters that cannot be one.
    """
    if sorted(modules) != list(range(topology.num_stages)):
        raise TopologyError(
            f"the topology has stages 0..{topology.num_stages - 1}, but the modules given are "
            f"those of stages {sorted(modules)}: give all of them"
        )
    ties = declared(shared)
    manifests = []
    for rank in sorted(topology.ranks):
        local = {stage: modules[stage] for stage in topology.at(rank).local_stages}
        manifests.append(describe_rank(local, accessor or GradAttribute(), {}, ties))
    return merge(manifests, topology, ties)


def starts_of(manifests: Sequence[RankManifest]) -> dict[Place, Start]:
    """Returns how each place starts, as its lowest rank says it."""
    found: dict[Place, Start] = {}
    for manifest in manifests:
        digests = dict(manifest.fingerprints)
        for stage, entries in manifest.stages:
            for e in entries:
                start = Start(e.kind, e.shape, e.requires_grad, digests.get((stage, e.name)))
                found.setdefault((stage, e.name), start)
    return found


def _lines(entries: Sequence[ParameterEntry]) -> str:
    return "; ".join(map(str, entries)) or "nothing"


def same(what: str, said: Mapping[int, str]) -> None:
    """Does nothing if all ranks say the same.

    Raises:
        AgreementError: If they do not; lists who says what.
    """
    by_value: dict[str, list[int]] = {}
    for rank, value in said.items():
        by_value.setdefault(value, []).append(rank)
    if len(by_value) > 1:
        views = "\n".join(f"  ranks {ranks}: {value}" for value, ranks in by_value.items())
        raise AgreementError(f"ranks disagree on {what}; make them the same:\n{views}")


class Claims:
    """Which places each declared tie means, and whether these may be one parameter.

    Args:
        stages: The agreed parameters of each stage.
        manifests: Of all ranks, ascending.
        ties: The declarations.

    Attributes:
        places: For each tie the places that it means, by their first names.

    Raises:
        PlanError: If a tie names what no stage holds.
    """

    def __init__(
        self,
        stages: Sequence[Sequence[ParameterEntry]],
        manifests: Sequence[RankManifest],
        ties: Sequence[Tie],
    ) -> None:
        self._homes: dict[Place, Place] = {}  # every place, aliases too -> its first name
        self._by_name: dict[str, list[Place]] = {}
        for stage, entries in enumerate(stages):
            for entry in entries:
                for name in (entry.name, *entry.aliases):
                    self._homes[stage, name] = (stage, entry.name)
                    self._by_name.setdefault(name, []).append((stage, name))
        held: dict[int, set[Place]] = {}
        for manifest in manifests:
            for index, place in manifest.held:
                held.setdefault(index, set()).add(place)
        self._all_traced = {s for m in manifests for s in m.traced} == set(range(len(stages)))
        self._starts: dict[Place, tuple[str | None, str | None]] = {}
        for manifest in manifests:
            for place, digest in manifest.fingerprints:
                self._starts.setdefault(place, (digest, None))
            for place, bits in manifest.constants:
                self._starts.setdefault(place, (None, bits))
        self._tie_of: dict[Place, Tie] = {}
        self._known: set[Place] = set()  # to be the parameter, not by its name alone
        self.places: list[set[Place]] = []
        for index, tie in enumerate(ties):
            self.places.append(self._claimed(tie, held.get(index, set())))

    def _claimed(self, tie: Tie, held: set[Place]) -> set[Place]:
        claimed = {*held, *(place for place in tie.places if place in self._homes)}
        claimed.update(place for name in tie.names for place in self._by_name.get(name, ()))
        missing = [p for p in tie.places if p not in self._homes]
        missing_names = [n for n in tie.names if n not in self._by_name]
        is_found = self._all_traced or len(claimed) >= len(tie.names)
        if missing or (missing_names and not (claimed and is_found)):
            what = missing_names or [f"{name!r} on stage {stage}" for stage, name in missing]
            raise PlanError(
                f"tie {tie}: no such parameter: {what}. Names are those of the stages' modules; "
                f"where they differ from the uncut model's, declare the tie as {{stage: name}}, or "
                f"give Pipe.replicated_params if torch's tracer has cut the model"
            )
        known = claimed if tie.traced else held
        homes = {self._homes[place] for place in claimed}
        self._known.update(self._homes[place] for place in known)
        self._tie_of.update(dict.fromkeys(homes, tie))
        self._refuse_ambiguous(tie)
        return homes

    def _refuse_ambiguous(self, tie: Tie) -> None:
        """Refuses a name that several stages have, if no bits tell which of them is meant."""
        for name in tie.names if len(tie.names) > 1 and not self._all_traced else ():
            homes = sorted({self._homes[place] for place in self._by_name.get(name, ())})
            unclear = [
                home
                for home in homes
                if home not in self._known and self._starts.get(home, ("", None))[1] is not None
            ]
            if len({stage for stage, _ in homes}) > 1 and unclear:
                raise PlanError(
                    f"tie {tie}: stages {[stage for stage, _ in homes]} all have a parameter "
                    f"{name!r}, and it starts constant, so nothing tells which of them is meant. "
                    f"Declare the tie as {{stage: name, ...}}"
                )

    def refuse_different_starts(self, group: Sequence[Place]) -> None:
        """Refuses places of one tie that start with different bits, which one would overwrite.

        A seed for each rank explains the difference where these places are known to be the uncut
        model's parameter. Zeros are nothing to lose.

        Raises:
            PlanError: Names two of them.
        """
        first, *others = group
        for place in others:
            one, other = self._starts.get(first), self._starts.get(place)
            are_known = first in self._known and place in self._known
            if one is None or other is None or one == other or are_known or is_zero(other[1]):
                continue
            tie = self._tie_of.get(place) or self._tie_of.get(first) or "of one rank"
            raise PlanError(different_starts(tie, first, place))


def _check_tie(group: Sequence[Place], stages: Sequence[Sequence[ParameterEntry]]) -> None:
    if len({stage for stage, _ in group}) < len(group):
        raise PlanError(
            f"tie {list(group)}: one stage holds it as several objects; tie them inside the stage, "
            f"or declare the tie by name on the rank that holds them"
        )
    entries = [next(e for e in stages[s] if e.name == name) for s, name in group]
    for (stage, name), entry in zip(group[1:], entries[1:], strict=True):
        traits = ("layout", "shape", "dtype", "gradient_dtype", "requires_grad")
        for trait in traits:
            here, there = getattr(entry, trait), getattr(entries[0], trait)
            if trait == "layout" and here != there:
                here, there = (e.layout or f"{e.shape} whole" for e in (entry, entries[0]))
            if here != there:
                raise PlanError(
                    f"{name!r} on stage {stage} is tied to {group[0][1]!r} on stage {group[0][0]}, "
                    f"but its {trait} is {here} and the other's {there}: make them the same"
                )


def check_arguments(
    modules: Mapping[int, nn.Module],
    topology: Topology,
    *,
    bucket_bytes: int,
    lanes: int,
    stage_ticks: Sequence[int] | None = None,
    shared_ticks: Sequence[int] | None = None,
) -> None:
    """Refuses what this rank alone can see to be wrong."""
    if sorted(modules) != list(topology.local_stages):
        raise TopologyError(
            f"rank {topology.rank} was given modules for stages {sorted(modules)}, but the "
            f"topology puts stages {list(topology.local_stages)} on it"
        )
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
    if bucket_bytes < 0 or lanes < 1:
        raise PlanError(
            f"bucket_bytes={bucket_bytes} must be at least 0 and lanes={lanes} at least 1"
        )
    for name, ticks in (("stage_ticks", stage_ticks), ("shared_ticks", shared_ticks)):
        if ticks is not None and len(ticks) != topology.num_stages:
            raise PlanError(f"{name} has {len(ticks)} entries for {topology.num_stages} stages")


def device_of(modules: Mapping[int, nn.Module], manifests: Sequence[RankManifest]) -> torch.device:
    """Returns where this rank's parameters live; without any, a device of the others' type."""
    for module in modules.values():
        for parameter in module.parameters():
            return parameter.device
    kind = next((m.device_type for m in manifests if m.device_type), "cpu")
    return torch.device(kind)
