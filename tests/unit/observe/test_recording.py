"""One timeline of what ranks have recorded: no gaps, no overlaps, and one clock."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from pipegrad import schedules
from pipegrad.errors import ScheduleError
from pipegrad.observe import recording
from pipegrad.observe.recording import Clock, Reading, assembled, clocks_of, fastest
from pipegrad.observe.step_recorder import Recorded
from pipegrad.schedules.program.lower import lower
from pipegrad.schedules.program.program import Link, Program
from pipegrad.simulation.timeline import Span, Timeline


def fake_time(times: Iterator[float]) -> mock._patch[mock.Mock]:
    return mock.patch("pipegrad.observe.recording.time.perf_counter", side_effect=times)


def test_the_fastest_round_trip_counts() -> None:
    # Asked at 10, 20, 30, ...; the second question alone was quick.
    trips = [2.0, 0.25, *[1.0] * (recording._PINGS - 2)]
    times = [t for i, trip in enumerate(trips) for t in (10.0 * i, 10.0 * i + trip)]
    answers = iter(10.0 * i + trip / 2 + 7.0 for i, trip in enumerate(trips))
    with fake_time(iter(times)):
        reading = fastest(lambda: next(answers), "here")
    assert reading == Reading(10.25, 7.0, 0.125, "here")


def test_a_clock_that_drifts_is_right_at_both_readings_and_between() -> None:
    clock = Clock(Reading(100.0, 5.0), Reading(200.0, 7.0))
    assert [clock.aligned(t) for t in (100.0, 150.0, 200.0)] == [105.0, 156.0, 207.0]


def test_two_readings_at_one_time_make_the_later_one_count() -> None:
    assert Clock(Reading(1.0, 2.0), Reading(1.0, 3.0)).aligned(5.0) == 8.0


def test_ranks_of_one_machine_share_a_clock_but_not_if_their_readings_deny_it() -> None:
    first = Reading(1.0, machine="a")
    here = Reading(1.0, 1e-5, 2e-5, "a")
    container = Reading(1.0, 50.0, 2e-5, "a")
    there = Reading(1.0, 1e-5, 2e-5, "b")
    unknown = Reading(1.0, 1e-5, 2e-5, "")
    readings = [first, here, container, there, unknown]
    found = [clock.before.offset for clock in clocks_of(readings, readings)]
    assert found == [0.0, 0.0, 50.0, 1e-5, 1e-5]


@pytest.mark.parametrize("nameless", ["", "b"])
def test_a_first_rank_without_a_name_shares_with_nobody(nameless: str) -> None:
    readings = [Reading(1.0, machine=""), Reading(1.0, 1e-5, 2e-5, nameless)]
    assert clocks_of(readings, readings)[1].after.offset == 1e-5


def program() -> Program:
    schedule = schedules.build("1f1b", num_ranks=2, num_microbatches=2)
    return lower(schedule, links=[Link("x", 0, (1,))])


def clock(offset: float = 0.0) -> Clock:
    return Clock(Reading(0.0, offset), Reading(1.0, offset))


def own(
    rank: int, steps: Any, end: float, *spans: Span, sent: Any = (), arrived: Any = ()
) -> Recorded:
    return Recorded(rank, tuple(steps), end, (*spans, *sent, *arrived))


def made(*owns: Recorded, clocks: list[Clock] | None = None) -> Timeline:
    return assembled(owns, clocks or [clock() for _ in owns], program())


def kinds(timeline: Timeline, rank: int) -> list[tuple[str, float, float, int]]:
    return [(s.kind, s.begin, s.end, s.step) for s in timeline.on_rank(rank)]


def test_what_is_nothing_else_is_host_time_and_a_rank_that_has_ended_waits() -> None:
    first = own(0, [(0, 10.0)], 16.0, Span(0, "F", 11.0, 13.0, 0, 0, 0))
    second = own(1, [(0, 12.0)], 14.0, Span(1, "B", 12.0, 13.0, 0, 1, 0))
    timeline = made(first, second)
    assert kinds(timeline, 0) == [("host", 0, 1, 0), ("F", 1, 3, 0), ("host", 3, 6, 0)]
    assert kinds(timeline, 1) == [
        ("host", 0, 2, 0),
        ("B", 2, 3, 0),
        ("host", 3, 4, 0),
        ("wait for ranks", 4, 6, 0),
    ]
    assert timeline.step_ends == (6.0,)
    assert timeline.source == "measured"


def test_a_step_ends_where_the_last_rank_begins_the_next_and_host_time_is_cut_there() -> None:
    timeline = made(own(0, [(4, 1.0), (6, 3.0)], 5.0), own(1, [(4, 1.0), (6, 3.5)], 5.0))
    assert timeline.step_ends == (2.5, 4.0)
    assert kinds(timeline, 0) == [("host", 0, 2, 0), ("host", 2, 4, 1)]


def test_spans_that_overlap_are_cut_so_that_a_rank_does_one_thing_at_a_time() -> None:
    outer = Span(0, "optimizer", 1.0, 4.0, 0)
    inner = Span(0, "wait for ranks", 2.0, 3.0, 0)
    late = Span(0, "F", 3.5, 5.0, 0, 0, 0)
    timeline = made(own(0, [(0, 1.0)], 5.0, outer, inner, late))
    assert kinds(timeline, 0) == [("optimizer", 0, 3, 0), ("F", 3, 4, 0)]
    # What runs beside a rank is left as it is.
    beside = Span(0, "reduction", 2.0, 4.0, 0, which=0, label="bucket 0")
    timeline = made(own(0, [(0, 1.0)], 5.0, Span(0, "F", 1.0, 5.0, 0, 0, 0), beside))
    assert [(s.kind, s.begin, s.end) for s in timeline.beside(0)] == [("reduction", 1.0, 3.0)]
    assert kinds(timeline, 0) == [("F", 0, 4, 0)]


def test_clocks_are_aligned_before_anything_is_compared() -> None:
    first = own(0, [(0, 10.0)], 12.0, Span(0, "F", 10.0, 11.0, 0, 0, 0))
    second = own(1, [(0, 110.5)], 112.0, Span(1, "F", 111.0, 112.0, 0, 1, 0))
    timeline = made(first, second, clocks=[clock(), clock(-100.0)])
    assert kinds(timeline, 1) == [("host", 0, 0.5, 0), ("host", 0.5, 1, 0), ("F", 1, 2, 0)]


def test_a_transfer_is_from_its_send_until_its_receiver_had_waited() -> None:
    sent = Span(0, "transfer", 2.0, 2.1, 0, 0, 1, 1, 0, "x of 0F1")
    wait = Span(1, "wait for receive", 1.5, 4.0, 0, 0, 1, 0, 0, "x of 0F1")
    first = own(0, [(0, 1.0)], 5.0, sent=[sent])
    second = own(1, [(0, 1.0)], 5.0, arrived=[wait])
    (transfer,) = made(first, second).beside(0)
    assert transfer == Span(0, "transfer", 1.0, 3.0, 0, 0, 1, 1, 0, "x of 0F1")
    # One of which an end is missing is left out.
    assert made(first, own(1, [(0, 1.0)], 5.0)).beside(0) == []
    # It never ends before it begins, whatever the clocks say.
    early = own(1, [(0, 1.0)], 5.0, arrived=[wait._replace(end=1.9)])
    (transfer,) = made(first, early).beside(0)
    assert transfer.begin == transfer.end == 1.0


def test_only_steps_that_all_ranks_have_recorded_are_kept() -> None:
    old = Span(0, "F", 1.0, 2.0, 3, 0, 0)
    timeline = made(own(0, [(3, 1.0), (4, 5.0)], 8.0, old), own(1, [(4, 5.0)], 8.0))
    assert timeline.step_ends == (3.0,)
    assert {span.kind for span in timeline.spans} == {"host"}
    with pytest.raises(ScheduleError, match="no step that all ranks"):
        made(own(0, [(1, 0.0)], 1.0), own(1, [(2, 0.0)], 1.0))
