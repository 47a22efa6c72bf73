"""Edges: the communicators between the ranks of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from pipegrad.comm.ending import Ending, cut
from pipegrad.comm.process_groups import is_local, new_group
from pipegrad.schedules.program.program import Channel
from pipegrad.topology import Topology


class Edges:
    """The communicators of one pipeline.

    Between processors messages have tags, so one group serves all edges. NCCL has no tags, and a
    receive that is posted early would block the sends behind it. So between other devices each
    directed edge has a communicator of its own, and one group takes messages between hosts.

    Args:
        channels: Of all ranks; every rank must give the same.
        topology: Ranks; every pipeline of the mesh gets its own.
        device: Where the tensors are.

    Attributes:
        is_tagged: Whether messages have tags, and one may be shorter than the memory that takes it.
        is_cut: Whether this rank has closed its connections.
    """

    def __init__(
        self, channels: Sequence[Channel], topology: Topology, device: torch.device
    ) -> None:
        self.is_tagged = has_tags(device)
        self.is_cut = False
        self._groups: list[dist.ProcessGroup] = []
        self._out: dict[int, tuple[dist.ProcessGroup, int]] = {}
        self._in: dict[int, tuple[dist.ProcessGroup, int]] = {}
        self._hosts: dict[int, tuple[dist.ProcessGroup, int]] = {}
        self._ending = Ending(self, groups=self._groups, is_local=is_local(device))
        edges = sorted({(c.source, c.target) for c in channels})
        if not edges:
            return
        me = topology.coordinate(topology.pipeline)
        for pipeline in topology.pipelines:
            # All ranks make the groups of all pipelines, in one order, as torch demands.
            is_own = topology.rank in pipeline
            backend = None if self.is_tagged else "gloo"
            group = new_group(pipeline, "pipegrad edges", torch.device("cpu"), backend)
            if is_own:
                self._groups.append(group)
                for peer, rank in enumerate(pipeline):
                    self._hosts[peer] = group, dist.get_group_rank(group, rank)
            if self.is_tagged:
                self._out = self._in = self._hosts
                continue
            for source, target in edges:
                pair = [pipeline[source], pipeline[target]]
                group = new_group(pair, f"pipegrad edge {source} to {target}", device)
                if is_own and me in (source, target):
                    self._groups.append(group)
                    peer = target if me == source else source
                    end = group, dist.get_group_rank(group, pipeline[peer])
                    (self._out if me == source else self._in)[peer] = end
                    # NCCL connects in the first operation of a communicator, and both ranks wait
                    # there. All ranks connect here in one order. Otherwise the first transfers
                    # would connect, in an order that could be a deadlock.
                    dist.all_reduce(torch.zeros(1, device=device), group=group)

    def to(self, target: int) -> tuple[dist.ProcessGroup, int]:
        """Returns the group that serves the edge to a pipeline rank, and that rank in it."""
        return self._out[target]

    def of(self, source: int) -> tuple[dist.ProcessGroup, int]:
        """Returns the group that serves the edge from a pipeline rank, and that rank in it."""
        return self._in[source]

    def host(self, peer: int) -> tuple[dist.ProcessGroup, int]:
        """Returns the group that takes messages between hosts, and a pipeline rank in it."""
        return self._hosts[peer]

    def cut(self) -> None:
        """Closes this rank's connections on gloo, so that ranks that wait for it fail at once."""
        self.is_cut = True
        for group in dict.fromkeys(group for group, _ in self._hosts.values()):
            cut(group)

    def close(self) -> None:
        """Destroys the groups; every rank must call it."""
        self._ending.end()
        for ends in (self._out, self._in, self._hosts):
            ends.clear()


def has_tags(device: torch.device) -> bool:
    """Whether messages between such devices have tags; between processors they have."""
    return device.type == "cpu"
