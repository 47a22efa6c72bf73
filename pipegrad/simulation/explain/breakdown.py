"""Breakdown: where each rank's step went. The parts of a rank sum to its step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from statistics import median_low
from typing import Any, Literal

from pipegrad.simulation.explain.lookup import Lookup
from pipegrad.simulation.timeline import COMPUTE, ON_RANK, SpanKind, Timeline, in_percent

# What no span covers is "other".
Part = SpanKind | Literal["other"]
PARTS: tuple[Part, ...] = (*ON_RANK, "other")
_HEADS: Mapping[Part, str] = {
    "F": "forward",
    "B": "backward",
    "I": "of inputs",
    "W": "of weights",
    "wait for receive": "waits to receive",
    "wait for send": "to send",
    "wait for reduction": "for reductions",
    "wait for parameters": "for parameters",
    "wait for ranks": "for all ranks",
}


@dataclass(frozen=True)
class RankBreakdown:
    """What one rank did in one step.

    Attributes:
        rank: The pipeline rank.
        step_seconds: How long the step took, on all ranks.
        parts: Seconds of each part; they sum to `step_seconds`.
    """

    rank: int
    step_seconds: float
    parts: Mapping[Part, float]

    @property
    def computing(self) -> float:
        """The share of the step in which the rank computes."""
        computes = sum(self.parts[kind] for kind in COMPUTE)
        return min(1.0, computes / self.step_seconds) if self.step_seconds > 0 else 1.0


@dataclass(frozen=True)
class Breakdown:
    """Where one step went.

    Attributes:
        step: Its number.
        seconds: How long it took, from the end of the step before it to its end on all ranks.
        ranks: For each pipeline rank.
    """

    step: int
    seconds: float
    ranks: tuple[RankBreakdown, ...]

    def columns(self) -> list[str]:
        """Returns the head of `rows`: parts that some rank has."""
        return ["rank", *(_HEADS.get(part, str(part)) for part in self._parts())]

    def rows(self, ranks: Iterable[int] | None = None) -> Iterator[list[str]]:
        """Yields for each rank its parts in percent of the step, as text.

        Args:
            ranks: Which ranks; by default all.
        """
        parts = self._parts()
        for rank in range(len(self.ranks)) if ranks is None else ranks:
            own = self.ranks[rank].parts
            yield [str(rank), *(in_percent(own[part] / (self.seconds or 1.0)) for part in parts)]

    def to_json(self) -> dict[str, Any]:
        """Returns it as plain data."""
        return asdict(self)

    def _parts(self) -> list[Part]:
        return [p for p in PARTS if self.seconds > 0 and any(r.parts[p] > 0 for r in self.ranks)]


def typical_step(timeline: Timeline) -> int:
    """Returns the number of the step whose time is the median of all steps.

    The first step of a run is longer than others, and one of several may be disturbed.
    """
    ends = timeline.step_ends
    seconds = [end - begin for begin, end in zip([0.0, *ends], ends, strict=False)]
    return seconds.index(median_low(seconds)) if seconds else 0


def break_down(lookup: Lookup, step: int) -> Breakdown:
    """Returns where a step went, for a simulated or a measured timeline.

    A step begins where the step before it ended on all ranks. If two spans of a rank overlap, as
    clocks and recording are not exact, the one that began first has the time. Time that no span
    covers is "other". So the parts of each rank sum to the step.

    Args:
        lookup: The timeline.
        step: Number of the step, from 0.
    """
    begin, end = lookup.step(step)
    ranks = list[RankBreakdown]()
    for rank in range(lookup.timeline.num_ranks):
        parts: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
        for piece in lookup.between(rank, begin, end):
            parts[piece.span.kind if piece.span else "other"] += piece.seconds
        ranks.append(RankBreakdown(rank, end - begin, parts))
    return Breakdown(step, end - begin, tuple(ranks))
