"""The description of one rank's stages, made before anything is sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.fx import GraphModule

from pipegrad.errors import PlanError, TopologyError
from pipegrad.model.dtensor import Shard, layout_of, shard_of
from pipegrad.model.gradient_storage import GradientAccessor
from pipegrad.model.manifest import ParameterEntry, RankManifest
from pipegrad.model.suspects import Location, fingerprint
from pipegrad.model.ties import Tie, held, named, plain_name
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
    accessor: GradientAccessor,
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
        _see_stage(seen, stage, modules[stage], accessor, is_flat=wrappers.get(stage) == FSDP1)
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
    seen: _Seen, stage: int, module: nn.Module, accessor: GradientAccessor, *, is_flat: bool
) -> None:
    """Adds the parameters of one stage.

    Args:
        seen: Gets them.
        stage: The number of the stage.
        module: The stage.
        accessor: Where gradients live.
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
        entry = _entry(location[1], parameter, accessor)
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


def device_of(modules: Mapping[int, nn.Module], manifests: Sequence[RankManifest]) -> torch.device:
    """Returns the device of this rank's parameters; without parameters, that of other ranks."""
    for module in modules.values():
        for parameter in module.parameters():
            return parameter.device
    kind = next((m.device_type for m in manifests if m.device_type), "cpu")
    return torch.device(kind)
