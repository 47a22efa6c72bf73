"""write_perfetto: the events that Perfetto reads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipegrad.picture import write_perfetto
from pipegrad.simulation.timeline import Timeline
from tests.support.picture.timelines import SMALL, SPANS


def events(tmp_path: Path, *timelines: Timeline) -> list[dict[str, Any]]:
    write_perfetto(timelines, tmp_path / "trace.json")
    found: list[dict[str, Any]] = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    return found


def test_a_rank_is_a_process_with_a_thread_for_each_track(tmp_path: Path) -> None:
    names = {
        (event["pid"], event["tid"], event["name"]): event["args"]["name"]
        for event in events(tmp_path, SMALL, replace(SMALL, source="measured"))
        if event["ph"] == "M" and "name" in event["args"]
    }
    assert names[0, 0, "process_name"] == "by hand (predicted), rank 0"
    assert names[3, 0, "process_name"] == "by hand (measured), rank 1"
    threads = [names[1, thread, "thread_name"] for thread in range(3)]
    assert threads == ["rank", "beside 1", "beside 2"]


def test_every_span_is_an_event_in_microseconds(tmp_path: Path) -> None:
    every = events(tmp_path, SMALL)
    memory = [(e["pid"], e["args"]["bytes"]) for e in every if e["ph"] == "C"]  # a counter
    assert memory == [(0, 100), (0, 300), (0, 100), (1, 200)]
    found = [event for event in every if event["ph"] == "X"]
    assert len(found) == len(SPANS)
    backward = next(event for event in found if event["name"] == "1B0")
    assert backward["ts"] == pytest.approx(7000)
    assert backward["dur"] == pytest.approx(4000)
    assert (backward["pid"], backward["tid"], backward["cat"]) == (1, 0, "B")
    assert backward["args"] == {"step": 0, "stage": 1, "microbatch": 0}


def test_each_transfer_has_an_arrow_to_its_receiver(tmp_path: Path) -> None:
    found = events(tmp_path, SMALL)
    begins = {event["id"]: event for event in found if event["ph"] == "s"}
    ends = {event["id"]: event for event in found if event["ph"] == "f"}
    assert begins.keys() == ends.keys()
    assert [(begins[n]["pid"], ends[n]["pid"]) for n in begins] == [(0, 1), (1, 0)]
    assert [ends[n]["ts"] for n in begins] == pytest.approx([4000, 12000])
    # Those of two timelines do not mix.
    found = events(tmp_path, SMALL, replace(SMALL, source="measured"))
    pids = [{e["id"]: e["pid"] for e in found if e["ph"] == phase} for phase in "sf"]
    assert sorted((pids[0][n], pids[1][n]) for n in pids[0]) == [(0, 1), (1, 0), (2, 3), (3, 2)]
