"""Process groups: a group for each set of ranks and comm stream. All ranks make them in one order.

Set-up makes them (docs/internals.md); steps 5, 6 and 9 of the journey of a gradient use them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from pipegrad.comm.activity import Activity
from pipegrad.comm.agreement import AGREE_SECONDS, collective_timeout, slow_seconds
from pipegrad.comm.collectives import (
    backend_of,
    blocks_host,
    broadcast_chain,
    expect_reduce_chain,
    is_gloo,
    reduce_chain,
    to_all,
)
from pipegrad.comm.waits import ended
from pipegrad.comm.watch import Bounded, watch

T = TypeVar("T")


class Groups:
    """The communicators of one GradientSync.

    Two comm streams never share a communicator, because their collectives would run one after the
    other.

    Args:
        specs: (ranks, comm stream) of every group of any rank, in the order in which to make them.
        ranks: All ranks.
        rank: This rank.
        device: Device of the tensors that the groups will send.
        chains: Sets of ranks that run reduce chains and broadcast chains.

    Attributes:
        world: The group of all ranks; None if there is one rank.
        host: A group of all ranks for numbers on the host; None if waits in `world` block the host.
        joined: The groups that this rank is in.
    """

    def __init__(
        self,
        specs: Sequence[tuple[tuple[int, ...], int]],
        *,
        ranks: Sequence[int],
        rank: int,
        device: torch.device,
        chains: Collection[tuple[int, ...]] = (),
    ) -> None:
        self._ranks, self._index = sorted(ranks), sorted(ranks).index(rank)
        self.world: dist.ProcessGroup | None = None
        self.joined: list[dist.ProcessGroup] = []
        self._groups: dict[tuple[tuple[int, ...], int], dist.ProcessGroup] = {}
        if len(ranks) > 1:
            self.world = new_group(ranks, "pipegrad", device)
            self.joined.append(self.world)
        # This group is for hosts alone, because a flag that NCCL reduces waits until the device has
        # done all earlier work, and the host waits for the flag.
        self.host: dist.ProcessGroup | None = None
        if not self.block_host(device):
            self.host = new_group(ranks, "pipegrad host", torch.device("cpu"), "gloo")
            self.joined.append(self.host)
        for members, comm_stream in specs:
            # torch requires that all ranks make all groups, in one order. Its exception,
            # use_local_synchronization, hangs if groups overlap.
            group = new_group(members, f"pipegrad comm stream {comm_stream}", device)
            if rank in members:
                self._groups[members, comm_stream] = group
                self.joined.append(group)
        if not self.block_host(device):
            # Connect all communicators here, in one order, because NCCL connects a communicator in
            # its first collective, and blocks the host until all members are there. In a step, comm
            # streams begin in the order of readiness. This order differs between ranks, and ranks
            # would wait for each other in a circle.
            for (members, _), group in self._groups.items():
                dist.all_reduce(torch.zeros(1, device=device), group=group)
                # A chain sends point-to-point, and NCCL connects each pair of ranks separately, in
                # each direction.
                if members in chains:
                    broadcast_chain(torch.zeros(1, device=device), group)
                    tail = torch.zeros(1, device=device)
                    reduce_chain(
                        tail, expect_reduce_chain(torch.zeros(1, device=device), group), group
                    )

    def of(self, ranks: tuple[int, ...], comm_stream: int) -> dist.ProcessGroup:
        """Returns the group of `ranks` for one comm stream."""
        return self._groups[ranks, comm_stream]

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        """Returns the rows of all ranks, by ascending rank: ``(ranks, numel)``.

        Args:
            row: This rank's numbers, ``(numel,)``, of the same dtype on all ranks, on the device
                or on the host.

        Sync: on the current stream; on the host if the row is there. Sends the row to all ranks.
        """
        # Add to zeros, because every bit stays then, also of nan and infinity.
        rows = row.new_zeros(len(self._ranks), row.numel())
        rows[self._index] = row
        group = self.world if self.host is None or not row.is_cpu else self.host
        if group is not None:
            with Activity("the numbers of all ranks", self._ranks):
                if is_gloo(row, group):
                    to_all(rows, row, group).wait()
                else:
                    dist.all_reduce(rows, group=group)
        return rows

    def is_anywhere(self, flag: bool) -> bool:
        """Returns True if `flag` is set on any rank; every rank must call it.

        Sync: on the host, as `gather`.
        """
        return bool(self.gather(torch.full((1,), float(flag), device="cpu")).any())

    def forget(self) -> None:
        """Drops the references to all groups, after they were destroyed."""
        self.world = self.host = None
        self._groups.clear()

    def block_host(self, device: torch.device) -> bool:
        """True if waiting for a collective on `device` blocks the calling thread (gloo does)."""
        return self.world is None or blocks_host(self.world, device)


def new_group(
    ranks: Sequence[int], description: str, device: torch.device, backend: str | None = None
) -> dist.ProcessGroup:
    """Makes a process group with the timeout of the default group, which torch does not use.

    Args:
        ranks: Global ranks of the group. Every rank of the world must make it.
        description: For torch's logs.
        device: Device of the tensors that the group will send.
        backend: Name of a backend; None for the default group's backend.
    """
    timeout = collective_timeout(device)
    group: dist.ProcessGroup = together(
        f"the group {description!r}",
        lambda: dist.new_group(list(ranks), timeout, backend, group_desc=description),
        device,
    )
    return group


def together(what: str, make: Callable[[], T], device: torch.device) -> T:
    """Returns the result of `make`, which all ranks of the world call.

    The job ends with a report if a rank stays away.
    """
    watch()
    seconds, ranks = slow_seconds(device, AGREE_SECONDS), range(dist.get_world_size())
    with Bounded(what, ranks, within_seconds=seconds):
        # NCCL makes communicators for the device of this thread.
        return ended(make) if device.type == "cpu" else make()


def is_local(device: torch.device) -> bool:
    """True if a group for `device` can be destroyed without other ranks, as on gloo."""
    return dist.is_initialized() and backend_of(None, device) == "gloo"
