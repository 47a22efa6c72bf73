"""What a picture says beside its boxes: how long steps took, and how two timelines differ."""

from __future__ import annotations

from collections.abc import Sequence

from pipegrad.printable import printable
from pipegrad.simulation.timeline import COMPUTE, Timeline, in_percent, in_time

_EQUAL = 5e-4  # a difference that rounds to 0.0 %


def title_of(timeline: Timeline) -> str:
    """Returns its name and where it comes from."""
    name = printable(timeline.name)
    return f"{name} ({timeline.source})" if name else timeline.source


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
        f"{title}: {in_time(end - begin)}{_each(timeline, step)}, "
        f"{in_percent(_compute_share(timeline, begin, end))} of it compute."
        for timeline, title, (begin, end) in shown
    ]
    if len(shown) > 1:
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
    if step is not None or count < 2:
        return ""
    return f" for {count} steps ({in_time(_seconds(timeline, None))} each)"


def _compute_share(timeline: Timeline, begin: float, end: float) -> float:
    computed = sum(
        max(min(span.end, end) - max(span.begin, begin), 0.0)
        for span in timeline.spans
        if span.kind in COMPUTE
    )
    return computed / ((end - begin) * timeline.num_ranks) if end > begin else 0.0


def _difference(first: tuple[Timeline, str, float], second: tuple[Timeline, str, float]) -> str:
    """Returns how step times differ: a prediction from its run, or the second from the first."""
    if first[0].source == "measured" and second[0].source == "predicted":
        first, second = second, first
    (one, one_title, one_seconds), (other, other_title, other_seconds) = first, second
    if (one.source, other.source) == ("predicted", "measured"):
        return _longer("The predicted step", one_seconds, "measured", other_seconds)
    return _longer(f"A step of {other_title}", other_seconds, f"one of {one_title}", one_seconds)


def _longer(subject: str, seconds: float, base_name: str, base: float) -> str:
    gap = seconds - base
    if not base or abs(gap) < _EQUAL * base:
        return f"{subject} is as long as {base_name}"
    than = "longer" if gap > 0 else "shorter"
    return (
        f"{subject} is {in_time(abs(gap))} ({in_percent(abs(gap) / base)}) {than} than {base_name}"
    )
