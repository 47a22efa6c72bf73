"""Metrics: what a step did, gathered from all ranks."""

from __future__ import annotations

import resource
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass

import torch


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
        learning_rate: Of the update of this step.
        tokens_seen: Tokens of all batches up to this one, also before a resume.
        elapsed_seconds: Wall-clock time since the first step of this run began.
        peak_memory_bytes: The most memory that a rank has taken so far: of the device; or of the
            process, if it trains on CPU or the device does not count.
        skipped: Steps of this run so far whose update was left out, as gradients were not finite.
        note: What was unusual about this step; None if nothing was.
        held_out_loss: Mean over the held-out batches, after the update; None if not measured.
        perplexity: Its exponential, if it is the default loss; None if not measured.
        sample: The prompt as the model continues it; None if not asked for.
    """

    step: int
    loss: float
    grad_norm: float
    step_seconds: float
    tokens_per_second: float
    collectives: int
    bytes_reduced: int
    exposed_seconds: float
    learning_rate: float
    tokens_seen: int
    elapsed_seconds: float
    peak_memory_bytes: int
    skipped: int = 0
    note: str | None = None
    held_out_loss: float | None = None
    perplexity: float | None = None
    sample: str | None = None

    def known(self) -> dict[str, float | str]:
        """Returns all attributes by name, without those that are None."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def peak_memory_bytes(device: torch.device) -> int:
    """Returns the most bytes that this process has taken so far, of a device or on CPU."""
    if device.type != "cpu":
        with suppress(RuntimeError):  # not every accelerator counts
            return int(torch.accelerator.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts KiB
