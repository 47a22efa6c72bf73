"""Code that all pictures share: checks, tracks, colours, and sentences about timelines.

Colours are from Okabe and Ito, because people who see red and green alike can distinguish them.
Waits are hatched in the colour of the work that they wait for.

Source: M. Okabe and K. Ito, Color Universal Design, https://jfly.uni-koeln.de/color/
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from pipegrad.errors import ScheduleError
from pipegrad.printable import printable
from pipegrad.simulation.timeline import (
    COMPUTE,
    ON_RANK,
    Span,
    SpanKind,
    Timeline,
    check_timeline,
    in_percent,
    in_time,
)

_ROUNDING = 1e-9  # of the whole: spans that overlap by less do so because numbers are rounded


def check(timelines: Any) -> None:  # noqa: ANN401 - whatever a user gives
    """Checks that timelines can be drawn.

    Raises:
        ScheduleError: If there are none or more than two, or if a timeline has no spans, a rank or
            a kind that does not exist, or a time that is no number.
    """
    is_list = isinstance(timelines, Sequence) and len(timelines) in (1, 2)
    if not is_list or not all(isinstance(timeline, Timeline) for timeline in timelines):
        raise ScheduleError(
            f"a picture takes a list of one or two timelines, found {timelines!r:.80}"
        )
    for timeline in timelines:
        try:
            check_timeline(timeline)
            if not timeline.spans:
                raise ScheduleError("it has no spans; simulate with records=True, or record a step")
            if min(span.begin for span in timeline.spans) < 0:
                raise ScheduleError("a span begins before the timeline does")
        # A timeline from a user's code may hold anything.
        except (ScheduleError, TypeError, AttributeError) as error:
            raise ScheduleError(f"timeline {timeline.name!r} cannot be drawn: {error}") from error
    if len({timeline.time_unit for timeline in timelines}) > 1:
        raise ScheduleError("one timeline is in seconds, the other in units: they do not compare")


class Track(NamedTuple):
    """Spans that do not overlap.

    Attributes:
        rank: Their rank.
        is_beside: True for work in parallel with the rank's own work, False for this work itself.
        spans: Their positions in the timeline's spans, in order of time.
    """

    rank: int
    is_beside: bool
    spans: list[int]


def tracks(timeline: Timeline) -> Iterator[Track]:
    """Yields the tracks of all ranks: first a rank's own work, then work in parallel with it.

    Every rank has a track for its spans, which may be empty. If recorded spans of a rank overlap,
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
                yield Track(rank, is_beside, own)


def _stacked(row: Iterable[int], spans: tuple[Span, ...], slack: float) -> list[list[int]]:
    """Returns tracks; each span is in the first track that is free at its start."""
    result: list[list[int]] = []
    for number in row:
        for track in result:
            if spans[track[-1]].end <= spans[number].begin + slack:
                track.append(number)
                break
        else:
            result.append([number])
    return result


_DARK, _LIGHT = "#111111", "#ffffff"


class Paint(NamedTuple):
    """The look of a kind of span.

    Attributes:
        name: The kind in words.
        fill: Its colour; if it is hatched, the colour of the lines.
        text: The colour of text on it.
        is_hatched: True for waits: lines, and the background between them.
        is_mirrored: True if the lines fall instead of rise.
    """

    name: str
    fill: str
    text: str = _DARK
    is_hatched: bool = False
    is_mirrored: bool = False


# Red and purple differ from the palette, because white text must be readable on them, and they must
# be visible on a dark page.
_BLUE, _RED, _PURPLE, _GREY = "#0072b2", "#bf4f00", "#a5438f", "#7f7f7f"
PALETTE: dict[SpanKind, Paint] = {
    "F": Paint("forward", "#56b4e9"),
    "B": Paint("backward", "#e69f00"),
    "I": Paint("backward of inputs", "#f0e442"),
    "W": Paint("backward of weights", "#009e73"),
    "optimizer": Paint("optimizer", "#cc79a7"),
    "host": Paint("host", "#a0a0a0"),
    "wait for receive": Paint("wait for receive", _BLUE, is_hatched=True),
    "wait for send": Paint("wait for send", _BLUE, is_hatched=True, is_mirrored=True),
    "wait for reduction": Paint("wait for reduction", _RED, is_hatched=True),
    "wait for parameters": Paint("wait for parameters", _PURPLE, is_hatched=True),
    "wait for ranks": Paint("wait for ranks", _GREY, is_hatched=True, is_mirrored=True),
    "transfer": Paint("transfer", _BLUE, _LIGHT),
    "reduction": Paint("gradient reduction", _RED, _LIGHT),
    "parameter sync": Paint("parameter sync", _PURPLE, _LIGHT),
}


def title_of(timeline: Timeline) -> str:
    """Returns the name and the source of a timeline."""
    name = printable(timeline.name)
    source = f"{timeline.source}, in units" if timeline.time_unit == "units" else timeline.source
    return f"{name} ({source})" if name else source


def titles(timelines: Sequence[Timeline]) -> list[str]:
    """Returns titles that differ; the second of two equal ones gets a number."""
    names = [title_of(timeline) for timeline in timelines]
    return [f"{n} (2)" if n in names[:i] else n for i, n in enumerate(names)]


def sentences(timelines: Sequence[Timeline]) -> list[list[str]]:
    """Returns the sentences about all steps together, then the sentences about each step."""
    num_steps = max(len(timeline.step_ends) for timeline in timelines)
    return [_about(timelines, step) for step in (None, *range(num_steps))]


def _about(timelines: Sequence[Timeline], step: int | None) -> list[str]:
    parts = list[str]()
    for timeline, title in zip(timelines, titles(timelines), strict=True):
        count, time_unit = len(timeline.step_ends), timeline.time_unit
        if step is not None and step >= count:
            continue
        begin, end = 0.0, timeline.seconds or max(span.end for span in timeline.spans)
        if step is not None:
            begin, end = timeline.step(step)
        is_several = step is None and count > 1
        mean = in_time((end - begin) / max(count, 1), time_unit)
        each = f" for {count} steps ({mean} each)" if is_several else ""
        computes = (span for span in timeline.spans if span.kind in COMPUTE)
        computed = sum(max(min(s.end, end) - max(s.begin, begin), 0.0) for s in computes)
        share = computed / ((end - begin) * timeline.num_ranks) if end > begin else 0.0
        length = in_time(end - begin, time_unit)
        parts.append(f"{title}: {length}{each}; ranks compute in {in_percent(share)} of the time.")
    return parts
