"""Latency: which share of a hop's time no codec makes shorter."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from pipegrad.comm import sync_points
from pipegrad.pipeline.coding.choice import Hop
from pipegrad.pipeline.transfers.edges import Edges

ARRIVED = sync_points.WaitWork("latency.arrived", "the next message is measured by itself")

_NUM_BYTES = 8
_REPEATS = 5


def latency_shares(
    num_bytes: Mapping[Hop, int], own: int, edges: Edges, device: torch.device
) -> dict[Hop, float]:
    """Returns which share of a message's time an almost empty one takes, from 0 to 1.

    The time of a hop in a step has more than the message: its ranks may be busy with something
    else. So the share is that of messages which are sent alone, and it holds for the time in a
    step, too.

    All ranks of the pipeline call it between steps, with the same hops, which are of neighbours.

    Args:
        num_bytes: Of the messages of each hop.
        own: The pipeline rank.
        edges: The communicators of the pipeline.
        device: Where messages are.

    Sync: the host waits for the device.
    """
    found = dict[Hop, float]()
    # All ranks go through the hops in one order, so nobody waits for ever.
    for hop in sorted(num_bytes):
        if own in hop:
            empty = _round_trip(hop, own, _NUM_BYTES, edges, device)
            whole = _round_trip(hop, own, num_bytes[hop], edges, device)
            if own == hop[0]:
                # An empty message comes back in both: half of a round trip is one of them.
                found[hop] = min(empty / 2 / max(whole - empty / 2, 1e-9), 1.0)
    return found


def _round_trip(hop: Hop, own: int, num_bytes: int, edges: Edges, device: torch.device) -> float:
    """Returns how long a message to the higher rank takes, with an almost empty one back."""
    low, high = hop
    message = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    answer = torch.zeros(_NUM_BYTES, dtype=torch.uint8, device=device)

    def send(tensor: torch.Tensor, peer: int) -> None:
        group, there = edges.to(peer)
        ARRIVED(sync_points.in_use.send(group, tensor, there, 1))

    def receive(tensor: torch.Tensor, peer: int) -> None:
        group, there = edges.of(peer)
        ARRIVED(sync_points.in_use.receive(group, tensor, there, 1))
        sync_points.finish_device(device)

    trips = list[float]()
    for _ in range(_REPEATS + 1):
        began = time.perf_counter()
        if own == low:
            send(message, high)
            receive(answer, high)
        else:
            receive(message, low)
            send(answer, low)
        trips.append(time.perf_counter() - began)
    # The first one may connect. The fastest one shows the hop; a slower one, a host that was busy.
    return min(trips[1:])
