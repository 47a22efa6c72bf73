"""The agreed model: every stage's parameters, and which of them are one. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch

from pipegrad.model.dtensor import Layout, Shard
from pipegrad.model.suspects import Location
from pipegrad.model.wrappers import DDP
from pipegrad.plugins.handler import ParameterRecord
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
    linked: tuple[tuple[Location, ...], ...]
    device_type: str
    fingerprints: tuple[tuple[Location, str], ...]
    settings: tuple[tuple[str, str], ...]
    shards: tuple[tuple[Location, Shard], ...] = ()
    constants: tuple[tuple[Location, str], ...] = ()
    held: tuple[tuple[int, Location], ...] = ()
    traced: tuple[int, ...] = ()
    buffers: tuple[tuple[Location, str], ...] = ()


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
    ties: tuple[tuple[Location, ...], ...]
    wrappers: tuple[tuple[int, str], ...] = ()
    shards: tuple[tuple[int, tuple[tuple[Location, Shard], ...]], ...] = ()

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

    def locations(self, key: str) -> tuple[Location, ...]:
        """Returns where the parameter `key` lives, by stage."""
        return self._places[key]

    def entries(self, key: str) -> tuple[ParameterEntry, ...]:
        """Returns the entries of the parameter `key`, by stage."""
        return tuple(self._entries[location] for location in self._places[key])

    def shard(self, rank: int, key: str) -> Shard | None:
        """Returns what `rank` has of the parameter `key`; None if it does not lie over ranks."""
        held = self._shards.get(rank, {})
        return next((held[location] for location in self._places[key] if location in held), None)

    def is_counted(self, rank: int, key: str) -> bool:
        """Whether `rank` is the one whose part counts, of those that hold the same."""
        shard, layout = self.shard(rank, key), self.entries(key)[0].layout
        return shard is None or layout is None or shard.is_counted(layout)

    @cached_property
    def reduced_by_ddp(self) -> frozenset[int]:
        """Stages whose gradients DistributedDataParallel averages over the data ranks."""
        return frozenset(stage for stage, wrapper in self.wrappers if wrapper == DDP)

    @cached_property
    def _shards(self) -> dict[int, dict[Location, Shard]]:
        return {rank: dict(shards) for rank, shards in self.shards}

    @cached_property
    def _entries(self) -> dict[Location, ParameterEntry]:
        return {(s, e.name): e for s, entries in enumerate(self.stages) for e in entries}

    @cached_property
    def _places(self) -> dict[str, tuple[Location, ...]]:
        tied = {location: tie for tie in self.ties for location in tie}
        return {r.key: tied.get(location, (location,)) for location, r in self._records.items()}

    @cached_property
    def _records(self) -> dict[Location, ParameterRecord]:
        tied = {location: tie for tie in self.ties for location in tie}
        position = {
            (s, e.name): i for s, entries in enumerate(self.stages) for i, e in enumerate(entries)
        }
        records: dict[Location, ParameterRecord] = {}
        for location, entry in self._entries.items():
            homes = tied.get(location, (location,))
            records[location] = ParameterRecord(
                key=f"{homes[0][0]}.{homes[0][1]}",
                name=entry.name,
                stage=location[0],
                shape=entry.shape,
                dtype=entry.dtype,
                requires_grad=entry.requires_grad,
                holders=tuple(stage for stage, _ in homes),
                position=position[homes[0]],
            )
        return records
