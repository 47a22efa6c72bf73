"""Edges: the communicators between the ranks of a pipeline."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist

from pipegrad.comm.ending import Ending, cut
from pipegrad.comm.process_groups import is_local, new_group
from pipegrad.schedules.program.program import Channel
from pipegrad.topology import Topology


class Edges:
    """The communicators of one pipeline.

    Between processors messages have tags, so one group serves all edges, and another one skips:
    [Note: skips] in `program` says why. NCCL has no tags, and a
    receive that is posted early would block the sends behind it. So between other devices each
    directed edge has a communicator of its own, and one group takes messages between hosts.

    Args:
        channels: Of all ranks; every rank must give the same.
        topology: Ranks; every pipeline of the mesh gets its own.
        device: Where the tensors are.
        skips: Channels of a connection of their own, between processors; see [Note: skips].

    Attributes:
        is_tagged: Whether messages have tags, and one may be shorter than the memory that takes it.
        is_cut: Whether this rank has closed its connections.
    """

    def __init__(
        self,
        channels: Sequence[Channel],
        topology: Topology,
        device: torch.device,
        skips: Collection[Channel] = (),
    ) -> None:
        self.is_tagged = has_tags(device)
        self.is_cut = False
        self._groups: list[dist.ProcessGroup] = []
        self._out: dict[int, tuple[dist.ProcessGroup, int]] = {}
        self._in: dict[int, tuple[dist.ProcessGroup, int]] = {}
        self._hosts: dict[int, tuple[dist.ProcessGroup, int]] = {}
        self._skips = frozenset(skips) if self.is_tagged else frozenset()
        self._beside: dict[int, tuple[dist.ProcessGroup, int]] = {}
        self._ending = Ending(self, groups=self._groups, is_local=is_local(device))
        edges = sorted({(c.source, c.target) for c in channels})
        if not edges:
            return
        for pipeline in topology.pipelines:
            # All ranks make the groups of all pipelines, in one order, as torch demands.
            self._connect_hosts(pipeline, topology.rank, "pipegrad edges", self._hosts)
            if self._skips:
                self._connect_hosts(pipeline, topology.rank, "pipegrad skips", self._beside)
            if self.is_tagged:
                self._out = self._in = self._hosts
            else:
                self._connect_devices(pipeline, topology, device, edges)

    def _connect_hosts(
        self,
        pipeline: Sequence[int],
        own: int,
        name: str,
        ends: dict[int, tuple[dist.ProcessGroup, int]],
    ) -> None:
        """Makes a group of all ranks of a pipeline, whose messages have tags."""
        backend = None if self.is_tagged else "gloo"
        group = new_group(pipeline, name, torch.device("cpu"), backend)
        if own in pipeline:
            self._groups.append(group)
            for peer, rank in enumerate(pipeline):
                ends[peer] = group, dist.get_group_rank(group, rank)

    def _connect_devices(
        self,
        pipeline: Sequence[int],
        topology: Topology,
        device: torch.device,
        edges: Sequence[tuple[int, int]],
    ) -> None:
        """Makes a group for each directed edge."""
        me, is_own = topology.coordinate(topology.pipeline), topology.rank in pipeline
        for source, target in edges:
            pair = [pipeline[source], pipeline[target]]
            group = new_group(pair, f"pipegrad edge {source} to {target}", device)
            if is_own and me in (source, target):
                self._groups.append(group)
                peer = target if me == source else source
                end = group, dist.get_group_rank(group, pipeline[peer])
                (self._out if me == source else self._in)[peer] = end
                # NCCL connects in the first operation of a communicator, and both ranks wait
                # there. All ranks connect here in one order. Otherwise the first transfers would
                # connect, in an order that could be a deadlock.
                dist.all_reduce(torch.zeros(1, device=device), group=group)

    def to(self, target: int, channel: Channel | None = None) -> tuple[dist.ProcessGroup, int]:
        """Returns the group that serves the edge to a pipeline rank, and that rank in it.

        Args:
            target: The pipeline rank.
            channel: What is to be sent; a skip may have a group of its own.
        """
        return (self._beside if channel in self._skips else self._out)[target]

    def of(self, source: int, channel: Channel | None = None) -> tuple[dist.ProcessGroup, int]:
        """Returns the same for the edge from a pipeline rank."""
        return (self._beside if channel in self._skips else self._in)[source]

    def host(self, peer: int) -> tuple[dist.ProcessGroup, int]:
        """Returns the group that takes messages between hosts, and a pipeline rank in it."""
        return self._hosts[peer]

    def cut(self) -> None:
        """Closes this rank's connections on gloo, so that ranks that wait for it fail at once."""
        self.is_cut = True
        both = (*self._hosts.values(), *self._beside.values())
        for group in dict.fromkeys(group for group, _ in both):
            cut(group)

    def close(self) -> None:
        """Destroys the groups; every rank must call it."""
        self._ending.end()
        for ends in (self._out, self._in, self._hosts, self._beside):
            ends.clear()


def has_tags(device: torch.device) -> bool:
    """Whether messages between such devices have tags; between processors they have."""
    return device.type == "cpu"
