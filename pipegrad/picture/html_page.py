"""write_html: one page that shows timelines. It contains data, style and script: no network.

A timeline of 100,000 actions has some 300,000 spans. As columns of small numbers, compressed, they
take a few bytes each.
"""

from __future__ import annotations

import base64
import html
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from pipegrad import run_files
from pipegrad.limits import LARGEST
from pipegrad.picture.drawable import PALETTE, Track, check, sentences, titles, tracks
from pipegrad.printable import printable
from pipegrad.simulation.explain.critical_path import CriticalPath, critical_path
from pipegrad.simulation.explain.lookup import Lookup
from pipegrad.simulation.timeline import BESIDE, COMPUTE, KINDS, WAITS, Timeline

# One module of JavaScript, in this order; the head of each file describes it.
_SCRIPTS = ("data.js", "words.js", "strips.js", "paint.js", "address.js", "page.js")


def write_html(timelines: Sequence[Timeline], path: Path | str, *, title: str = "") -> None:
    """Writes a page that shows one timeline, or two in comparison.

    The page needs a browser of 2023 or later (`DecompressionStream`), and no network.

    Raises:
        ScheduleError: If a timeline cannot be drawn.
    """
    check(timelines)
    title = printable(title) or " and ".join(titles(timelines))
    data = {
        "title": title,
        "fields": FIELDS,
        "kinds": [PALETTE[kind]._asdict() | {"kind": kind} for kind in KINDS],
        "compute": len(COMPUTE),
        "waits": [KINDS.index(kind) for kind in WAITS],
        "beside": [KINDS.index(kind) for kind in BESIDE],
        "titles": titles(timelines),
        "sentences": sentences(timelines),
        "time_unit": timelines[0].time_unit,
        "timelines": [pack(timeline) for timeline in timelines],
    }
    run_files.replace(Path(path), _page(title, data).encode())


def _page(title: str, data: Mapping[str, Any]) -> str:
    folder = files("pipegrad.picture") / "page"
    texts = {name: (folder / name).read_text(encoding="utf-8") for name in _SCRIPTS}
    parts = {
        "TITLE": html.escape(title),
        "STYLE": (folder / "page.css").read_text(encoding="utf-8"),
        # Escape "<", because a label may contain ``</script>``.
        "DATA": json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        "SCRIPT": "\n".join(texts.values()),
    }
    # Split first, because a title may look like a mark.
    template = (folder / "page.html").read_text(encoding="utf-8").split("%%")
    return "".join(parts[t] if number % 2 else t for number, t in enumerate(template))


# Columns of a span, in the order in which page/data.js reads them. "gap" is the time since the end
# of the span before it in its track: mostly 0, which compresses best.
FIELDS = ("kind", "gap", "duration", "step", "stage", "microbatch", "peer", "which", "label")


def pack(timeline: Timeline) -> dict[str, Any]:
    """Returns a timeline as plain data; page/data.js unpacks it.

    Times are integers of `time_unit` seconds, and exact to half of it. The unit is 1 ns if the
    timeline takes up to 2 s, and 10 ns up to 21 s.
    """
    rows = list(tracks(timeline))
    lookup = Lookup(timeline)
    paths = [critical_path(lookup, step) for step in range(len(timeline.step_ends))]
    points = (p.seconds for row in timeline.memory for p in row)
    last = max(timeline.seconds, *(span.end for span in timeline.spans), *points)
    time_unit = _unit(last, 1e-9)
    memory_unit = _unit(max((p.num_bytes for row in timeline.memory for p in row), default=0), 1)
    labels = {text: n for n, text in enumerate(dict.fromkeys(s.label for s in timeline.spans))}
    return {
        "name": printable(timeline.name),
        "source": timeline.source,
        "num_ranks": timeline.num_ranks,
        "stage_to_rank": timeline.stage_to_rank,
        "step_ends": timeline.step_ends,
        "notes": {
            printable(name): printable(f"{value:.3g}" if isinstance(value, float) else value)
            for name, value in timeline.notes.items()
        },
        "time_unit": time_unit,
        "memory_unit": memory_unit,
        "labels": list(map(printable, labels)),
        "tracks": [[track.rank, int(track.is_beside), len(track.spans)] for track in rows],
        "spans": _compressed(_span_columns(timeline, rows, time_unit, labels)),
        "memory_counts": [len(points) for points in timeline.memory],
        "memory": _compressed(_memory_columns(timeline, time_unit, memory_unit)),
        "path": _compressed(_path_columns(paths, time_unit)),
        "path_words": [printable(str(path)) for path in paths],
    }


def _unit(largest: float, smallest: float) -> float:
    """Returns the smallest unit in which `largest` fits into 32 bits: `smallest`, or times ten."""
    while largest / smallest > LARGEST:
        smallest *= 10
    return smallest


def _span_columns(
    timeline: Timeline, rows: Sequence[Track], unit: float, labels: Mapping[str, int]
) -> Iterable[Iterable[int]]:
    spans = [timeline.spans[number] for track in rows for number in track.spans]
    begins = _rounded((span.begin for span in spans), unit)
    ends = _rounded((span.end for span in spans), unit)
    before = np.concatenate([[0], ends[:-1]])
    first = np.cumsum([0, *(len(track.spans) for track in rows)])[:-1]
    before[first[first < len(spans)]] = 0  # each track begins at 0
    kinds = {kind: number for number, kind in enumerate(KINDS)}
    yield (kinds[span.kind] for span in spans)
    yield begins - before
    yield ends - begins
    for name in FIELDS[3:-1]:
        yield (getattr(span, name) for span in spans)
    yield (labels[span.label] for span in spans)


def _path_columns(paths: Iterable[CriticalPath], unit: float) -> Iterable[Iterable[int]]:
    segments = [segment for path in paths for segment in path.segments]
    yield (segment.rank for segment in segments)
    yield (segment.kind in BESIDE for segment in segments)
    yield _rounded((segment.begin for segment in segments), unit)
    yield _rounded((segment.end for segment in segments), unit)


def _memory_columns(
    timeline: Timeline, time_unit: float, memory_unit: float
) -> Iterable[Iterable[int]]:
    points = list(chain.from_iterable(timeline.memory))
    yield _rounded((point.seconds for point in points), time_unit)
    yield _rounded((point.num_bytes for point in points), memory_unit)


def _rounded(values: Iterable[float], unit: float) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.rint(np.fromiter(values, np.float64) / unit).astype(np.int64)


def _compressed(columns: Iterable[Iterable[int]]) -> str:
    """Returns columns one after the other, little-endian, compressed by zlib, in base64."""
    arrays = [np.fromiter(column, "<i4") for column in columns]
    return base64.b64encode(zlib.compress(np.concatenate(arrays).tobytes(), 9)).decode()
