"""Schedules that are made of measured times, while a `Scheduler` trains."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from pipegrad.errors import ScheduleError
from pipegrad.schedules.schedule import ScheduleGenerator


@dataclass(frozen=True)
class Times:
    """Measured times of a training step. All ranks have the same numbers.

    If there are several pipelines, each number is from the slowest one.

    Attributes:
        forward_seconds: For each rank the time of a forward of one microbatch: a median.
        backward_seconds: For each rank the time of a backward of one microbatch: a median.
        hop_seconds: For each hop s -> s+1 the time of the values of a microbatch in one direction:
            a mean of both directions.
        weight_seconds: For each rank the part of a backward that W takes, 0 if backwards are whole;
            empty if it was not measured.
    """

    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    hop_seconds: tuple[float, ...]
    weight_seconds: tuple[float, ...] = ()

    @property
    def compute_seconds(self) -> tuple[float, ...]:
        """For each rank the time of a forward and a backward."""
        return tuple(map(sum, zip(self.forward_seconds, self.backward_seconds, strict=True)))


class MeasuredGenerator(ScheduleGenerator):
    """A generator that makes another schedule from the times of steps.

    `generate` makes the schedule to begin with. All its schedules, for one number of ranks, place
    the same stages on the same ranks. Gradients should be final in the same order of stages,
    because reductions are launched in the order of the first schedule.
    """

    @property
    @abstractmethod
    def wants_times(self) -> bool:
        """True if `planned` is called after the next step, too."""

    @abstractmethod
    def planned(self, times: Times) -> MeasuredGenerator:
        """Returns the generator of the schedules from the next step on; itself if nothing changes.

        The function is pure: every rank returns the same for the same times.
        """

    def choice(self, *, num_ranks: int, num_microbatches: int) -> object:
        """Returns an object that prints the reason for the schedule; None if nothing was chosen."""
        return None


def check_threshold(threshold: float) -> None:
    """Refuses a threshold that is no share below 1."""
    if not 0 <= threshold < 1:
        raise ScheduleError(f"threshold is {threshold}, expected at least 0 and below 1")


def check_live_activations(limit: object) -> None:
    """Refuses a limit of live activations that is no whole number from 1; None is no limit.

    Raises:
        ScheduleError: If it is something else.
    """
    if limit is None:
        return
    if not isinstance(limit, int) or limit is True or limit < 1:
        raise ScheduleError(f"max_live_activations is {limit!r}, expected a whole number from 1")
