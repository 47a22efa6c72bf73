"""lanes: puts spans that overlap under each other. All pictures show the same lanes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from pipegrad.simulation.timeline import ON_RANK, Span, Timeline

_ROUNDING = 1e-9  # of the whole: spans that overlap by less do so because numbers are rounded


class Lane(NamedTuple):
    """Spans that do not overlap.

    Attributes:
        rank: Their rank.
        is_beside: False for what the rank itself does, True for what runs beside it.
        spans: Their positions in the timeline's spans, in order of time.
    """

    rank: int
    is_beside: bool
    spans: list[int]


def lanes(timeline: Timeline) -> Iterator[Lane]:
    """Yields the lanes of all ranks: first what a rank does, then what runs beside it.

    Every rank has a lane of its own spans, which may be empty. If recorded spans of a rank overlap,
    it has several.
    """
    spans = timeline.spans
    rows: defaultdict[tuple[int, bool], list[int]] = defaultdict(list)
    for number in sorted(range(len(spans)), key=lambda n: (spans[n].begin, spans[n].end)):
        rows[spans[number].rank, spans[number].kind not in ON_RANK].append(number)
    slack = _ROUNDING * max((span.end for span in spans), default=0.0)
    for rank in range(timeline.num_ranks):
        for is_beside in (False, True):
            row = rows[rank, is_beside]
            for own in _stacked(row, spans, slack) or [[]] * (not is_beside):
                yield Lane(rank, is_beside, own)


def _stacked(row: Iterable[int], spans: tuple[Span, ...], slack: float) -> list[list[int]]:
    """Returns lanes, each span in the first that is free when it begins."""
    found: list[list[int]] = []
    for number in row:
        for lane in found:
            if spans[lane[-1]].end <= spans[number].begin + slack:
                lane.append(number)
                break
        else:
            found.append([number])
    return found
