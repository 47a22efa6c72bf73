"""write_html: one page that shows timelines. It contains data, style and script: no network.

A timeline of 100,000 actions has some 300,000 spans. As columns of whole numbers, compressed, they
take a few bytes each.
"""

from __future__ import annotations

import base64
import html
import json
import zlib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from pipegrad import run_files
from pipegrad.picture.drawable import PALETTE, check, sentences, titles, tracks
from pipegrad.printable import printable
from pipegrad.simulation.explain.critical_path import critical_path
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


# Columns of a span. A kind is its number in KINDS, a label its number in the labels.
FIELDS = ("kind", "begin", "duration", "step", "stage", "microbatch", "peer", "which", "label")


def pack(timeline: Timeline) -> dict[str, Any]:
    """Returns a timeline as plain data; page/data.js unpacks it.

    Times are in whole nanoseconds, or billionths of the timeline's unit.
    """
    rows = list(tracks(timeline))
    lookup = Lookup(timeline)
    paths = [critical_path(lookup, step) for step in range(len(timeline.step_ends))]
    labels = {text: n for n, text in enumerate(dict.fromkeys(s.label for s in timeline.spans))}
    kinds = {kind: number for number, kind in enumerate(KINDS)}
    spans = [
        (
            kinds[s.kind],
            _whole(s.begin),
            _whole(s.end) - _whole(s.begin),
            *s[4:-1],
            labels[s.label],
        )
        for s in (timeline.spans[number] for track in rows for number in track.spans)
    ]
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
        "labels": list(map(printable, labels)),
        "tracks": [[track.rank, track.is_beside, len(track.spans)] for track in rows],
        "path_words": [printable(str(path)) for path in paths],
        "packed": _compressed(
            {
                # Columns, because alike numbers side by side compress best.
                "spans": list(zip(*spans, strict=True)),
                "memory": [[(_whole(p.seconds), p.num_bytes) for p in x] for x in timeline.memory],
                "path": [
                    (own.rank, own.kind in BESIDE, _whole(own.begin), _whole(own.end))
                    for path in paths
                    for own in path.segments
                ],
            }
        ),
    }


def _whole(seconds: float) -> int:
    return round(seconds * 1e9)


def _compressed(data: Mapping[str, Any]) -> str:
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()
