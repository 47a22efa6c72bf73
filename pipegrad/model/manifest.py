"""The agreed model, as plain data: the parameters of each stage, and their ties."""

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

    `tied_in_stage` is True if several modules of the stage hold it. A module with several names is
    one module.

    A DTensor has a `layout`. Its shape here is that of the whole tensor, and after the agreement
    that of the largest local shard.
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
        device_type: Of the parameters; "" if there are none.
        fingerprints: Digest of a sample of the bits of each parameter that is not constant.
        settings: Name -> value, for options that must be the same on all ranks.
        shards: This rank's part of each DTensor parameter.
        constants: The bits of each parameter that is constant.
        held: Index of a tie, and a location that surely holds its parameter of the uncut model.
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
    """The model on which all ranks agreed: the parameters of each stage, and their ties.

    Attributes:
        stages: For each stage its parameters.
        ties: Groups of locations that are one parameter, ascending, at most one in each stage.
        wrappers: Stage -> class name of the wrapper that reduces its gradients.
        shards: Rank -> its part of each DTensor parameter.
    """

    stages: tuple[tuple[ParameterEntry, ...], ...]
    ties: tuple[tuple[Location, ...], ...]
    wrappers: tuple[tuple[int, str], ...] = ()
    shards: tuple[tuple[int, tuple[tuple[Location, Shard], ...]], ...] = ()

    def records(self, topology: Topology) -> tuple[ParameterRecord, ...]:
        """Returns the parameters of ``topology.rank``, one record each, by stage and position."""
        stages = topology.local_stages
        if stages not in self._records_of:
            by_key: dict[str, ParameterRecord] = {}
            for stage in stages:
                for entry in self.stages[stage]:
                    record = self._records[stage, entry.name]
                    by_key.setdefault(record.key, record)
            self._records_of[stages] = tuple(by_key.values())
        return self._records_of[stages]

    @property
    def parameters(self) -> tuple[ParameterRecord, ...]:
        """The parameters of all stages, one record each, seen from the lowest holder."""
        # Later assignments win in a dictionary. So the records are reversed, for the lowest holder
        # to win, and reversed again.
        return tuple({r.key: r for r in reversed(self._records.values())}.values())[::-1]

    def locations(self, key: str) -> tuple[Location, ...]:
        """Returns the locations of the parameter `key`, by stage."""
        return self._locations[key]

    def entries(self, key: str) -> tuple[ParameterEntry, ...]:
        """Returns the entries of the parameter `key`, by stage."""
        return tuple(self._entries[location] for location in self._locations[key])

    def shard(self, rank: int, key: str) -> Shard | None:
        """Returns the part of the parameter `key` on `rank`; None if it is not a DTensor."""
        held = self._shards.get(rank, {})
        return next((held[location] for location in self._locations[key] if location in held), None)

    def is_counted(self, rank: int, key: str) -> bool:
        """Whether the part on `rank` counts in a norm; equal parts of a DTensor count once."""
        shard, layout = self.shard(rank, key), self.entries(key)[0].layout
        return shard is None or layout is None or shard.is_counted(layout)

    @cached_property
    def _records_of(self) -> dict[tuple[int, ...], tuple[ParameterRecord, ...]]:
        return {}  # local stages -> records; the ranks of all replicas share them

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
    def _locations(self) -> dict[str, tuple[Location, ...]]:
        tied = {location: tie for tie in self.ties for location in tie}
        return {r.key: tied.get(location, (location,)) for location, r in self._records.items()}

    @cached_property
    def _records(self) -> dict[Location, ParameterRecord]:
        tied = {location: tie for tie in self.ties for location in tie}
        position = {
            (s, e.name): i for s, entries in enumerate(self.stages) for i, e in enumerate(entries)
        }
        records: dict[Location, ParameterRecord] = {}
        # The key comes from the lowest holder, so all holders of a tied parameter have one key.
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
                kind=self._entries[homes[0]].kind,
                aliases=entry.aliases,
                tied_in_stage=any(self._entries[home].tied_in_stage for home in homes),
            )
        return records
