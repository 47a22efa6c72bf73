"""Reporter: the contract of what writes or shows the metrics of a run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from pipegrad.plugins.registry import REPORTERS, Registry
from pipegrad.train.config import Config
from pipegrad.train.metrics import StepMetrics


class Reporter(ABC):
    """Takes the metrics of every step. A plug-in of the group ``pipegrad.reporters``.

    Every rank constructs it, with the options of ``train.reporters``. Only rank 0 opens it, and
    calls the other methods. If a method fails in a run, the run goes on without this reporter, and
    a line says so.

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
        """Ends what `open` began. Called once, also if the run fails."""


reporters: Registry[Reporter] = Registry(REPORTERS, Reporter)  # type: ignore[type-abstract]
