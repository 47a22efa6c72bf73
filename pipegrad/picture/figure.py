"""write_figure: timelines as SVG, at the width of a phone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from textwrap import wrap

from pipegrad import run_files
from pipegrad.errors import ScheduleError
from pipegrad.picture.drawable import PALETTE, Track, check, sentences, titles, tracks
from pipegrad.printable import printable
from pipegrad.simulation.timeline import COMPUTE, KINDS, Span, SpanKind, Timeline, in_time

# Pixels. A phone shows them as they are, so no text is smaller than 9.
_WIDTH, _LEFT, _ROW, _BESIDE, _GAP, _LINE = 360, 58, 22, 11, 8, 13
_LETTERS, _LETTER = 62, 5.6  # in a line, and the width of one
_SOFT, _BAND, _MEMORY = "#5b6470", "#f6f7f9", "#cbd2d9"
_TICKS, _COLUMNS = 4, 2  # of the scale of time, of the legend


def write_figure(timelines: Sequence[Timeline], path: Path | str, *, title: str = "") -> None:
    """Writes a figure of one timeline, or of two in comparison.

    Args:
        timelines: One or two. A prediction and the run that it predicts are drawn rank by rank,
            others one above the other. Both have the same scale of time.
        path: The file to write; its name ends in .svg.
        title: Text above the figure.

    Raises:
        ScheduleError: If a timeline cannot be drawn, or the file's name ends in something else.
    """
    check(timelines)
    path = Path(path)
    if path.suffix.lower() != ".svg":
        raise ScheduleError(
            f"a figure is written as .svg, found {path.name!r}: change the name, and convert the "
            "file if you need another format"
        )
    run_files.replace(path, _Figure(timelines).drawn(printable(title)).encode())


class _Figure:
    """A figure; `_top` is the vertical position of its next element."""

    def __init__(self, timelines: Sequence[Timeline]) -> None:
        self._timelines = timelines
        self._parts = list[str]()
        self._top = 4.0
        ends = [max(t.seconds, *(span.end for span in t.spans)) for t in timelines]
        self._seconds = max(ends) or 1.0
        self._scale = (_WIDTH - _LEFT - 6) / self._seconds
        present = {span.kind for timeline in timelines for span in timeline.spans}
        self._kinds = [kind for kind in KINDS if kind in present]
        # A prediction and its run are drawn rank by rank.
        sources, sizes = ({t.source for t in timelines}, {t.num_ranks for t in timelines})
        self._is_pair = len(sources) > 1 and len(sizes) == 1

    def drawn(self, title: str) -> str:
        """Returns the whole figure."""
        for line in wrap(title, _LETTERS):
            self._text(4, line, 'font-weight="bold"')
            self._top += _LINE
        for line in (line for text in sentences(self._timelines)[0] for line in wrap(text, 72)):
            self._text(4, line, f'fill="{_SOFT}"')
            self._top += _LINE
        self._ranks()
        for tick in range(_TICKS + 1):
            seconds = tick * self._seconds / _TICKS
            shown = in_time(seconds, self._timelines[0].time_unit)
            anchor = ("start", *["middle"] * (_TICKS - 1), "end")[tick]
            x = _LEFT + seconds * self._scale
            self._text(x, shown, f'fill="{_SOFT}" text-anchor="{anchor}"')
        self._top += 2 * _LINE
        for number, kind in enumerate(self._kinds):
            column, is_last = number % _COLUMNS, number == len(self._kinds) - 1
            x = 4 + column * _WIDTH / _COLUMNS
            self._boxes(kind, x, _BESIDE, [(0.0, 16.0)])
            name = f"{kind} {PALETTE[kind].name}" if kind in COMPUTE else PALETTE[kind].name
            self._text(x + 22, name)
            self._top += _LINE * (column == _COLUMNS - 1 or is_last)
        size = f'viewBox="0 0 {_WIDTH} {self._top:.0f}" width="{_WIDTH}" height="{self._top:.0f}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif"'
        patterns = map(_pattern, (kind for kind in self._kinds if PALETTE[kind].is_hatched))
        back = f'<rect width="{_WIDTH}" height="{self._top:.0f}" fill="white"/>'
        return "\n".join([f'{head} font-size="9">', *patterns, back, *self._parts, "</svg>", ""])

    def _ranks(self) -> None:
        names, by_timeline = titles(self._timelines), [list(tracks(t)) for t in self._timelines]
        order = [(n, rank) for n, t in enumerate(self._timelines) for rank in range(t.num_ranks)]
        for number, rank in sorted(order, key=lambda each: each[1]) if self._is_pair else order:
            timeline = self._timelines[number]
            if rank == 0 and len(self._timelines) > 1 and not self._is_pair:
                self._text(4, names[number], 'font-weight="bold"')
                self._top += _LINE
            own = [track for track in by_timeline[number] if track.rank == rank]
            stages = [str(s) for s, holder in enumerate(timeline.stage_to_rank) if holder == rank]
            second = timeline.source if self._is_pair else f"stage {', '.join(stages)}"
            self._rank(timeline, rank, own, second)

    def _rank(self, timeline: Timeline, rank: int, own: Sequence[Track], second: str) -> None:
        begin = self._top
        self._text(4, f"rank {rank}", 'font-weight="bold"')
        for track in own:
            height = _BESIDE if track.is_beside else _ROW
            self._track(timeline, [timeline.spans[number] for number in track.spans], height)
        if timeline.memory:
            self._memory(timeline, rank)
        end, self._top = max(self._top, begin + 2 * _LINE), begin + _LINE
        self._text(4, second, f'fill="{_SOFT}"')
        self._top = end + _GAP
        for seconds in timeline.step_ends if len(timeline.step_ends) > 1 else ():
            x = _LEFT + seconds * self._scale
            self._parts.append(f'<path stroke="#1b1f24" d="M{x:.1f} {begin:.1f}V{end:.1f}"/>')

    def _track(self, timeline: Timeline, spans: Sequence[Span], height: int) -> None:
        boxes = defaultdict[SpanKind, list[tuple[float, float]]](list)
        for span in spans:
            boxes[span.kind].append((span.begin * self._scale, span.seconds * self._scale))
        band = f'x="{_LEFT}" y="{self._top:.1f}" width="{_WIDTH - _LEFT}" height="{height}"'
        self._parts.append(f'<rect {band} fill="{_BAND}"/>')
        for kind, places in boxes.items():
            self._boxes(kind, _LEFT, height, places)
        several = len(timeline.stage_to_rank) > timeline.num_ranks
        for span in spans:
            room = span.seconds * self._scale / _LETTER
            shown = next((text for text in _texts(span, several=several) if len(text) <= room), "")
            if shown:
                middle = _LEFT + (span.begin + span.end) / 2 * self._scale
                style = f'fill="{PALETTE[span.kind].text}" text-anchor="middle"'
                self._text(middle, shown, style, down=height / 2 + 3)
        self._top += height + 1

    def _boxes(
        self, kind: SpanKind, left: float, height: int, places: Sequence[tuple[float, float]]
    ) -> None:
        """Draws boxes as one line of their height, because a file of many boxes is large."""
        y = self._top + height / 2
        lines = (f"M{left + x:.1f} {y:.1f}h{max(width - 0.3, 0.1):.1f}" for x, width in places)
        fill = f"url(#{_id(kind)})" if PALETTE[kind].is_hatched else PALETTE[kind].fill
        self._parts.append(f'<path stroke="{fill}" stroke-width="{height}" d="{"".join(lines)}"/>')

    def _memory(self, timeline: Timeline, rank: int) -> None:
        rows = (row for each in self._timelines for row in each.memory)
        most = max((point.num_bytes for row in rows for point in row), default=0) or 1
        floor, steps = self._top + _BESIDE, list[str]()
        for point in timeline.memory[rank]:
            x, y = _LEFT + point.seconds * self._scale, floor - _BESIDE * point.num_bytes / most
            steps.append(f"H{x:.1f}V{y:.1f}")
        end = _LEFT + timeline.seconds * self._scale
        outline = f"M{_LEFT} {floor:.1f}{''.join(steps)}H{end:.1f}V{floor:.1f}Z"
        self._parts.append(f'<path fill="{_MEMORY}" d="{outline}"/>')
        self._top += _BESIDE + 1

    def _text(self, x: float, text: str, style: str = "", *, down: float = 9) -> None:
        place = f'x="{x:.1f}" y="{self._top + down:.1f}"'
        self._parts.append(f"<text {place} {style}>{escape(text)}</text>")


def _texts(span: Span, *, several: bool) -> Iterator[str]:
    """Yields possible texts of a box, the longest first."""
    if span.kind in COMPUTE:
        yield span.action if several else f"{span.kind}{span.microbatch}"
        yield str(span.microbatch)
    elif not PALETTE[span.kind].is_hatched and span.kind != "transfer":
        yield printable(span.label)


def _id(kind: SpanKind) -> str:
    return kind.replace(" ", "-")


def _pattern(kind: SpanKind) -> str:
    """Returns the lines of a wait, and a pale ground between them."""
    paint = PALETTE[kind]
    turn = f'patternTransform="rotate({-45 if paint.is_mirrored else 45})"'
    size = 'width="4" height="4" patternUnits="userSpaceOnUse"'
    ground = f'<rect width="4" height="4" fill="{paint.fill}" fill-opacity="0.12"/>'
    line = f'<path d="M0 0V4" stroke="{paint.fill}" stroke-width="2"/>'
    return f'<pattern id="{_id(kind)}" {size} {turn}>{ground}{line}</pattern>'
