"""Choice: the schedule that a simulation found best, and the table of why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipegrad.schedules.schedule import Schedule

# Steps that differ by less than this take equally long: more activations must buy something.
EQUAL = 0.005


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
