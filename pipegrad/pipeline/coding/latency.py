"""Latency: what a hop takes for a message of a few bytes, which no codec makes shorter."""

from __future__ import annotations

import time
from collections.abc import Collection

import torch

from pipegrad.comm import sync_points
from pipegrad.pipeline.coding.choice import Hop
from pipegrad.pipeline.transfers.edges import Edges

ARRIVED = sync_points.WaitWork("latency.arrived", "the next message is measured by itself")

_NUM_BYTES = 8
_REPEATS = 5


def latencies_of(
    hops: Collection[Hop], own: int, edges: Edges, device: torch.device
) -> dict[Hop, float]:
    """Returns what an almost empty message takes in one direction, for hops to the next rank.

    All ranks of the pipeline call it between steps, with the same hops, which are of neighbours.

    Args:
        hops: The hops.
        own: The pipeline rank.
        edges: The communicators of the pipeline.
        device: Where messages are.

    Sync: the host waits for the device.
    """
    found = dict[Hop, float]()
    message = torch.zeros(_NUM_BYTES, dtype=torch.uint8, device=device)

    def send(peer: int) -> None:
        group, there = edges.to(peer)
        ARRIVED(sync_points.in_use.send(group, message, there, 1))

    def receive(peer: int) -> None:
        group, there = edges.of(peer)
        ARRIVED(sync_points.in_use.receive(group, message, there, 1))
        sync_points.finish_device(device)

    # All ranks go through the hops in one order, so nobody waits for ever.
    for low, high in sorted(hops):
        if own == low:
            trips = []
            for _ in range(_REPEATS + 1):  # the first one may connect
                began = time.perf_counter()
                send(high)
                receive(high)
                trips.append(time.perf_counter() - began)
            # The fastest one shows the hop; a slower one, a host that was busy.
            found[low, high] = min(trips[1:]) / 2
        elif own == high:
            for _ in range(_REPEATS + 1):
                receive(low)
                send(low)
    return found
