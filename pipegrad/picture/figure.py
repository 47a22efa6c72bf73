"""write_figure: timelines as SVG, PNG or PDF, at the width of a phone. Needs matplotlib."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from importlib import import_module
from io import BytesIO
from itertools import groupby
from math import ceil
from operator import attrgetter, itemgetter
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NamedTuple

from pipegrad import run_files
from pipegrad.errors import ScheduleError
from pipegrad.picture.drawable import PALETTE, Paint, check, sentences, titles, tracks
from pipegrad.printable import printable
from pipegrad.simulation.timeline import COMPUTE, KINDS, Span, SpanKind, Timeline, TimeUnit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SUFFIXES = (".svg", ".png", ".pdf")
# Inches. A phone shows 360 points as 360 pixels, so no text is smaller than 9 points.
_WIDTH, _LEFT, _RIGHT = 5.0, 0.8, 0.12
_HEIGHTS = {"rank": 0.31, "beside": 0.16, "memory": 0.16}
_GAP, _PAIR_GAP, _HEADING = 0.13, 0.04, 0.24
_TALLEST = 14.0
_FONT, _SMALL_FONT = 10.0, 9.0  # points
_LETTERS, _COLUMNS, _LINE_HEIGHT = 68, 2, 0.17  # of a sentence, of the legend, of both in inches
_LETTER = 0.64  # width of a letter, of its size
_THIN = 1.5  # points
_MANY_SPANS = 5000  # as vectors they would make a file of megabytes
_LINE, _SOFT, _BAND, _MEMORY, _LEVEL = "#d9dee4", "#5b6470", "#f6f7f9", "#cbd2d9", "#7c8894"
_STYLE = {
    "font.family": "sans-serif",
    # matplotlib brings the first, so that a figure is the same on every machine.
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Helvetica", "Arial"],
    "hatch.linewidth": 0.5,
    "text.parse_math": False,  # a name may have a $
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "pipegrad",  # the same picture is the same file
}


class Strip(NamedTuple):
    """A part of the figure from left to right: a track of spans, or the memory of a rank."""

    timeline: Timeline
    title: str  # of the timeline
    rank: int
    what: str  # a key of _HEIGHTS
    top: float  # in inches from the top of the first strip
    height: float
    spans: list[int]


def write_figure(timelines: Sequence[Timeline], path: Path | str, *, title: str = "") -> None:
    """Writes a figure of one timeline, or of two in comparison.

    Args:
        timelines: One or two. A prediction and the run that it predicts are drawn rank by rank,
            others one above the other. Both have the same scale of time.
        path: The file to write; its name ends in .svg, .png or .pdf.
        title: Written above it.

    Raises:
        ScheduleError: If a timeline cannot be drawn, or the file's name ends in something else.
        ImportError: If matplotlib is missing.
    """
    check(timelines)
    path = Path(path)
    if path.suffix.lower() not in _SUFFIXES:
        raise ScheduleError(
            f"a figure is written as {', '.join(_SUFFIXES)}, found {path.name!r}: change the name"
        )
    try:
        matplotlib = import_module("matplotlib")
        import_module("matplotlib.figure")
    except ImportError as error:
        raise ImportError(
            f"a figure needs the library matplotlib: pip install 'pipegrad[picture]' ({error})"
        ) from error
    kind = path.suffix.lower().removeprefix(".")
    # The same picture is the same file: no date is in it.
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    content = BytesIO()
    with matplotlib.rc_context(_STYLE):
        figure = _drawn(timelines, printable(title))
        figure.savefig(content, format=kind, dpi=200, metadata=undated)
    run_files.replace(path, content.getvalue())


def _drawn(timelines: Sequence[Timeline], title: str) -> Figure:
    from matplotlib.figure import Figure

    strips = list(_strips(timelines))
    bottom = strips[-1].top + strips[-1].height
    shrink = min(1.0, _TALLEST / bottom)
    about = [line for text in sentences(timelines)[0] for line in wrap(text, _LETTERS)]
    num_kinds = len({span.kind for timeline in timelines for span in timeline.spans})
    head = _LINE_HEIGHT * len(about) + (0.4 if title else 0.15)
    foot = 0.42 + _LINE_HEIGHT * ceil(num_kinds / _COLUMNS)
    height = bottom * shrink + head + foot
    figure = Figure(figsize=(_WIDTH, height), facecolor="white")
    box = (_LEFT / _WIDTH, foot / height, 1 - (_LEFT + _RIGHT) / _WIDTH, bottom * shrink / height)
    axes = figure.add_axes(box)
    seconds = max(max(t.seconds, *(s.end for s in t.spans)) for t in timelines) or 1.0
    axes.set_xlim(0, seconds * 1.005)
    axes.set_ylim(bottom, 0)
    _frame(axes, seconds, timelines[0].time_unit)
    points_per_second = 72 * (_WIDTH - _LEFT - _RIGHT) / (seconds * 1.005)
    many = sum(len(t.spans) for t in timelines) > _MANY_SPANS
    for strip in strips:
        _draw_strip(axes, strip, timelines, points_per_second, rasterized=many)
        _write_texts(axes, strip, points_per_second, shrink)
    _name_ranks(axes, strips, timelines, shrink)
    _step_ends(axes, strips)
    top = 1 - 0.12 / height
    if title:
        figure.text(0.01, top, title, fontsize=12, fontweight="bold", va="top")
        top -= 0.25 / height
    figure.text(0.01, top, "\n".join(about), fontsize=_SMALL_FONT, color=_SOFT, va="top")
    _legend(figure, timelines)
    return figure


def _strips(timelines: Sequence[Timeline]) -> Iterator[Strip]:
    """Yields all strips, from the top to the bottom."""
    top, is_pair = 0.0, _is_pair(timelines)
    names, by_rank = titles(timelines), [_strips_by_rank(timeline) for timeline in timelines]
    order = [(which, rank) for which, t in enumerate(timelines) for rank in range(t.num_ranks)]
    if is_pair:
        order.sort(key=itemgetter(1))
    for (which, rank), (_, following) in zip(order, [*order[1:], (0, -1)], strict=True):
        if rank == 0 and len(timelines) > 1 and not is_pair:
            top += _HEADING
        for what, spans in by_rank[which][rank]:
            yield Strip(timelines[which], names[which], rank, what, top, _HEIGHTS[what], spans)
            top += _HEIGHTS[what] + 0.015
        top += _PAIR_GAP if is_pair and following == rank else _GAP


def _is_pair(timelines: Sequence[Timeline]) -> bool:
    """True if one is the prediction of the other: then they are drawn rank by rank."""
    return len({t.source for t in timelines}) > 1 and len({t.num_ranks for t in timelines}) == 1


def _strips_by_rank(timeline: Timeline) -> list[list[tuple[str, list[int]]]]:
    """Returns for each rank its strips: what is in them, and their spans."""
    result: list[list[tuple[str, list[int]]]] = [[] for _ in range(timeline.num_ranks)]
    for track in tracks(timeline):
        result[track.rank].append(("beside" if track.is_beside else "rank", track.spans))
    for strips in result if timeline.memory else ():
        strips.append(("memory", []))
    return result


def _by_rank(strips: Sequence[Strip]) -> Iterator[list[Strip]]:
    for _, own in groupby(strips, key=attrgetter("title", "rank")):
        yield list(own)


def _frame(axes: Axes, seconds: float, time_unit: TimeUnit) -> None:
    scale, unit = (1e3, "ms") if seconds < 1 else (1, "s")
    if time_unit == "units":
        scale, unit = 1, "units"
    axes.xaxis.set_major_formatter(lambda value, _: f"{value * scale:g}")
    axes.set_xlabel(unit, fontsize=_SMALL_FONT, color=_SOFT, labelpad=1)
    axes.tick_params(axis="x", labelsize=_SMALL_FONT, length=3, color=_LINE, labelcolor=_SOFT)
    axes.set_yticks([])
    axes.grid(axis="x", color=_LINE, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)


def _draw_strip(
    axes: Axes,
    strip: Strip,
    timelines: Sequence[Timeline],
    points_per_second: float,
    *,
    rasterized: bool,
) -> None:
    axes.axhspan(strip.top, strip.top + strip.height, color=_BAND, linewidth=0, zorder=0.4)
    if strip.what == "memory":
        _draw_memory(axes, strip, timelines)
    boxes: defaultdict[tuple[SpanKind, bool], list[tuple[float, float]]] = defaultdict(list)
    for number in strip.spans:
        span = strip.timeline.spans[number]
        is_thin = span.seconds * points_per_second < _THIN
        boxes[span.kind, is_thin].append((span.begin, span.seconds))
    for (kind, is_thin), ranges in boxes.items():
        style = _style(PALETTE[kind], is_thin=is_thin)
        place = (strip.top, strip.height)
        axes.broken_barh(ranges, place, rasterized=rasterized, zorder=2, **style)


def _style(paint: Paint, *, is_thin: bool = False) -> dict[str, Any]:
    """Returns how boxes of a kind look; thin ones have no room for lines."""
    if not paint.is_hatched:
        return {"facecolor": paint.fill, "edgecolor": "white", "linewidth": 0 if is_thin else 0.4}
    lines, between = _paler(paint.fill, 0.6), _paler(paint.fill, 0.12)
    if is_thin:
        return {"facecolor": _paler(paint.fill, 0.3), "linewidth": 0}
    hatch = "\\" if paint.is_mirrored else "/"
    return {"facecolor": between, "edgecolor": lines, "hatch": hatch * 5, "linewidth": 0}


def _paler(colour: str, share: float) -> str:
    """Returns a colour on white. With alpha instead, SVG files lose the lines of a hatch."""
    parts = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(255 - share * (255 - part)):02x}" for part in parts)


def _draw_memory(axes: Axes, strip: Strip, timelines: Sequence[Timeline]) -> None:
    most = max((p.num_bytes for t in timelines for points in t.memory for p in points), default=0)
    points = [*strip.timeline.memory[strip.rank]]
    if not points or not most:
        return
    seconds = [*(p.seconds for p in points), max(strip.timeline.seconds, points[-1].seconds)]
    held = [*(p.num_bytes for p in points), points[-1].num_bytes]
    level = [strip.top + strip.height * (1 - num_bytes / most) for num_bytes in held]
    floor = strip.top + strip.height
    axes.fill_between(seconds, level, floor, step="post", color=_MEMORY, linewidth=0, zorder=2)
    axes.step(seconds, level, where="post", color=_LEVEL, linewidth=0.6, zorder=2)


def _write_texts(axes: Axes, strip: Strip, points_per_second: float, shrink: float) -> None:
    """Writes into each box what it is, as large as it fits."""
    largest = _FONT if strip.what == "rank" else _SMALL_FONT
    several = len(strip.timeline.stage_to_rank) > strip.timeline.num_ranks
    for number in strip.spans:
        span = strip.timeline.spans[number]
        width, height = span.seconds * points_per_second - 1.5, strip.height * shrink * 72 - 2
        for text in _texts(span, several=several) if width > 1 else ():
            lines = text.split("\n")
            widest = max(len(line) for line in lines) or 1
            size = min(largest, width / (_LETTER * widest), height / len(lines))
            if size < _SMALL_FONT:
                continue
            axes.text(
                (span.begin + span.end) / 2, strip.top + strip.height / 2, text, fontsize=size,
                color=PALETTE[span.kind].text, ha="center", va="center_baseline", zorder=3,
                linespacing=1.0,
            )  # fmt: skip
            break


def _texts(span: Span, *, several: bool) -> Sequence[str]:
    """Returns what may stand in a box, the longest first."""
    if span.kind in COMPUTE:
        kind = f"{span.stage}{span.kind}" if several else span.kind
        microbatch = span.microbatch
        return f"{kind}{microbatch}", f"{kind}\n{microbatch}", f"{span.kind}\n{microbatch}"
    return (
        () if PALETTE[span.kind].is_hatched or span.kind == "transfer" else (printable(span.label),)
    )


def _name_ranks(
    axes: Axes, strips: Sequence[Strip], timelines: Sequence[Timeline], shrink: float
) -> None:
    size = max(min(_FONT, _HEIGHTS["rank"] * shrink * 72 * 0.8), 2.0)
    left = -_LEFT / (_WIDTH - _LEFT - _RIGHT) + 0.012
    place: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "va": "center"}
    for own in _by_rank(strips):
        first, last, timeline, rank = own[0], own[-1], own[0].timeline, own[0].rank
        stages = [str(s) for s, owner in enumerate(timeline.stage_to_rank) if owner == rank]
        second = timeline.source if _is_pair(timelines) else f"stage {', '.join(stages)}"
        middle = first.top + first.height / 2
        axes.text(left, middle, f"rank {rank}", fontsize=size, fontweight="bold", **place)
        if shrink == 1 and last is not first:
            axes.text(left, middle + 0.17, second, fontsize=_SMALL_FONT, color=_SOFT, **place)
        if rank == 0 and len(timelines) > 1 and not _is_pair(timelines):
            axes.text(left, first.top - 0.1, first.title, fontsize=_FONT, **place)


def _step_ends(axes: Axes, strips: Sequence[Strip]) -> None:
    for own in _by_rank(strips):
        ends = own[0].timeline.step_ends
        if len(ends) > 1:
            floor = own[-1].top + own[-1].height
            axes.vlines(ends, own[0].top - 0.02, floor + 0.02, "#1b1f24", linewidth=0.7, zorder=4)


def _legend(figure: Figure, timelines: Sequence[Timeline]) -> None:
    from matplotlib.patches import Patch

    present = {span.kind for timeline in timelines for span in timeline.spans}
    patches = [
        Patch(label=_legend_text(kind), **_style(PALETTE[kind]))
        for kind in KINDS
        if kind in present
    ]
    figure.legend(
        handles=patches, loc="lower left", bbox_to_anchor=(0.0, 0.0), ncols=_COLUMNS, frameon=False,
        fontsize=_SMALL_FONT, handlelength=1.4, handleheight=0.9, columnspacing=1.2,
        handletextpad=0.5, borderaxespad=0.4,
    )  # fmt: skip


def _legend_text(kind: SpanKind) -> str:
    return f"{kind} {PALETTE[kind].name}" if kind in COMPUTE else PALETTE[kind].name
