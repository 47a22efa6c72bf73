"""Clocks: the fastest round trip counts, drift is even, ranks of a machine share a clock."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest

from pipegrad.observe import recording
from pipegrad.observe.recording import Clock, Reading, clocks_of, fastest


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
