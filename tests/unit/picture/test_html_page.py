"""write_html: one file that needs nothing else, that no text can break, and that has all spans."""

from __future__ import annotations

import base64
import json
import re
import zlib
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from pipegrad.picture import write_html
from pipegrad.picture.drawable import tracks
from pipegrad.picture.html_page import FIELDS, pack
from pipegrad.simulation.timeline import KINDS, MemoryPoint, Span, Timeline
from tests.support.picture.timelines import SMALL, SPANS, simulated

EVIL = "</script><script>alert(1)</script><!-- %%DATA%% & \"'"


def test_the_page_loads_nothing(tmp_path: Path) -> None:
    write_html([SMALL], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert not re.search(r"https?://|src=|@import|url\(|import\(|fetch\(", text)
    assert not re.search(r"transition|animation|behavior", text)  # nothing moves by itself
    assert "default-src 'none'" in text
    assert "%%" not in text
    assert '<p id="reading">Each line is one rank; time runs from left to right. A box is' in text
    write_html([SMALL], tmp_path / "again.html")
    assert (tmp_path / "again.html").read_bytes() == (tmp_path / "page.html").read_bytes()


def test_no_text_ends_the_data_or_the_title(tmp_path: Path) -> None:
    spans = (SPANS[0]._replace(label=EVIL), *SPANS[1:])
    timeline = replace(SMALL, name=EVIL, spans=spans, notes={EVIL: EVIL, "costs": EVIL})
    write_html([timeline], tmp_path / "page.html", title=EVIL)
    text = (tmp_path / "page.html").read_text()

    assert text.count("<script") == text.count("</script") == 2
    data = text.split('<script id="data" type="application/json">')[1].split("</script>")[0]
    assert "<" not in data
    found = json.loads(data)
    assert found["title"] == EVIL
    assert EVIL in found["timelines"][0]["labels"]
    assert "<title>&lt;/script&gt;" in text


@pytest.mark.parametrize(("title", "expected"), [("", "by hand (predicted)"), ("Ä run", "Ä run")])
def test_the_title_is_given_or_the_name(title: str, expected: str, tmp_path: Path) -> None:
    write_html([SMALL], tmp_path / "page.html", title=title)
    assert f"<h1>{expected}</h1>" in (tmp_path / "page.html").read_text(encoding="utf-8")


# What the page unpacks.


def inflated(packed: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(packed["packed"])))
    return found


def unpacked(packed: dict[str, Any]) -> list[Span]:
    """Returns the spans in the order of the tracks, as page/data.js unpacks them."""
    ranks = (rank for rank, _, count in packed["tracks"] for _ in range(count))
    spans = list[Span]()
    for rank, row in zip(ranks, zip(*inflated(packed)["spans"], strict=True), strict=True):
        kind, begin, duration, *numbers, label = row
        facts = dict(zip(FIELDS[3:-1], numbers, strict=True))
        text = packed["labels"][label]
        spans.append(
            Span(rank, KINDS[kind], begin * 1e-9, (begin + duration) * 1e-9, **facts, label=text)
        )
    return spans


@pytest.mark.parametrize(
    "timeline", [SMALL, simulated("zbv", steps=2), replace(SMALL, num_ranks=4)], ids=["s", "z", "e"]
)
def test_spans_come_back_in_the_order_of_tracks(timeline: Timeline) -> None:
    packed = pack(timeline)
    order = chain.from_iterable(track.spans for track in tracks(timeline))
    found = unpacked(packed)
    assert len(found) == len(timeline.spans)
    for span, expected in zip(found, (timeline.spans[number] for number in order), strict=True):
        close = pytest.approx([expected.begin, expected.end], rel=0, abs=0.5001e-9)
        assert [span.begin, span.end] == close
        assert span._replace(begin=0, end=0) == expected._replace(begin=0, end=0)


@pytest.mark.parametrize("hours", [1, 1000])
def test_long_runs_and_much_memory_come_back(hours: int) -> None:
    seconds, terabyte = 3600.0 * hours, 10**12
    long = replace(
        SMALL,
        num_ranks=1,
        spans=(Span(0, "F", 0.0, seconds / 3), Span(0, "B", seconds / 3, seconds)),
        step_ends=(seconds,),
        memory=((MemoryPoint(0.0, terabyte),),),
    )
    packed = pack(long)
    assert [span.end for span in unpacked(packed)] == pytest.approx([seconds / 3, seconds])
    assert inflated(packed)["memory"] == [[[0, terabyte]]]


def test_the_critical_path_sums_to_the_step_and_lies_on_its_ranks() -> None:
    timeline = simulated(steps=2)
    packed = pack(timeline)
    ranks, beside, begins, ends = zip(*inflated(packed)["path"], strict=True)
    total = sum(e - b for b, e in zip(begins, ends, strict=True)) * 1e-9
    assert total == pytest.approx(timeline.seconds, rel=1e-6)
    assert set(ranks) == {0, 1, 2, 3}
    assert set(beside) == {0, 1}
    assert len(packed["path_words"]) == 2


def test_a_span_takes_a_few_bytes() -> None:
    timeline = simulated(ranks=8, microbatches=64)
    assert len(pack(timeline)["packed"]) < 16 * len(timeline.spans)
    points = [[round(p.seconds * 1e9), p.num_bytes] for row in SMALL.memory for p in row]
    assert [point for row in inflated(pack(SMALL))["memory"] for point in row] == points
