"""The critical path decides when a step ends: what is on it changes the step, nothing else does."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from pipegrad.schedules import Program, build, lower
from pipegrad.simulation.costs import CollectiveCosts, Costs, LinkCosts, Network, StageCosts
from pipegrad.simulation.explain.critical_path import CriticalPath, break_down, critical_path
from pipegrad.simulation.explain.explanation import explain
from pipegrad.simulation.explain.lookup import Lookup
from pipegrad.simulation.simulator import simulate
from pipegrad.simulation.timeline import Span, Timeline
from tests.support.schedules.makespan import recorded

# Rank 1 computes what rank 0 sends, and sends back. Rank 0 reduces and steps; rank 1 steps early.
TWO_RANKS = Timeline(
    "two",
    "predicted",
    2,
    (0, 1),
    1,
    (
        Span(0, "F", 0, 10, 0, 0, 0),
        Span(0, "transfer", 10, 14, 0, 0, 0, 1, 0, "x of 0F0"),
        Span(1, "wait for receive", 0, 14, 0, 0, 0, 0, 0, "x of 0F0"),
        Span(1, "F", 14, 24, 0, 1, 0),
        Span(1, "B", 24, 44, 0, 1, 0),
        Span(1, "transfer", 44, 48, 0, 0, 0, 0, 1, "gradient of x of 0F0"),
        Span(0, "wait for receive", 10, 48, 0, 0, 0, 1, 1, "gradient of x of 0F0"),
        Span(0, "B", 48, 68, 0, 0, 0),
        Span(0, "reduction", 60, 70, 0, which=0, label="bucket 0"),
        Span(0, "wait for reduction", 68, 70, 0, which=0, label="bucket 0"),
        Span(0, "optimizer", 70, 75),
        Span(1, "optimizer", 44, 49),
        Span(1, "wait for ranks", 49, 75),
    ),
    (75.0,),
)


def words(path: CriticalPath) -> list[str]:
    return [f"{s.kind} {s.name}".strip() + f" {s.begin:g}-{s.end:g}" for s in path.segments]


def check_whole(path: CriticalPath, begin: float, end: float) -> None:
    """Segments leave no time of the step out, and claim none twice."""
    assert path.segments[0].begin == pytest.approx(begin)
    assert path.segments[-1].end == pytest.approx(end)
    for segment, following in zip(path.segments, path.segments[1:], strict=False):
        assert segment.end == following.begin
    assert all(segment.seconds > 0 for segment in path.segments)


def test_a_path_over_two_ranks() -> None:
    path = critical_path(Lookup(TWO_RANKS), 0)
    assert words(path) == [
        "compute 0F0 0-10",
        "transfer x of 0F0 10-14",
        "compute 1F0 14-24",
        "compute 1B0 24-44",
        "transfer gradient of x of 0F0 44-48",
        "compute 0B0 48-60",
        "reduction bucket 0 60-70",
        "optimizer 70-75",
    ]
    assert str(path) == (
        "of 75.0 s, 52.0 s are compute (rank 1 30.0 s, rank 0 22.0 s), 10.0 s are reductions "
        "(bucket 0 10.0 s), 8.00 s are messages sent and not yet received (link 0->1 4.00 s, link "
        "1->0 4.00 s), 5.00 s are optimizer (rank 0 5.00 s)"
    )


def test_a_transfer_waits_for_the_one_before_it_on_its_edge() -> None:
    spans = (
        Span(0, "F", 0, 1, 0, 0, 0),
        Span(0, "F", 1, 2, 0, 0, 1),
        Span(0, "transfer", 1, 6, 0, 0, 0, 1, 0, "x of 0F0"),
        Span(0, "transfer", 6, 11, 0, 0, 1, 1, 0, "x of 0F1"),
        Span(1, "wait for receive", 0, 6, 0, 0, 0, 0, 0, "x of 0F0"),
        Span(1, "F", 6, 7, 0, 1, 0),
        Span(1, "wait for receive", 7, 11, 0, 0, 1, 0, 0, "x of 0F1"),
        Span(1, "F", 11, 12, 0, 1, 1),
    )
    timeline = Timeline("queue", "predicted", 2, (0, 1), 2, spans, (12.0,))
    expected = ["compute 0F0 0-1", "transfer x of 0F0 1-6", "transfer x of 0F1 6-11"]
    assert words(critical_path(Lookup(timeline), 0)) == [*expected, "compute 1F1 11-12"]
    # A measured transfer begins when it is handed to the backend.
    handed = spans[3]._replace(begin=2)
    measured = replace(timeline, source="measured", spans=(*spans[:3], handed, *spans[4:]))
    assert words(critical_path(Lookup(measured), 0)) == [*expected, "compute 1F1 11-12"]


def test_a_value_that_came_long_before_it_was_needed() -> None:
    """Its transfer ends when it was needed, and no other transfer can have waited for that."""
    spans = (
        Span(0, "F", 0, 1, 0, 0, 0),
        Span(0, "F", 1, 8.4, 0, 0, 1),
        Span(0, "transfer", 1, 8.5, 0, 0, 0, 1, 0, "x of 0F0"),
        Span(0, "transfer", 8.4, 11, 0, 0, 1, 1, 0, "x of 0F1"),
        Span(1, "host", 0, 8.5),
        Span(1, "F", 8.5, 9.5, 0, 1, 0),
        Span(1, "wait for receive", 9.5, 11, 0, 0, 1, 0, 0, "x of 0F1"),
        Span(1, "F", 11, 12, 0, 1, 1),
    )
    timeline = Timeline("late", "measured", 2, (0, 1), 2, spans, (12.0,))
    assert words(critical_path(Lookup(timeline), 0)) == [
        "compute 0F0 0-1",
        "compute 0F1 1-8.4",
        "transfer x of 0F1 8.4-11",
        "compute 1F1 11-12",
    ]


def test_a_wait_that_its_transfer_does_not_explain() -> None:
    spans = (
        Span(0, "F", 0, 1, 0, 0, 0),
        Span(0, "transfer", 1, 3, 0, 0, 0, 1, 0, "x of 0F0"),
        Span(1, "host", 0, 5),
        Span(1, "wait for receive", 5, 6, 0, 0, 0, 0, 0, "x of 0F0"),
        Span(1, "F", 6, 9, 0, 1, 0),
    )
    lookup = Lookup(Timeline("odd", "predicted", 2, (0, 1), 1, spans, (9.0,)))
    assert words(critical_path(lookup, 0)) == ["host 0-5", "wait x of 0F0 5-6", "compute 1F0 6-9"]


def test_two_stages_of_a_rank_made_values_of_one_microbatch() -> None:
    """The value of stage 0 left after stage 2 had computed, as its edge was busy."""
    spans = (
        Span(0, "F", 0, 2, 0, 0, 0),
        Span(0, "F", 2, 3, 0, 2, 0),
        Span(0, "transfer", 4, 6, 0, 0, 0, 1, 0, "x of 0F0"),
        Span(1, "wait for receive", 0, 6, 0, 0, 0, 0, 0, "x of 0F0"),
        Span(1, "F", 6, 7, 0, 1, 0),
    )
    lookup = Lookup(Timeline("two stages", "predicted", 2, (0, 1, 0), 1, spans, (7.0,)))
    assert lookup.maker(spans[2]) == spans[0]
    assert words(critical_path(lookup, 0)) == [
        "compute 0F0 0-2",
        "transfer x of 0F0 2-6",
        "compute 1F0 6-7",
    ]


def test_two_ranks_wait_for_a_third() -> None:
    spans = (
        Span(0, "F", 0, 1, 0, 0, 0),
        Span(1, "F", 0, 2, 0, 1, 0),
        Span(2, "F", 0, 7, 0, 2, 0),
        *(Span(rank, "wait for ranks", end, 7) for rank, end in ((0, 1), (1, 2))),
        *(Span(rank, "optimizer", 7, 8 + (rank == 0)) for rank in range(3)),
    )
    lookup = Lookup(Timeline("last", "predicted", 3, (0, 1, 2), 1, spans, (9.0,)))
    assert words(critical_path(lookup, 0)) == ["compute 2F0 0-7", "optimizer 7-9"]


def test_a_transfer_that_takes_no_time() -> None:
    spans = (
        Span(0, "F", 0, 1, 0, 0, 0),
        Span(0, "transfer", 1, 1, 0, 0, 0, 1, 0, "x of 0F0"),
        Span(1, "wait for receive", 0, 1, 0, 0, 0, 0, 0, "x of 0F0"),
    )
    lookup = Lookup(Timeline("fast", "predicted", 2, (0, 1), 1, spans, (1.0,)))
    assert words(critical_path(lookup, 0)) == ["compute 0F0 0-1"]


def test_a_reduction_begins_with_its_last_rank() -> None:
    spans = (
        Span(0, "B", 0, 2, 0, 0, 0),
        Span(1, "B", 0, 7, 0, 1, 0),
        Span(0, "reduction", 2, 9, 0, which=3, label="tied"),
        Span(1, "reduction", 7, 9, 0, which=3, label="tied"),
        Span(0, "wait for reduction", 2, 9, 0, which=3, label="tied"),
        Span(1, "wait for reduction", 7, 9, 0, which=3, label="tied"),
        Span(0, "optimizer", 9, 11),
        Span(1, "optimizer", 9, 10),
    )
    lookup = Lookup(Timeline("tied", "predicted", 2, (0, 1), 1, spans, (11.0,)))
    assert words(critical_path(lookup, 0)) == [
        "compute 1B0 0-7",
        "reduction tied 7-9",
        "optimizer 9-11",
    ]


def test_parameters_of_the_step_before() -> None:
    spans = (
        Span(0, "F", 0, 4, 0, 0, 0),
        Span(0, "optimizer", 4, 5),
        Span(0, "parameter sync", 5, 8, 0, which=0, label="sync"),
        Span(0, "wait for parameters", 5, 8, 1, 0, which=0, label="sync"),
        Span(0, "F", 8, 12, 1, 0, 0),
    )
    lookup = Lookup(Timeline("sync", "predicted", 1, (0,), 1, spans, (5.0, 12.0)))
    assert words(critical_path(lookup, 1)) == ["parameter sync sync 5-8", "compute 0F0 8-12"]


@pytest.mark.parametrize("name", ["1f1b", "eager-1f1b", "gpipe", "zb-h1", "zbv"])
@pytest.mark.parametrize(("seed", "depth"), [(0, 4), (1, 4), (2, 0)])
def test_what_is_on_the_path_is_what_the_step_depends_on(name: str, seed: int, depth: int) -> None:
    """Each cost is made a little larger: the step grows by as often as the path has it.

    With depth 0 a receive is posted when it is waited for, and the sender may wait for that.
    """
    schedule = build(name, num_ranks=4, num_microbatches=6)
    program, costs = lower(schedule, depth=depth), uneven(schedule.stage_to_rank, seed)
    timeline = recorded(program, costs)
    path = critical_path(Lookup(timeline), 0)
    check_whole(path, 0.0, timeline.step_ends[0])
    little = 1e-7
    for stage in range(len(costs.stages)):
        longer = list(costs.stages)
        forward = longer[stage].forward_seconds + little
        longer[stage] = replace(longer[stage], forward_seconds=forward)
        times = sum(s.kind == "compute" and s.name.startswith(f"{stage}F") for s in path.segments)
        grown = grows(program, costs, replace(costs, stages=tuple(longer)))
        assert grown == pytest.approx(times * little, abs=little / 10)
    for link in costs.network.links:
        slower = replace(link, latency_seconds=link.latency_seconds + little)
        links = tuple(slower if own is link else own for own in costs.network.links)
        # A queue of transfers has the latency of its edge once: the others overlap.
        times = 0
        for before, segment in zip([None, *path.segments], path.segments, strict=False):
            edge = (segment.kind, segment.rank, segment.peer)
            queued = before is not None and (before.kind, before.rank, before.peer) == edge
            times += edge == ("transfer", link.source, link.target) and not queued
        grown = grows(program, costs, replace(costs, network=Network(links=links)))
        assert grown == pytest.approx(times * little, abs=little / 10)


def grows(program: Program, costs: Costs, longer: Costs) -> float:
    return simulate(program, longer).step_seconds[0] - simulate(program, costs).step_seconds[0]


def uneven(stage_to_rank: tuple[int, ...], seed: int) -> Costs:
    """Costs no two of which are alike, so that only one path is the longest."""
    draw = random.Random(seed).uniform
    stages = tuple(
        StageCosts(draw(0.01, 0.02), draw(0.03, 0.05), draw(0.01, 0.02), outputs={"x": 10**6})
        for _ in stage_to_rank
    )
    ranks = range(max(stage_to_rank) + 1)
    links = tuple(
        LinkCosts(a, b, draw(0.001, 0.003), draw(0.5e8, 5e8))
        for a in ranks
        for b in ranks
        if a != b
    )
    return Costs(stages, Network(links=links))


@pytest.mark.parametrize("seed", range(20))
def test_a_broken_timeline_has_a_path(seed: int) -> None:
    """Missing spans, clocks that are off and senseless numbers: the path is whole, and ends."""
    chance = random.Random(seed)
    schedule = build(chance.choice(["1f1b", "zbv"]), num_ranks=3, num_microbatches=4)
    holders = tuple(s for s, rank in enumerate(schedule.stage_to_rank) if rank != 1)[:3:2]
    tied = CollectiveCosts(
        seconds=0.1, sync_seconds=0.05, sync_bytes=1, stages=holders, readers=holders
    )
    costs = replace(uneven(schedule.stage_to_rank, seed), collectives={"tied": tied})
    timeline = recorded(lower(schedule), costs, num_steps=2)
    clocks = [chance.uniform(-0.02, 0.02) for _ in range(3)]
    spans = []
    for span in timeline.spans:
        late, jitter = clocks[span.rank], chance.uniform(0, 0.005)
        moved = span._replace(begin=span.begin + late - jitter, end=span.end + late + jitter)
        if chance.random() < 0.05:
            moved = moved._replace(peer=chance.choice([-1, 7]), which=99, label="", step=5)
        if chance.random() < 0.02:
            moved = moved._replace(rank=9, end=moved.begin - 1)
        if chance.random() < 0.02:
            moved = moved._replace(begin=chance.choice([-math.inf, math.nan]), end=math.inf)
        spans += [moved] * (chance.random() > 0.1)
    broken = replace(timeline, spans=tuple(spans), source="measured")
    lookup = Lookup(broken)
    for step, (begin, end) in enumerate(
        zip((0.0, *broken.step_ends), broken.step_ends, strict=False)
    ):
        check_whole(critical_path(lookup, step), begin, end)
        for own in break_down(lookup, step).ranks:
            assert sum(own.parts.values()) == pytest.approx(end - begin)
    assert explain(broken, step=1).path == critical_path(lookup, 1)


def test_ranks_that_all_wait_for_each_other() -> None:
    """What no span explains stays on its rank, and does not go around for ever."""
    spans = tuple(Span(rank, "wait for ranks", 0, 5) for rank in range(3))
    path = critical_path(Lookup(Timeline("circle", "measured", 3, (0, 1, 2), 1, spans, (5.0,))), 0)
    assert [(s.kind, s.seconds) for s in path.segments] == [("meeting", 5)]
    path = critical_path(Lookup(Timeline("empty", "measured", 2, (0, 1), 1, (), (3.0,))), 0)
    check_whole(path, 0.0, 3.0)
    assert str(path) == "of 3.00 s, 3.00 s are time that no span covers (rank 0 3.00 s)"
