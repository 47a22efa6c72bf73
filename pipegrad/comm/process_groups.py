"""Process groups: one for each set of ranks and comm stream, made by all ranks in one order."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist

from pipegrad.comm.agreement import collective_timeout
from pipegrad.comm.collectives import (
    backend_of,
    blocks_host,
    broadcast_chain,
    expect_reduce_chain,
    reduce_chain,
)


class Groups:
    """The communicators of one GradientSync. Comm streams never share one: they would serialise.

    Args:
        wanted: (ranks, comm stream) of every group of any rank, in the order in which to make them.
        ranks: All ranks.
        rank: This rank.
        device: Where they will be used.
        handed: Sets of ranks that hand something from one to the next.

    Attributes:
        world: The group of all ranks; None if there is one rank.
        made: Those that this rank is in.
    """

    def __init__(
        self,
        wanted: Sequence[tuple[tuple[int, ...], int]],
        *,
        ranks: Sequence[int],
        rank: int,
        device: torch.device,
        chains: Collection[tuple[int, ...]] = (),
    ) -> None:
        self._device = device
        self.world: dist.ProcessGroup | None = None
        self.made: list[dist.ProcessGroup] = []
        self._groups: dict[tuple[tuple[int, ...], int], dist.ProcessGroup] = {}
        if len(ranks) > 1:
            self.world = new_group(ranks, "pipegrad", device)
            self.made.append(self.world)
        for members, comm_stream in wanted:
            # All ranks make every group: use_local_synchronization hangs for overlapping pairs.
            group = new_group(members, f"pipegrad comm stream {comm_stream}", device)
            if rank in members:
                self._groups[members, comm_stream] = group
                self.made.append(group)
        if not self.block_host(device):
            # NCCL connects a communicator in its first collective, and blocks the host until all
            # members are there. Comm streams begin in the order of readiness, each rank with its
            # own part of the list: they would wait for each other. Here all ranks connect in one
            # order.
            for (members, _), group in self._groups.items():
                dist.all_reduce(torch.zeros(1, device=device), group=group)
                if members in chains:  # and each pair of neighbours, for messages both ways
                    broadcast_chain(torch.zeros(1, device=device), group)
                    tail = torch.zeros(1, device=device)
                    reduce_chain(
                        tail, expect_reduce_chain(torch.zeros(1, device=device), group), group
                    )

    def of(self, ranks: tuple[int, ...], comm_stream: int) -> dist.ProcessGroup:
        """Returns the group of `ranks` for one comm stream."""
        return self._groups[ranks, comm_stream]

    def take_largest(self, values: torch.Tensor) -> None:
        """Replaces each element of `values` by the largest that any rank has there.

        Sync: on the current stream; one all-reduce over all ranks.
        """
        if self.world is not None:
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.world)

    def is_anywhere(self, flag: bool) -> bool:
        """Returns whether `flag` is set on any rank; every rank must call it.

        Sync: as `take_largest`; the host waits.
        """
        values = torch.tensor(float(flag), device=self._device)
        self.take_largest(values)
        return bool(values)

    def forget(self) -> None:
        """Lets go of all groups, which are destroyed."""
        self.world = None
        self._groups.clear()

    def block_host(self, device: torch.device) -> bool:
        """Whether waiting for a collective on `device` blocks the calling thread (gloo does)."""
        return self.world is None or blocks_host(self.world, device)


def new_group(ranks: Sequence[int], what: str, device: torch.device) -> dist.ProcessGroup:
    """Makes a process group with the timeout of the default one: torch's own ignores that.

    Args:
        ranks: Global ranks; every rank of the world must make it.
        what: For torch's logs.
        device: Where it will be used.
    """
    group: dist.ProcessGroup = dist.new_group(
        list(ranks), timeout=collective_timeout(device), group_desc=what
    )
    return group


def is_local(device: torch.device) -> bool:
    """Whether a group for `device` is destroyed without other ranks: gloo's is."""
    return dist.is_initialized() and backend_of(None, device) == "gloo"
