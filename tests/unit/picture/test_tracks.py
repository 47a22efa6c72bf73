"""tracks: spans that overlap lie under each other."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from pipegrad.picture.drawable import Track, tracks
from pipegrad.simulation.timeline import Span
from tests.support.picture.timelines import SMALL, simulated


def test_a_rank_has_a_track_of_its_own_and_one_of_what_runs_beside() -> None:
    assert list(tracks(SMALL)) == [
        Track(0, False, [0, 6, 7]),
        Track(0, True, [1]),
        Track(1, False, [2, 3, 4, 9, 10]),
        Track(1, True, [8]),
        Track(1, True, [5]),
    ]


def test_a_rank_that_did_nothing_has_an_empty_track() -> None:
    assert list(tracks(replace(SMALL, num_ranks=3)))[-1] == Track(2, False, [])


def test_spans_that_touch_share_a_track_also_if_numbers_are_rounded() -> None:
    spans = (Span(0, "F", 0.0, 0.1 + 0.2), Span(0, "B", 0.3, 0.4))
    assert list(tracks(replace(SMALL, num_ranks=1, spans=spans))) == [Track(0, False, [0, 1])]


def test_own_spans_of_a_rank_that_overlap_are_all_shown() -> None:
    spans = (Span(0, "F", 0.0, 0.2), Span(0, "host", 0.1, 0.3), Span(0, "B", 0.2, 0.4))
    found = [track.spans for track in tracks(replace(SMALL, num_ranks=1, spans=spans))]
    assert found == [[0, 2], [1]]


def test_no_track_has_spans_that_overlap_and_none_is_lost() -> None:
    timeline = simulated("zbv")
    found = list(tracks(timeline))
    assert sorted(n for track in found for n in track.spans) == list(range(len(timeline.spans)))
    for track in found:
        own = [timeline.spans[number] for number in track.spans]
        assert {span.rank for span in own} <= {track.rank}
        assert all(a.end <= b.begin + 1e-9 for a, b in pairwise(own))
