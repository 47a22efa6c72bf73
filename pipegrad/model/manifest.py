"""The agreed model, as plain data: the parameters of each stage, and their ties."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch

from pipegrad.model.dtensor import Layout, Shard
from pipegrad.model.wrappers import DDP
from pipegrad.plugins.handler import ParameterRecord
from pipegrad.topology import Topology

Location = tuple[int, str]
"""A stage, and a parameter's name in that stage."""


@dataclass(frozen=True)
class ParameterEntry:
    """One parameter as one stage of one rank holds it.

    Attributes:
        aliases: Its other names in that stage.
        shape: Shape of the whole tensor. In the agreed model, a DTensor has the shape of its
            largest local shard.
        layout: Layout of a DTensor over ranks; None for other tensors.
        kind: Class name of the module that has it under its first name.
        tied_in_stage: Whether several modules of the stage hold it. A module with several names is
            one module.
        digest: Digest of a sample of its initial bits; None if all elements are equal, or unknown.
        constant: The initial bits of one element, if all elements are equal.
        shard: The part of a DTensor on this rank.
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
    tied_in_stage: bool = False
    digest: str | None = field(default=None, compare=False)
    constant: str | None = field(default=None, compare=False)
    shard: Shard | None = field(default=None, compare=False)

    def __str__(self) -> str:
        trained = "trained" if self.requires_grad else "frozen"
        shape = self.layout or self.shape
        return f"{self.name} {shape} {self.dtype} grad {self.gradient_dtype} {trained}"


@dataclass(frozen=True)
class RankManifest:
    """The description of one rank, for the agreement.

    Attributes:
        stages: Stage -> its parameters, in the order of ``named_parameters``.
        wrappers: Stage -> class name of the wrapper that reduces its gradients, if there is one.
        linked: Groups of locations that are one object on this rank.
        device_type: Device type of the parameters; "" if there are none.
        settings: Name -> value, for options that must be the same on all ranks.
        held: Index of a tie, and a location that surely holds its parameter of the uncut model.
        traced: Stages that torch's tracer has made.
        buffers: Digest of a sample of the bits of each buffer.
    """

    stages: tuple[tuple[int, tuple[ParameterEntry, ...]], ...]
    wrappers: tuple[tuple[int, str], ...]
    linked: tuple[tuple[Location, ...], ...]
    device_type: str
    settings: tuple[tuple[str, str], ...]
    held: tuple[tuple[int, Location], ...] = ()
    traced: tuple[int, ...] = ()
    buffers: tuple[tuple[Location, str], ...] = ()

    @property
    def entries(self) -> dict[Location, ParameterEntry]:
        """The parameters of this rank, under their first names."""
        return {(stage, e.name): e for stage, entries in self.stages for e in entries}


@dataclass(frozen=True)
class Manifest:
    """The model on which all ranks agreed: the parameters of each stage, and their ties.

    Attributes:
        stages: For each stage its parameters, as its lowest rank starts them.
        ties: Groups of locations that are one parameter, ascending, at most one in each stage.
        wrappers: Stage -> class name of the wrapper that reduces its gradients.
        shards: Rank -> its part of each DTensor parameter.
    """

    stages: tuple[tuple[ParameterEntry, ...], ...]
    ties: tuple[tuple[Location, ...], ...]
    wrappers: tuple[tuple[int, str], ...] = ()
    shards: Mapping[int, Mapping[Location, Shard]] = field(default_factory=dict)

    def records(self, topology: Topology) -> tuple[ParameterRecord, ...]:
        """Returns the parameters of ``topology.rank``, one record each, by stage and position."""
        by_key: dict[str, ParameterRecord] = {}
        for stage in topology.local_stages:
            for entry in self.stages[stage]:
                record = self._records[stage, entry.name]
                by_key.setdefault(record.key, record)
        return tuple(by_key.values())

    @property
    def parameters(self) -> tuple[ParameterRecord, ...]:
        """The parameters of all stages, one record each, seen from the lowest holder."""
        return tuple(self._records[locations[0]] for locations in self.locations.values())

    def entries(self, key: str) -> tuple[ParameterEntry, ...]:
        """Returns the entries of the parameter `key`, by stage."""
        return tuple(self._entries[location] for location in self.locations[key])

    def shard(self, rank: int, key: str) -> Shard | None:
        """Returns the part of the parameter `key` on `rank`; None if it is not a DTensor."""
        held = self.shards.get(rank, {})
        return next((held[location] for location in self.locations[key] if location in held), None)

    def is_counted(self, rank: int, key: str) -> bool:
        """True if the part on `rank` counts in a norm; equal parts of a DTensor count once."""
        shard, layout = self.shard(rank, key), self.entries(key)[0].layout
        if shard is None or layout is None:
            return True
        # Along a sharded dimension every part counts, because each rank has another one. Along a
        # replicated dimension all ranks have the same part, and the one at coordinate 0 counts.
        coordinates = zip(shard.coordinate, layout.replicated, strict=True)
        return not any(at for at, replicated in coordinates if replicated)

    @cached_property
    def reduced_by_ddp(self) -> frozenset[int]:
        """Stages whose gradients DistributedDataParallel averages over the data ranks."""
        return frozenset(stage for stage, wrapper in self.wrappers if wrapper == DDP)

    @cached_property
    def _entries(self) -> dict[Location, ParameterEntry]:
        return {(s, e.name): e for s, entries in enumerate(self.stages) for e in entries}

    @cached_property
    def locations(self) -> dict[str, tuple[Location, ...]]:
        """Key -> the locations of that parameter, by stage."""
        tied = {location: tie for tie in self.ties for location in tie}
        groups = [tied.get(location, (location,)) for location in self._entries]
        # The key comes from the lowest holder, because all holders of a tie must have one key.
        return {f"{group[0][0]}.{group[0][1]}": group for group in groups}

    @cached_property
    def _records(self) -> dict[Location, ParameterRecord]:
        positions = {
            (s, e.name): i for s, entries in enumerate(self.stages) for i, e in enumerate(entries)
        }
        records: dict[Location, ParameterRecord] = {}
        for key, locations in self.locations.items():
            for location in locations:
                entry = self._entries[location]
                records[location] = ParameterRecord(
                    key=key,
                    name=entry.name,
                    stage=location[0],
                    shape=entry.shape,
                    dtype=entry.dtype,
                    requires_grad=entry.requires_grad,
                    holders=tuple(stage for stage, _ in locations),
                    position=positions[locations[0]],
                    kind=self._entries[locations[0]].kind,
                    aliases=entry.aliases,
                    tied_in_stage=any(e.tied_in_stage for e in self.entries(key)),
                )
        return records
