"""Reporter: the metrics of a step, and the contract of plug-ins that write or show them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pipegrad.plugins.registry import REPORTERS, Registry
from pipegrad.train.config import Config


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
        learning_rate: Learning rate of this step's update.
        tokens_seen: Tokens of all batches up to this one, also before a resume.
        elapsed_seconds: Wall-clock time since the first step of this run began.
        peak_memory_bytes: The most memory that a rank has taken so far: of the device; or of the
            process, if it trains on CPU or the device does not count.
        skipped: Steps of this run so far whose update was left out, as gradients were not finite.
        note: A line about an unusual step, such as a skipped one; None for usual steps.
        held_out_loss: Mean over the held-out batches, after the update; None if not measured.
        perplexity: Exponential of `held_out_loss`, if it is the default loss; else None.
        sample: The prompt as the model continues it; None if no sample is due.
        metrics: Further numbers that a function of ``train.loss`` returns, by name: means, as the
            loss is.
        held_out_metrics: Means of these numbers over the held-out batches.
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
    metrics: Mapping[str, float] = field(default_factory=dict)
    held_out_metrics: Mapping[str, float] = field(default_factory=dict)

    def known(self) -> dict[str, float | str]:
        """Returns all attributes by name, and metrics by theirs, without those that are None."""
        values = vars(self) | {"metrics": None, "held_out_metrics": None}
        held_out = {f"held_out_{name}": value for name, value in self.held_out_metrics.items()}
        own = {name: value for name, value in values.items() if value is not None}
        return {**self.metrics, **held_out, **own}


class Reporter(ABC):
    """Takes the metrics of every step. A plug-in of the group ``pipegrad.reporters``.

    Every rank constructs it, with the options of ``train.reporters``. Only rank 0 opens it, and
    calls the other methods. If a method fails in a run, the run prints a line and goes on without
    this reporter.

    Attributes:
        first_step: Number of the first step that it is given. It is set before `open`; more than 1
            if the run goes on, perhaps in a folder where this reporter has written before.
    """

    first_step: int = 1

    @abstractmethod
    def open(self, folder: Path, config: Config) -> None:
        """Prepares for a run, before its first step.

        Args:
            folder: The run's folder. It is new, unless the run goes on in it.
            config: The configuration.

        Raises:
            OSError: If it cannot write there. The run does not begin.
        """

    @abstractmethod
    def report(self, metrics: StepMetrics) -> None:
        """Takes the metrics of a step, right after it."""

    @abstractmethod
    def close(self) -> None:
        """Frees the resources of `open`. Called once, also if the run fails."""


reporters: Registry[Reporter] = Registry(REPORTERS, Reporter)  # type: ignore[type-abstract]
