"""check: refuses what cannot be drawn, before a file is written."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from pipegrad.errors import ScheduleError
from pipegrad.limits import LARGEST
from pipegrad.simulation.timeline import KINDS, Timeline

_MOST = 2  # timelines in one picture


def check(timelines: object) -> None:
    """Refuses what cannot be drawn.

    Raises:
        ScheduleError: If there is none or are more than two, or a timeline has no spans, a rank or
            a kind that does not exist, or a time that is no number.
    """
    if not isinstance(timelines, Sequence) or not all(isinstance(t, Timeline) for t in timelines):
        raise ScheduleError("a picture takes a list of one or two timelines, found something else")
    if not 1 <= len(timelines) <= _MOST:
        raise ScheduleError(f"a picture shows one or two timelines, found {len(timelines)}")
    for timeline in timelines:
        try:
            problem = next(_problems(timeline), None)
        except TypeError as error:  # a file may hold a text where a number should be
            problem = str(error)
        if problem:
            raise ScheduleError(f"timeline {timeline.name!r} cannot be drawn: {problem}")


def _problems(timeline: Any) -> Iterator[str]:  # noqa: ANN401 - a file may hold other types
    if not isinstance(timeline.num_ranks, int) or not isinstance(timeline.name, str):
        yield f"it has {timeline.num_ranks!r} ranks and the name {timeline.name!r}"
    if not timeline.spans:
        yield "it has no spans; simulate with records=True, or record a step"
    for number, span in enumerate(timeline.spans):
        yield from (f"span {number} {problem}" for problem in _problems_of(span, timeline))
    ends = (0.0, *timeline.step_ends)
    if not all(before <= end < math.inf for before, end in pairwise(ends)):
        yield f"its steps end at {timeline.step_ends}, expected ascending seconds"
    if len(timeline.memory) not in (0, timeline.num_ranks):
        yield f"it has the memory of {len(timeline.memory)} ranks of {timeline.num_ranks}"
    points = (point for row in timeline.memory for point in row)
    if not all(0 <= point.seconds < math.inf and point.num_bytes >= 0 for point in points):
        yield "a point of its memory has a time or a number of bytes below 0"


def _problems_of(span: Any, timeline: Timeline) -> Iterator[str]:  # noqa: ANN401 - likewise
    if span.kind not in KINDS:
        yield f"is a {span.kind!r}, expected one of {', '.join(KINDS)}"
    if not 0 <= span.rank < timeline.num_ranks:
        yield f"is on rank {span.rank} of {timeline.num_ranks}"
    if not 0 <= span.begin <= span.end < math.inf:
        yield f"goes from {span.begin} to {span.end} seconds"
    numbers = (span.rank, *span[4:-1])
    if not all(isinstance(number, int) and abs(number) <= LARGEST for number in numbers):
        yield f"has a number that is no integer of 32 bits: {tuple(span)}"
    if not isinstance(span.label, str):
        yield f"has the label {span.label!r}, expected a text"
