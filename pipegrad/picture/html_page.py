"""write_html: one page that shows timelines. Data, style and script are in it: no network."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from pipegrad import run_files
from pipegrad.picture.columns import FIELDS, pack
from pipegrad.picture.drawable import check
from pipegrad.picture.palette import PALETTE
from pipegrad.picture.words import sentences, titles
from pipegrad.printable import printable
from pipegrad.simulation.timeline import BESIDE, COMPUTE, KINDS, WAITS, Timeline

# One module of JavaScript, in this order; each file says what it has.
_SCRIPTS = ("data.js", "words.js", "rows.js", "paint.js", "page.js")


def write_html(timelines: Sequence[Timeline], path: Path | str, *, title: str = "") -> None:
    """Writes a page that shows one timeline, or two in comparison.

    The page needs a browser of 2023 or later (`DecompressionStream`), and no network.

    Args:
        timelines: One or two. A prediction and the run that it predicts are laid over each other.
        path: The file to write.
        title: Of the page; by default the names of the timelines.

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
        "timelines": [pack(timeline) for timeline in timelines],
    }
    run_files.replace(Path(path), _page(title, data).encode())


def _page(title: str, data: Mapping[str, Any]) -> str:
    folder = files("pipegrad.picture") / "page"
    texts = {name: (folder / name).read_text(encoding="utf-8") for name in _SCRIPTS}
    parts = {
        "TITLE": html.escape(title),
        "STYLE": (folder / "page.css").read_text(encoding="utf-8"),
        "DATA": _script_safe(data),
        "SCRIPT": "\n".join(texts.values()),
    }
    # Split first: a title that looks like a mark is text.
    template = (folder / "page.html").read_text(encoding="utf-8").split("%%")
    return "".join(parts[t] if number % 2 else t for number, t in enumerate(template))


def _script_safe(data: Mapping[str, Any]) -> str:
    """Returns JSON that no text in it can end: a label may have ``</script>`` in it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")
