"""What a picture says beside its boxes: how long a step took, and how two timelines differ."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pipegrad.errors import ScheduleError
from pipegrad.simulation.timeline import COMPUTE, KINDS, Timeline

_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_MOST = 2  # timelines in one picture


def check(timelines: Sequence[Timeline]) -> None:
    """Refuses what cannot be drawn.

    Raises:
        ScheduleError: If there is none or are more than two, or a timeline has no spans, a rank or
            a kind that does not exist, or a time that is no number.
    """
    if isinstance(timelines, Timeline) or not all(isinstance(t, Timeline) for t in timelines):
        raise ScheduleError("a picture takes a list of one or two timelines, found something else")
    if not 1 <= len(timelines) <= _MOST:
        raise ScheduleError(f"a picture shows one or two timelines, found {len(timelines)}")
    for timeline in timelines:
        try:
            problem = _problem(timeline)
        except TypeError as error:  # a file may hold a text where a number should be
            problem = str(error)
        if problem:
            raise ScheduleError(f"timeline {timeline.name!r} cannot be drawn: {problem}")


def _problem(timeline: Timeline) -> str | None:
    if not timeline.spans:
        return "it has no spans; simulate with records=True, or record a step"
    for number, span in enumerate(timeline.spans):
        if span.kind not in KINDS:
            return f"span {number} is a {span.kind!r}, expected one of {', '.join(KINDS)}"
        if not 0 <= span.rank < timeline.num_ranks:
            return f"span {number} is on rank {span.rank} of {timeline.num_ranks}"
        if not 0 <= span.begin <= span.end < math.inf:
            return f"span {number} goes from {span.begin} to {span.end} seconds"
        if not all(isinstance(value, int) for value in span[4:-1]):
            return f"span {number} has a number that is no integer: {tuple(span)}"
    ends = (0.0, *timeline.step_ends)
    if not all(before <= end < math.inf for before, end in zip(ends, ends[1:], strict=False)):
        return f"its steps end at {timeline.step_ends}, expected ascending seconds"
    if len(timeline.memory) not in (0, timeline.num_ranks):
        return f"it has the memory of {len(timeline.memory)} ranks of {timeline.num_ranks}"
    return None


def duration(seconds: float) -> str:
    """Returns a time with four digits and a unit, such as ``12.35 ms``."""
    size, unit = next((u for u in _UNITS if seconds >= u[0]), _UNITS[-1])
    return f"{seconds / size:.4g} {unit}"


def title_of(timeline: Timeline) -> str:
    """Returns its name and where it comes from."""
    return f"{timeline.name} ({timeline.source})" if timeline.name else timeline.source


def titles(timelines: Sequence[Timeline]) -> list[str]:
    """Returns titles that differ; the second of two like ones is numbered."""
    names = [title_of(timeline) for timeline in timelines]
    return [f"{n} (2)" if n in names[:i] else n for i, n in enumerate(names)]


def sentences(timelines: Sequence[Timeline]) -> list[list[str]]:
    """Returns the sentences about all steps together, and then those about each step.

    If the number of steps differs, only those are compared that both have.
    """
    num_steps = max(len(timeline.step_ends) for timeline in timelines)
    return [_about(timelines, step) for step in (None, *range(num_steps))]


def _about(timelines: Sequence[Timeline], step: int | None) -> list[str]:
    shown = [
        (timeline, title, _begin_and_end(timeline, step))
        for timeline, title in zip(timelines, titles(timelines), strict=True)
        if step is None or step < len(timeline.step_ends)
    ]
    parts = [
        f"{title}: {duration(end - begin)}{_each(timeline, step)}, "
        f"{_compute_share(timeline, begin, end):.1%} of it compute."
        for timeline, title, (begin, end) in shown
    ]
    if len(shown) == _MOST:
        parts.append(_difference(*((t, n, _seconds(t, step)) for t, n, _ in shown)) + ".")
    return parts


def _begin_and_end(timeline: Timeline, step: int | None) -> tuple[float, float]:
    if step is None:
        return 0.0, timeline.seconds or max(span.end for span in timeline.spans)
    return (timeline.step_ends[step - 1] if step else 0.0), timeline.step_ends[step]


def _seconds(timeline: Timeline, step: int | None) -> float:
    """Returns the time of a step, or of a mean one: two runs may have other numbers of steps."""
    begin, end = _begin_and_end(timeline, step)
    return (end - begin) / (max(len(timeline.step_ends), 1) if step is None else 1)


def _each(timeline: Timeline, step: int | None) -> str:
    count = len(timeline.step_ends)
    if step is not None or count < 2:  # noqa: PLR2004 - one step is said already
        return ""
    return f" for {count} steps ({duration(_seconds(timeline, None))} each)"


def _compute_share(timeline: Timeline, begin: float, end: float) -> float:
    computed = sum(
        max(min(span.end, end) - max(span.begin, begin), 0.0)
        for span in timeline.spans
        if span.kind in COMPUTE
    )
    return computed / ((end - begin) * timeline.num_ranks) if end > begin else 0.0


def _difference(first: tuple[Timeline, str, float], second: tuple[Timeline, str, float]) -> str:
    """Returns how the step times differ: a prediction from the run, or the second from the first."""
    if first[0].source == "measured" and second[0].source == "predicted":
        first, second = second, first
    (one, one_title, one_seconds), (other, other_title, other_seconds) = first, second
    if (one.source, other.source) == ("predicted", "measured"):
        return _longer("The predicted step", one_seconds, "measured", other_seconds)
    return _longer(f"A step of {other_title}", other_seconds, f"one of {one_title}", one_seconds)


def _longer(subject: str, seconds: float, base_name: str, base: float) -> str:
    gap = seconds - base
    if not base or abs(gap) < 5e-4 * base:  # noqa: PLR2004 - what rounds to 0.0 %
        return f"{subject} is as long as {base_name}"
    than = "longer" if gap > 0 else "shorter"
    return f"{subject} is {duration(abs(gap))} ({abs(gap) / base:.1%}) {than} than {base_name}"
