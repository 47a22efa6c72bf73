"""Advice is what a simulation of the changed Program gives; costs come from a timeline alone."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from pipegrad.errors import ScheduleError
from pipegrad.schedules import Link, Program, build, lower
from pipegrad.schedules.schedule import Action, Schedule
from pipegrad.simulation.costs import (
    CollectiveCosts,
    Costs,
    HostCosts,
    LinkCosts,
    Network,
    StageCosts,
)
from pipegrad.simulation.explain.explanation import Advice, advise, explain, what_ifs
from pipegrad.simulation.explain.inferred import costs_of, program_of
from pipegrad.simulation.explain.lookup import Lookup
from pipegrad.simulation.simulator import simulate
from pipegrad.simulation.timeline import Span, Timeline
from tests.support.schedules.makespan import recorded


def program_and_costs(
    name: str = "1f1b", *, factors: tuple[float, ...] = (1, 1, 1, 1), megabytes: int = 0
) -> tuple[Program, Costs]:
    stages = tuple(
        StageCosts(0.01 * f, 0.02 * f, 0.01 * f, outputs={"x": megabytes * 10**6}) for f in factors
    )
    schedule = build(name, num_ranks=4, num_microbatches=8)
    return lower(schedule), Costs(stages, Network(nic_bytes_per_second=125e6))


def by_change(advice: tuple[Advice, ...], begin: str) -> Advice:
    return next(each for each in advice if each.change.startswith(begin))


def test_uneven_ranks() -> None:
    program, costs = program_and_costs(factors=(1, 1, 2, 1))
    even = by_change(advise(program, costs), "layers moved so that all ranks compute alike")
    # All ranks then take 1.25 times 30 ms for a microbatch.
    assert even.step_seconds == pytest.approx(11 * 1.25 * 0.03)
    assert even.is_bound


def test_layers_move_to_ranks_that_have_time() -> None:
    """Rank 1 has four of seven equal layers. One more on ranks 0 and 2, and 10 ms less a step."""
    program, costs = program_and_costs(factors=(1, 4, 1, 1))
    layers = ({"0": 1.0}, dict.fromkeys("1234", 1.0), {"5": 1.0}, {"6": 1.0})
    known = replace(recorded(program, costs), layers=layers)
    moved = by_change(advise(program, costs, of=known), "move")
    assert moved.change == (
        "move layer 1 to rank 0, layer 4 to rank 2 (parallel.boundaries = [2, 4, 6])"
    )
    own = tuple(StageCosts(0.01 * f, 0.02 * f, 0.01 * f) for f in (2, 2, 2, 1))
    expected = simulate(program, replace(costs, stages=own)).step_seconds[0]
    assert moved.step_seconds == pytest.approx(expected)
    named = replace(
        known, layers=({"in": 1.0}, dict.fromkeys("abcd", 1.0), {"e": 1.0}, {"out": 1.0})
    )
    (words,) = (a.change for a in advise(program, costs, of=named) if a.change.startswith("move"))
    assert words.endswith('(parallel.boundaries = ["b", "d", "out"])')


def test_slow_links() -> None:
    program, costs = program_and_costs(megabytes=2)
    advice = advise(program, costs)
    now = simulate(program, costs).step_seconds[0]
    silent = by_change(advice, "links that take no time")
    assert silent.is_bound
    assert silent.step_seconds == pytest.approx(11 * 0.03)
    assert silent.gain == pytest.approx(1 - 11 * 0.03 / now)
    assert advice[-1].is_bound
    eager = by_change(
        advice, 'parallel.schedule = "eager-1f1b" (a rank holds 7 activations, now 4)'
    )
    other = lower(build("eager-1f1b", num_ranks=4, num_microbatches=8))
    assert eager.step_seconds == pytest.approx(simulate(other, costs).step_seconds[0])
    quarter = tuple(replace(stage, outputs={"x": 5 * 10**5}) for stage in costs.stages)
    faster = simulate(program, replace(costs, stages=quarter)).step_seconds[0]
    coded = by_change(advice, 'parallel.codecs = "int8"')
    assert coded.step_seconds == pytest.approx(faster)
    assert str(coded).endswith(" ms a step, if encoding takes no time")
    assert "encoding" not in str(eager)
    gains = [each.gain for each in advice if not each.is_bound]
    assert gains == sorted(gains, reverse=True)


def test_twice_as_many_microbatches_need_as_many_rows() -> None:
    program, costs = program_and_costs()
    more = by_change(advise(program, costs), "parallel.microbatches = 16")
    assert more.step_seconds == pytest.approx(19 * 0.015)
    assert ": at most " in str(more)
    for rows, is_tried in ((15.0, False), (16.0, True)):
        known = replace(recorded(program, costs), notes={"rows": rows})
        changes = [each.change for each in advise(program, costs, of=known)]
        tried = any(change.startswith("parallel.microbatches = 16,") for change in changes)
        assert tried is is_tried


def test_nothing_helps_what_takes_no_time_and_one_rank_has_no_link() -> None:
    program = lower(build("1f1b", num_ranks=2, num_microbatches=2))
    assert advise(program, Costs((StageCosts(),) * 2)) == ()
    program = lower(build("1f1b", num_ranks=1, num_microbatches=4))
    advice = advise(program, Costs((StageCosts(0.1, 0.2),)))
    assert advice == ()
    for step in (-1, 2):
        with pytest.raises(ScheduleError, match="which has steps 0 to 1"):
            explain(recorded(*program_and_costs(), 2), step=step)
    with pytest.raises(ScheduleError, match="which has no step that has ended"):
        explain(replace(recorded(*program_and_costs(), 2), step_ends=()))


def test_reductions_that_ranks_wait_for_and_half_of_their_bytes() -> None:
    program, costs = program_and_costs()
    slow = replace(costs, collectives={"bucket 0": CollectiveCosts(seconds=0.2, stages=(3,))})
    bound = by_change(advise(program, slow), "reductions that take no time")
    assert bound.is_bound
    assert bound.step_seconds == pytest.approx(11 * 0.03)
    # A measured step may be longer than the simulated one. As many seconds are saved of it.
    measured = by_change(advise(program, slow, step_seconds=10.0), "reductions")
    now = simulate(program, slow).step_seconds[0]
    assert measured.step_seconds == pytest.approx(10 - (now - 11 * 0.03))
    half = by_change(advise(program, slow), 'gradients.reduce_dtype = "bfloat16"')
    halved = replace(costs, collectives={"bucket 0": CollectiveCosts(seconds=0.1, stages=(3,))})
    assert half.step_seconds == pytest.approx(simulate(program, halved).step_seconds[0])
    assert half.step_seconds < now
    known = replace(recorded(program, slow), notes={"reduce_dtype": "bfloat16"})
    changes = [each.change for each in advise(program, slow, of=known)]
    assert not any("reduce_dtype" in change for change in changes)


def as_measured(timeline: Timeline) -> Timeline:
    """Returns what a recording of the run has: an arrival is seen only where a rank waits."""
    lookup = Lookup(timeline)
    awaited = {
        (s.rank, s.which, s.microbatch) for s in timeline.spans if s.kind == "wait for receive"
    }
    spans = list[Span]()
    for span in timeline.spans:
        maker = lookup.maker(span) if span.kind == "transfer" else None
        if maker is not None:
            late = 0.0 if (span.peer, span.which, span.microbatch) in awaited else 0.05
            span = span._replace(begin=maker.end, end=span.end + late)  # noqa: PLW2901
        spans.append(span)
    return replace(timeline, source="measured", spans=tuple(spans))


def test_costs_of_a_recording() -> None:
    program, costs = program_and_costs(factors=(1, 1, 1.5, 1), megabytes=1)
    lookup = Lookup(as_measured(recorded(program, costs, 2)))
    assert any(not lookup.has_end(s) for s in lookup.timeline.spans if s.kind == "transfer")
    again = simulate(program_of(lookup, 0), costs_of(lookup)).step_seconds[0]
    assert again == pytest.approx(lookup.timeline.step_ends[0], rel=0.01)


def test_the_way_back_tells_the_time_of_a_way_on_which_nobody_waits() -> None:
    spans = (
        Span(0, "transfer", 0, 9, 0, 0, 0, 1, 0, "x of 0F0"),
        Span(1, "transfer", 20, 22, 0, 0, 0, 0, 1, "gradient of x of 0F0"),
        Span(0, "wait for receive", 20, 22, 0, 0, 0, 1, 1, "gradient of x of 0F0"),
    )
    costs = costs_of(Lookup(Timeline("", "measured", 2, (0, 1), 1, spans, (22.0,))))
    assert costs.hop_seconds(0, 1, "F") == pytest.approx(2)
    assert costs.hop_seconds(1, 0, "B") == pytest.approx(2)


def test_several_stages_on_a_rank() -> None:
    """Each bucket has the stage that was final when it left; stages share a rank's optimizer."""
    schedule = build("interleaved-1f1b", num_ranks=2, num_microbatches=4)
    times = {
        f"stage {s}": CollectiveCosts(num_bytes=1, seconds=0.1, stages=(s,), comm_stream=s)
        for s in (3, 2, 1, 0)
    }
    costs = Costs((StageCosts(0.01, 0.02, optimizer_seconds=0.004),) * 4, collectives=times)
    lookup = Lookup(recorded(lower(schedule), costs, 2))
    found = costs_of(lookup).collectives
    assert {name: (own.stages, own.comm_stream) for name, own in found.items()} == {
        f"stage {s}": ((s,), s) for s in range(4)
    }
    assert [s.optimizer_seconds for s in costs_of(lookup).stages] == pytest.approx([0.004] * 4)


@pytest.mark.parametrize("ranks_meet", [True, False])
def test_whether_ranks_meet_is_seen(ranks_meet: bool) -> None:
    program, costs = program_and_costs()
    stages = (*costs.stages[:3], replace(costs.stages[3], optimizer_seconds=0.3))
    lookup = Lookup(recorded(program, replace(costs, stages=stages, ranks_meet=ranks_meet), 2))
    assert costs_of(lookup).ranks_meet is ranks_meet


def test_costs_that_do_not_know_a_split_backward_say_so() -> None:
    """zb-h1 was simulated as 1f1b, and never advised, without a word."""
    program, costs = program_and_costs()
    stages = tuple(replace(stage, weight_seconds=0.0) for stage in costs.stages)
    for name in "1f1b", "zb-h1":
        split = lower(build(name, num_ranks=4, num_microbatches=8))
        timeline = simulate(split, replace(costs, stages=stages)).timeline
        assert timeline is not None
        (note,) = explain(timeline, program=split, costs=replace(costs, stages=stages)).notes
        assert note.startswith("weight_seconds of the costs are 0, so nothing is known of")
    timeline = simulate(program, costs).timeline
    assert timeline is not None
    assert explain(timeline, program=program, costs=costs).notes == []


def test_messages_of_all_ranks_at_the_end_of_a_step_are_known_and_named() -> None:
    """Over 40 ms they took 18 % of a step: no simulation had them, and no advice named them."""
    program, costs = program_and_costs()
    far = replace(costs, meeting_seconds=0.06)
    alone, late = (simulate(program, each, num_steps=2).step_seconds[1] for each in (costs, far))
    assert late == pytest.approx(alone + 0.06)
    timeline = recorded(program, far, 2)
    assert costs_of(Lookup(timeline)).meeting_seconds == pytest.approx(0.06)
    explained = explain(timeline)
    assert sum(explained.path.shares["meeting"].values()) == pytest.approx(0.06)
    assert explained.error < 0.01
    bound = by_change(explained.advice, "links that take no time")  # type: ignore[arg-type]
    assert bound.step_seconds == pytest.approx(alone, rel=0.01)
    longer = replace(far, meeting_seconds=0.4)
    assert "the exchange of loss and norm takes" in str(explain(recorded(program, longer, 2)))


def test_a_parameter_sync_shows_in_the_next_step() -> None:
    program, costs = program_and_costs()
    sync = CollectiveCosts(sync_seconds=0.2, sync_bytes=1, stages=(0,), readers=(0,))
    times = {"bucket 0": sync}
    bound = by_change(advise(program, replace(costs, collectives=times)), "reductions that take no")
    assert bound.step_seconds == pytest.approx(11 * 0.03)
    assert bound.gain == pytest.approx(0.2 / (11 * 0.03 + 0.2))


def test_gains_are_called_rough_where_the_simulation_is_off() -> None:
    program, costs = program_and_costs(megabytes=1)
    timeline = as_measured(recorded(program, costs))
    assert not explain(timeline).notes
    slow = replace(timeline, step_ends=(1.2 * timeline.seconds,))
    (note,) = explain(slow).notes
    assert note.endswith("a gain may be wrong by 17 % of a step")


def test_a_large_program_has_less_advice() -> None:
    program = lower(build("1f1b", num_ranks=16, num_microbatches=100))
    costs = Costs((StageCosts(0.01, 0.02, 0.01, outputs={"x": 10**6}),) * 16, Network(125e6))
    timeline = recorded(program, costs)
    explanation = explain(timeline, program=program, costs=costs)
    assert explanation.notes == ["the schedule is large: not all changes were simulated"]
    assert explanation.advice


def test_a_split_backward_needs_the_time_of_its_weights() -> None:
    program, costs = program_and_costs(megabytes=1)
    changes = [each.change for each in advise(program, costs)]
    assert any(change.startswith('parallel.schedule = "zb-h1"') for change in changes)
    # hop-aware-1f1b has the warm-up of eager-1f1b here, and is not tried again.
    assert not any("hop-aware-1f1b" in change for change in changes)
    assert any("hop-aware-zb-h1" in change for change in changes)
    unknown = tuple(replace(stage, weight_seconds=0.0) for stage in costs.stages)
    changes = [each.change for each in advise(program, replace(costs, stages=unknown))]
    assert not any("zb-h1" in change for change in changes)


@pytest.mark.parametrize("name", ["1f1b", "eager-1f1b", "gpipe", "zb-h1"])
def test_costs_of_a_timeline(name: str) -> None:
    """A simulation with what a timeline says takes as long as the timeline."""
    program, costs = program_and_costs(name, factors=(1, 1.2, 0.7, 1), megabytes=2)
    stages = tuple(replace(stage, optimizer_seconds=0.005) for stage in costs.stages)
    costs = replace(costs, stages=stages, host=HostCosts(1e-4, 0.0, 0.002))
    timeline = recorded(program, costs, 2)
    lookup = Lookup(timeline)
    found, inferred = program_of(lookup, 1), costs_of(lookup)
    assert found.schedule.actions == program.schedule.actions
    assert found.links == program.links
    assert [s.forward_seconds for s in inferred.stages] == pytest.approx(
        [s.forward_seconds for s in costs.stages]
    )
    assert inferred.host.step_seconds == pytest.approx(0.002)
    again = simulate(found, inferred).step_seconds[0]
    assert again == pytest.approx(timeline.step_ends[0], rel=0.01)


def test_skips_over_stages_are_found() -> None:
    links = (
        Link("h", 0, (1, 3)),
        Link("h", 1, (2,)),
        Link("mask", 0, (2,), False),
        Link("h", 2, (3,)),
    )
    schedule = replace(
        build("1f1b", num_ranks=4, num_microbatches=4), feeds=((), (0,), (0, 1), (0, 2))
    )
    stages = tuple(StageCosts(0.01, 0.02, outputs={"h": 10**6, "mask": 10**3}) for _ in range(4))
    costs = Costs(stages, Network(nic_bytes_per_second=125e6))
    lookup = Lookup(recorded(lower(schedule, links=links), costs, 2))
    assert sorted(program_of(lookup, 0).links) == sorted(links)


def test_reductions_of_a_timeline() -> None:
    program, costs = program_and_costs()
    ends = (0, 3)
    tied: Any = {"sync_bytes": 1, "sync_seconds": 0.03, "stages": ends, "readers": ends}
    times = {
        "tied": CollectiveCosts(num_bytes=1, seconds=0.05, **tied),
        "bucket 0": CollectiveCosts(num_bytes=1, seconds=0.02, stages=(1,)),
    }
    lookup = Lookup(recorded(program, replace(costs, collectives=times), num_steps=3))
    inferred = costs_of(lookup).collectives
    assert {name: (own.seconds, own.sync_seconds) for name, own in inferred.items()} == {
        "tied": pytest.approx((0.05, 0.03)),
        "bucket 0": pytest.approx((0.02, 0.0)),
    }
    found = {name: (own.stages, own.readers) for name, own in inferred.items()}
    assert found == {"tied": ((0, 3), (0, 3)), "bucket 0": ((1,), ())}


def test_a_step_recorded_in_part_has_no_advice() -> None:
    program, costs = program_and_costs()
    timeline = recorded(program, costs)
    spans = tuple(span for span in timeline.spans if (span.kind, span.microbatch) != ("B", 3))
    explanation = explain(replace(timeline, spans=spans))
    assert not explanation.advice
    assert explanation.notes[0].startswith(
        "no advice: step 0 was recorded in part: 60 computes of at least 64"
    )
    assert explanation.path.seconds == pytest.approx(timeline.seconds)
    data = json.loads(json.dumps(explanation.to_json()))
    assert set(data) == {"sentence", "breakdown", "critical_path", "advice", "notes"}


def test_a_rank_without_stages_has_advice_too() -> None:
    first, second = ((Action(s, "F", 0), Action(s, "B", 0)) for s in (0, 1))
    program = lower(Schedule("gaps", 1, (0, 2), (first, (), second)))
    costs = Costs((StageCosts(0.01, 0.02),) * 2, Network(nic_bytes_per_second=125e6))
    assert by_change(advise(program, costs), "layers moved").gain > 0


def test_a_rank_that_computes_faster_has_shorter_weight_gradients_too() -> None:
    program = lower(build("zb-h1", num_ranks=2, num_microbatches=4))
    own = StageCosts(1.0, 2.0, weight_seconds=0.5), StageCosts(3.0, 6.0, weight_seconds=1.5)
    costs = Costs(own)
    changes = {found.change: found.costs for found in what_ifs(program, costs)}
    (evened,) = (own for change, own in changes.items() if change.startswith("layers moved"))
    slow = evened.stages[1]
    assert slow.weight_seconds / 1.5 == pytest.approx(slow.forward_seconds / 3.0)
    assert 0.5 < slow.forward_seconds / 3.0 < 1.0


def test_a_layer_that_takes_longer_counts_as_more() -> None:
    """Rank 3 has two layers; the first one takes a third of its time, and fits on rank 2."""
    program, costs = program_and_costs(factors=(2, 2, 1, 3))
    layers = ({"0": 1.0}, {"1": 1.0}, {"2": 1.0}, {"3": 5.0, "4": 10.0})
    moved = by_change(
        advise(program, costs, of=replace(recorded(program, costs), layers=layers)), "move"
    )
    assert moved.change == "move layer 3 to rank 2 (parallel.boundaries = [1, 2, 4])"
    even = Costs(
        tuple(StageCosts(0.02, 0.04, 0.02, outputs={"x": 0}) for _ in range(4)), costs.network
    )
    assert moved.step_seconds == pytest.approx(simulate(program, even).step_seconds[0])


def test_layers_move_from_a_slow_link_though_all_ranks_compute_alike() -> None:
    """Messages between ranks 1 and 2 are on their way for 42 ms; nothing is uneven."""
    stage = StageCosts(0.03, 0.06, 0.03, outputs={"x": 2**20})
    links = tuple(LinkCosts(*ends, 0.0, 2.5e7) for ends in ((1, 2), (2, 1)))
    program = lower(build("1f1b", num_ranks=4, num_microbatches=8))
    costs = Costs((stage,) * 4, Network(125e6, links=links))
    layers = tuple(dict.fromkeys(names, 1.0) for names in ("abc", "def", "ghi", "jkl"))
    known = replace(recorded(program, costs), layers=layers)
    moved = by_change(advise(program, costs, of=known), "move")
    assert moved.cause == "pipeline"
    assert moved.change == (
        "move layer d to rank 0, layer f to rank 2, layer i to rank 3 "
        '(parallel.boundaries = ["e", "f", "i"])'
    )
    own = tuple(
        replace(stage, forward_seconds=0.01 * n, backward_seconds=0.02 * n, weight_seconds=0.01 * n)
        for n in (4, 1, 3, 4)
    )
    expected = simulate(program, replace(costs, stages=own)).step_seconds[0]
    assert moved.step_seconds == pytest.approx(expected)
