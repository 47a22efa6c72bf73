"""write_perfetto: a timeline in the format of Chrome's traces, which ui.perfetto.dev opens.

Each rank is a process. Its threads are the tracks of a picture: what the rank does, and what runs
beside it. Arrows show transfers, and counters show memory.

Source: "Trace Event Format", Google, 2016; https://perfetto.dev/docs/getting-started/other-formats
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from pipegrad import run_files
from pipegrad.picture.drawable import PALETTE, Track, check, titles, tracks
from pipegrad.simulation.timeline import COMPUTE, Span, Timeline

_MICROSECONDS = 1e6  # the unit of the format
Event = dict[str, Any]


def write_perfetto(timelines: Sequence[Timeline], path: Path | str) -> None:
    """Writes one or two timelines as JSON for ui.perfetto.dev or chrome://tracing.

    Raises:
        ScheduleError: If a timeline cannot be drawn.
    """
    check(timelines)
    events: list[Event] = []
    first_process = 0
    for timeline, title in zip(timelines, titles(timelines), strict=True):
        events += _events(timeline, title, first_process)
        first_process += timeline.num_ranks
    data = {"traceEvents": events, "displayTimeUnit": "ms"}
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    run_files.replace(Path(path), text.encode())


def _events(timeline: Timeline, title: str, first_process: int) -> Iterator[Event]:
    threads: dict[int, int] = {}  # for each span the track that it is in
    rows = list(tracks(timeline))
    for rank in range(timeline.num_ranks):
        own = [track for track in rows if track.rank == rank]
        threads |= {span: thread for thread, track in enumerate(own) for span in track.spans}
        yield from _named(first_process + rank, f"{title}, rank {rank}", own)
    for number in chain.from_iterable(track.spans for track in rows):
        span = timeline.spans[number]
        yield _complete(span, first_process + span.rank, threads[number])
        if span.kind == "transfer" and 0 <= span.peer < timeline.num_ranks:
            yield from _arrow(span, f"{first_process}.{number}", first_process, threads[number])
    for rank, points in enumerate(timeline.memory):
        for seconds, num_bytes in points:
            where = {"pid": first_process + rank, "tid": 0, "ts": seconds * _MICROSECONDS}
            yield {"ph": "C", "name": "memory", **where, "args": {"bytes": num_bytes}}


def _named(process: int, title: str, own: Sequence[Track]) -> Iterator[Event]:
    yield _metadata("process_name", process, 0, name=title)
    yield _metadata("process_sort_index", process, 0, sort_index=process)
    for thread, track in enumerate(own):
        name = f"beside {thread}" if track.is_beside else "rank"
        yield _metadata("thread_name", process, thread, name=name)
        yield _metadata("thread_sort_index", process, thread, sort_index=thread)


def _metadata(what: str, process: int, thread: int, **args: str | int) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": args}


def _complete(span: Span, process: int, thread: int) -> Event:
    known = {name: value for name, value in span._asdict().items() if value not in (-1, "")}
    args = {name: known[name] for name in known if name not in ("rank", "kind", "begin", "end")}
    name = span.action if span.kind in COMPUTE else span.label or PALETTE[span.kind].name
    times = {"ts": span.begin * _MICROSECONDS, "dur": span.seconds * _MICROSECONDS}
    return {
        "ph": "X", "name": name, "cat": span.kind, "pid": process, "tid": thread, **times,
        "args": args,
    }  # fmt: skip


def _arrow(span: Span, flow: str, first_process: int, thread: int) -> Iterator[Event]:
    """Yields an arrow from the transfer to what the receiver does when it arrives."""
    same = {"name": "transfer", "cat": "transfer", "id": flow}
    begin, end = span.begin * _MICROSECONDS, span.end * _MICROSECONDS
    yield {"ph": "s", **same, "pid": first_process + span.rank, "tid": thread, "ts": begin}
    yield {"ph": "f", "bp": "e", **same, "pid": first_process + span.peer, "tid": 0, "ts": end}
