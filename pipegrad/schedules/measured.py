"""Schedules that are made of measured times, while a `Scheduler` trains, and why they are chosen.

A `Scheduler` knows no costs. A generator that simulates schedules, such as ``"auto"``, says by this
contract what it has chosen.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipegrad.errors import ScheduleError
from pipegrad.schedules.schedule import Schedule, ScheduleGenerator

# Steps that differ by less than this take equally long: more activations must buy something.
EQUAL = 0.005


@dataclass(frozen=True)
class Times:
    """What a training step has shown. All ranks have the same numbers.

    If there are several pipelines, each number is that of the slowest.

    Attributes:
        forward_seconds: For each rank the time of a forward of one microbatch: a median.
        backward_seconds: For each rank the same of a backward.
        hop_seconds: For each hop s -> s+1 what the values of a microbatch take in one direction: a
            mean of there and back.
        weight_seconds: For each rank the part of a backward that W takes, 0 where backwards are
            whole; empty if nobody has measured it.
    """

    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    hop_seconds: tuple[float, ...]
    weight_seconds: tuple[float, ...] = ()

    @property
    def compute_seconds(self) -> tuple[float, ...]:
        """For each rank the time of a forward and a backward."""
        return tuple(map(sum, zip(self.forward_seconds, self.backward_seconds, strict=True)))


@dataclass(frozen=True)
class Candidate:
    """A schedule, and what it was found to take.

    Attributes:
        name: The schedule and its options, in words.
        schedule: None if it is not defined for these numbers.
        step_seconds: Of a step that follows another.
        bubble: The share of all ranks' time in which they do not compute.
        peak_bytes: The most that a rank holds.
        live_activations: Microbatches that each rank holds at most, over all its stages; with
            chunks of time whole sequences, rounded up.
        boundaries: Index of the first layer of every stage but the first, which
            ``pipegrad.cut(model, n, boundaries=...)`` takes; empty if costs were of its stages.
        refused: Why it was not taken; "" if it could have been.
    """

    name: str
    schedule: Schedule | None = None
    step_seconds: float = 0.0
    bubble: float = 0.0
    peak_bytes: int = 0
    live_activations: tuple[int, ...] = ()
    boundaries: tuple[int, ...] = ()
    refused: str = ""

    def to_json(self) -> dict[str, Any]:
        """Returns it as plain data, without the schedule."""
        if self.schedule is None:
            return {"name": self.name, "refused": self.refused}
        return {
            "name": self.name,
            "step_seconds": self.step_seconds,
            "bubble": self.bubble,
            "peak_bytes": self.peak_bytes,
            "live_activations": list(self.live_activations),
            "boundaries": list(self.boundaries),
            "refused": self.refused,
        }


@dataclass(frozen=True)
class Choice:
    """The schedule that was chosen, and what else was tried.

    Attributes:
        candidates: The chosen one first; then by time; at last those that were refused.
    """

    candidates: tuple[Candidate, ...]

    @property
    def best(self) -> Candidate:
        """What was chosen."""
        return self.candidates[0]

    @property
    def schedule(self) -> Schedule:
        """What was chosen, for a `Scheduler`."""
        assert self.best.schedule is not None
        return self.best.schedule

    def to_json(self) -> list[dict[str, Any]]:
        """Returns the candidates as plain data, in order."""
        return [candidate.to_json() for candidate in self.candidates]

    def __str__(self) -> str:
        rows = list(rows_of(self.to_json()))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(map(str.ljust, row, widths)) for row in rows)
        return "\n".join(map(str.rstrip, lines))


def rows_of(candidates: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Yields the cells of the table of why, its head first, from what `Choice.to_json` returns."""
    best = candidates[0]
    # A job whose costs are those of its stages is cut already.
    is_cut = any(each.get("boundaries") for each in candidates)
    cut = ["boundaries"] * is_cut
    yield "schedule", "step", "bubble", "peak MiB", "activations", *cut, "why"
    for each in candidates:
        cut = [", ".join(map(str, each.get("boundaries", ())))] * is_cut
        if "step_seconds" not in each:
            yield each["name"], "", "", "", "", *cut, each["refused"]
            continue
        quickest = best["step_seconds"]
        slower = each["step_seconds"] / quickest - 1 if quickest else 0.0
        why = f"{slower:+.1%}" if slower >= EQUAL else "as fast, holds more"
        yield (
            each["name"],
            f"{1e3 * each['step_seconds']:.1f} ms",
            f"{each['bubble']:.1%}",
            f"{each['peak_bytes'] / 2**20:.1f}",
            f"{sum(each['live_activations'])}",
            *cut,
            "chosen" if each is best else each["refused"] or why,
        )


class MeasuredGenerator(ScheduleGenerator):
    """A generator that takes what steps have shown, and then makes another schedule.

    `generate` makes the schedule to begin with. All its schedules, for one number of ranks, place
    the same stages on the same ranks. Their gradients are best final in the same order of stages:
    reductions leave in the order of the first schedule.
    """

    @property
    @abstractmethod
    def wants_times(self) -> bool:
        """Whether `planned` is called after the next step, too."""

    @abstractmethod
    def planned(self, times: Times) -> MeasuredGenerator:
        """Returns what makes the schedules from the next step on; itself if nothing changes.

        The function is pure: every rank returns the same for the same times.
        """

    def choice(self, *, num_ranks: int, num_microbatches: int) -> Choice | None:
        """Returns why `generate` makes what it makes; None if nothing was chosen, or not yet."""
        return None


def check_live_activations(limit: object) -> None:
    """Refuses a limit of live activations that is no whole number from 1; None is no limit.

    Raises:
        ScheduleError: If it is something else.
    """
    if limit is None:
        return
    if not isinstance(limit, int) or limit is True or limit < 1:
        raise ScheduleError(f"max_live_activations is {limit!r}, expected a whole number from 1")
