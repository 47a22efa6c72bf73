"""Metrics: what a step did, gathered from all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class StepMetrics:
    """The metrics of a step, the same on all ranks; a line of ``metrics.jsonl``.

    Attributes:
        step: Number of the step, from 1.
        loss: Mean over all tokens of the batch, before the update.
        grad_norm: Norm of all gradients of all ranks before clipping. Each parameter counts once.
        step_seconds: Wall-clock time of the slowest rank.
        tokens_per_second: Tokens of the whole batch, divided by that time.
        collectives: Number of collectives that reduced gradients, summed over their ranks.
        bytes_reduced: Bytes that they reduced, summed over their ranks.
        exposed_seconds: The longest time that a rank was blocked by them.
    """

    step: int
    loss: float
    grad_norm: float
    step_seconds: float
    tokens_per_second: float
    collectives: int
    bytes_reduced: int
    exposed_seconds: float


def every_rank(values: list[float], device: torch.device) -> list[list[float]]:
    """Returns the values of every rank, on every rank."""
    # float64, so that counts of bytes are exact. Each rank fills its own row, and the sum of these
    # matrices has all rows.
    all_values = torch.zeros(dist.get_world_size(), len(values), dtype=torch.float64, device=device)
    all_values[dist.get_rank()] = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(all_values)
    return [[float(x) for x in of_rank] for of_rank in all_values.tolist()]
