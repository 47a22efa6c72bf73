"""lanes: spans that overlap lie under each other."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from pipegrad.picture.lanes import Lane, lanes
from pipegrad.simulation.timeline import Span
from tests.support.picture.timelines import SMALL, simulated


def test_a_rank_has_a_lane_of_its_own_and_one_of_what_runs_beside() -> None:
    assert list(lanes(SMALL)) == [
        Lane(0, False, [0, 6, 7]),
        Lane(0, True, [1]),
        Lane(1, False, [2, 3, 4, 9, 10]),
        Lane(1, True, [8]),
        Lane(1, True, [5]),
    ]


def test_a_rank_that_did_nothing_has_an_empty_lane() -> None:
    assert list(lanes(replace(SMALL, num_ranks=3)))[-1] == Lane(2, False, [])


def test_spans_that_touch_share_a_lane_also_if_numbers_are_rounded() -> None:
    spans = (Span(0, "F", 0.0, 0.1 + 0.2), Span(0, "B", 0.3, 0.4))
    assert list(lanes(replace(SMALL, num_ranks=1, spans=spans))) == [Lane(0, False, [0, 1])]


def test_own_spans_of_a_rank_that_overlap_are_all_shown() -> None:
    spans = (Span(0, "F", 0.0, 0.2), Span(0, "host", 0.1, 0.3), Span(0, "B", 0.2, 0.4))
    found = [lane.spans for lane in lanes(replace(SMALL, num_ranks=1, spans=spans))]
    assert found == [[0, 2], [1]]


def test_no_lane_has_spans_that_overlap_and_none_is_lost() -> None:
    timeline = simulated("zbv")
    found = list(lanes(timeline))
    assert sorted(n for lane in found for n in lane.spans) == list(range(len(timeline.spans)))
    for lane in found:
        own = [timeline.spans[number] for number in lane.spans]
        assert {span.rank for span in own} <= {lane.rank}
        assert all(a.end <= b.begin + 1e-9 for a, b in pairwise(own))
