"""Messages between two ranks of a group: how they are sent, and what tells them apart."""

from __future__ import annotations

import torch
import torch.distributed as dist

from pipegrad.comm import sync_points
from pipegrad.comm.work import Work

RECEIVED = sync_points.WaitWork(
    "collective.received", "nobody reads or passes on what is still arriving"
)
SENT = sync_points.WaitWork(
    "collective.sent", "who writes there next must not overwrite what is leaving"
)

# Tags of pipegrad's messages. They differ from the tags of other messages between the same two
# ranks. They also differ from each other: the receive of a reduce chain is posted at the beginning
# of a step, and other messages arrive between it and its send.
SHARDS, COMMON, GATHERED, UP, DOWN, COUNTS, BACK = range(0x70670, 0x70677)
HEADERS = 0x70678  # one more is that of `ending`
TRANSFERS = 2**20  # the first one of a step's values and gradients


def backend_of(group: dist.ProcessGroup | None, device: torch.device) -> str:
    """Returns the backend of `group` for `device`; None means the default group."""
    backends = dist.get_backend_config(group)
    pairs = dict(pair.split(":") for pair in backends.split(",") if ":" in pair)
    return pairs.get(device.type, backends)


def blocks_host(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Whether waiting for a collective on `device` blocks the calling thread (gloo does)."""
    return device.type == "cpu" or backend_of(group, device) == "gloo"


def can_send(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Whether a tensor on `device` can be sent to one rank. gloo can only send from the CPU."""
    return device.type == "cpu" or backend_of(group, device) != "gloo"


def is_gloo(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> bool:
    """Whether gloo sends this tensor, from the CPU."""
    return tensor.device.type == "cpu" and backend_of(group, tensor.device) == "gloo"


def real(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a flat tensor; for complex numbers, their real and imaginary parts, side by side."""
    # Not every backend adds complex numbers.
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


def receive(tensor: torch.Tensor, peer: int, group: dist.ProcessGroup | None, tag: int) -> Work:
    """Starts to receive from a rank of the group."""
    return _work(dist.irecv(tensor, group=group, group_src=peer, tag=tag))


def send(tensor: torch.Tensor, peer: int, group: dist.ProcessGroup | None, tag: int) -> Work:
    """Starts to send to a rank of the group."""
    return _work(dist.isend(tensor, group=group, group_dst=peer, tag=tag))


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None  # torch returns None only on ranks that are not in the group
    return work
