"""simulate against closed forms: what a step takes where that can be computed by hand."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from pipegrad.errors import ScheduleError
from pipegrad.schedules import Program, build, lower, verify
from pipegrad.schedules.program.program import Link, Op
from pipegrad.simulation.costs import (
    CollectiveCosts,
    Costs,
    HostCosts,
    LinkCosts,
    Network,
    StageCosts,
)
from pipegrad.simulation.explain.explanation import explain
from pipegrad.simulation.simulator import simulate
from pipegrad.simulation.timeline import BESIDE, COMPUTE, ON_RANK, Timeline
from tests.support.schedules.makespan import recorded

IDEAL = Network()
NAMES = ["gpipe", "1f1b", "eager-1f1b", "interleaved-1f1b", "zb-h1", "zbv", "v-half", "v-min"]


def program(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    *,
    forward_only: bool = False,
) -> Program:
    schedule = build(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    return lower(schedule, forward_only=forward_only)


def unit_costs(made: Program, network: Network = IDEAL, **held: int) -> Costs:
    """A rank's slice takes 1 for a forward, 1 for I and 1 for W; a value has one byte."""
    share = made.schedule.num_ranks / len(made.schedule.stage_to_rank)
    stage = StageCosts(share, 2 * share, share, outputs={"x": 1}, **held)
    return Costs((stage,) * len(made.schedule.stage_to_rank), network)


def seconds(made: Program, costs: Costs) -> float:
    return simulate(made, costs, records=False).step_seconds[0]


@pytest.mark.parametrize(
    ("name", "alone", "with_latency"),
    [
        ("gpipe", 117.0, 120.5),
        ("1f1b", 117.0, 134.0),
        ("eager-1f1b", 117.0, 120.5),
        ("interleaved-1f1b", 106.5, 114.0),
        ("zb-h1", 103.0, 110.0),
        ("zbv", 99.5, 107.75),
    ],
)
def test_known_makespans_of_eight_ranks(name: str, alone: float, with_latency: float) -> None:
    """The numbers are those of an independent simulation of the schedules' papers."""
    made = program(name, 8, 32)
    assert seconds(made, unit_costs(made)) == alone
    assert seconds(made, unit_costs(made, Network(latency_seconds=0.25))) == with_latency
    nothing = Costs((StageCosts(),) * len(made.schedule.stage_to_rank))
    assert simulate(made, nothing, num_steps=3).step_seconds == (0.0,) * 3
    for ranks, microbatches in ((1, 2), (5, 1), (5, 9)):
        made = program("1f1b", ranks, microbatches)
        assert seconds(made, unit_costs(made)) == 3 * (microbatches + ranks - 1)


@pytest.mark.parametrize("name", NAMES)
def test_a_timeline_holds_each_action_once_and_every_wait_ends_with_what_it_waits_for(
    name: str,
) -> None:
    made = program(name, 4, 8)
    costs = unit_costs(made, Network(3.0, 0.1))
    timeline = recorded(made, costs)
    assert seconds(made, costs) == timeline.seconds  # recording changes no number
    expected = Counter(str(action) for own in made.schedule.actions for action in own)
    assert Counter(s.action for s in timeline.spans if s.kind in COMPUTE) == expected
    for rank in range(4):
        for before, after in pairwise(timeline.on_rank(rank)):
            assert before.end <= after.begin + 1e-9
    arrivals = {(s.which, s.microbatch, s.peer): s for s in timeline.spans if s.kind == "transfer"}
    assert len([i for items in made.items for i in items if i & 15 == Op.SEND]) == len(arrivals)
    assert max(s.end for s in timeline.spans if s.kind in ON_RANK) == timeline.seconds
    waits = [s for s in timeline.spans if s.kind == "wait for receive"]
    assert waits
    for wait in waits:
        transfer = arrivals[wait.which, wait.microbatch, wait.rank]
        assert (transfer.rank, transfer.label, transfer.end) == (wait.peer, wait.label, wait.end)


def test_a_transfer_takes_latency_and_bytes_over_the_slower_of_link_and_nic() -> None:
    made = program("gpipe", 2, 1)
    costs = Costs((StageCosts(1, 1, outputs={"x": 100}), StageCosts(1, 1)))
    slow = (LinkCosts(0, 1, 0.5, 25.0),)
    for network, there, back in [
        (Network(50.0), 2.0, 2.0),
        (Network(50.0, 0.25), 2.25, 2.25),
        (Network(50.0, links=slow), 4.5, 2.0),
        (Network(50.0, hosts=(7, 7)), 0.0, 0.0),  # one host: no NIC
        (Network(50.0, hosts=(7, 7), links=slow), 4.5, 0.0),
    ]:
        found = seconds(made, Costs(costs.stages, network))
        assert found == pytest.approx(4 + there + back, rel=1e-12)
        assert network.seconds(0, 1, 100) == there


def test_messages_at_once_share_a_nic() -> None:
    """Rank 0 sends 100 bytes to ranks 1 and 2 at once: each gets half of its NIC's rate."""
    links = (Link("a", 0, (1,)), Link("b", 0, (2,)))
    made = lower(build("gpipe", num_ranks=3, num_microbatches=1), links=links)
    stages = (StageCosts(1, 1, outputs={"a": 100, "b": 100}), StageCosts(1, 1), StageCosts(1, 1))
    timeline = recorded(made, Costs(stages, Network(100.0)))
    there = [s for s in timeline.spans if s.kind == "transfer" and s.rank == 0]
    assert [(s.begin, s.end) for s in there] == [(1.0, 3.0)] * 2
    # Both come back at the same time, and share what enters rank 0.
    back = [s for s in timeline.spans if s.kind == "transfer" and s.peer == 0]
    assert [(s.begin, s.end) for s in back] == [(5.0, 7.0)] * 2
    assert timeline.seconds == pytest.approx(8.0)
    # Those of one edge go one after the other.
    made = lower(
        build("gpipe", num_ranks=2, num_microbatches=1), links=(links[0], Link("b", 0, (1,)))
    )
    both = (StageCosts(1, 1, outputs={"a": 100, "b": 300}), StageCosts(1, 1))
    spans = recorded(made, Costs(both, Network(100.0))).spans
    there = [s for s in spans if s.kind == "transfer" and s.rank == 0]
    assert [(s.begin, s.end) for s in there] == [(1.0, 2.0), (2.0, 5.0)]


def test_a_message_waits_for_its_receive() -> None:
    """With no receives posted ahead, a message begins when its receiver comes to wait for it."""
    made = lower(build("1f1b", num_ranks=2, num_microbatches=4), depth=0)
    early = lower(build("1f1b", num_ranks=2, num_microbatches=4))
    stages = (StageCosts(1, 2, outputs={"x": 1}), StageCosts(3, 6))
    costs = Costs(stages, Network(latency_seconds=0.5))
    assert seconds(made, costs) > seconds(early, costs)


def test_hosts_take_their_time() -> None:
    made = program("1f1b", 2, 4)
    costs = unit_costs(made)
    slow = Costs(costs.stages, costs.network, {}, HostCosts(0.1, 0.01, 1.0))
    result = simulate(made, slow)
    assert result.timeline is not None
    host = [s for s in result.timeline.spans if s.kind == "host"]
    # Each rank: a step, 8 actions, and 4 messages sent and 4 received.
    assert sum(s.seconds for s in host if s.rank == 0) == pytest.approx(1.0 + 0.8 + 0.08)
    assert result.step_seconds[0] > seconds(made, costs) + 1.0


# Reductions.


def test_a_bucket_leaves_inside_of_the_last_backward() -> None:
    """Two buckets of 30 and 10 bytes: the first leaves after 3/4 of the last backward."""
    made = program("1f1b", 1, 4)
    sizes = {name: CollectiveCosts(n, 2, stages=(0,)) for name, n in (("a", 30), ("b", 10))}
    costs = Costs((StageCosts(1, 2, optimizer_seconds=0.5),), Network(10.0), sizes)
    result = simulate(made, costs)
    assert result.timeline is not None
    spans = {s.label: s for s in result.timeline.spans if s.kind == "reduction"}
    # An all-reduce of n bytes over 2 ranks sends n bytes: 3 s and 1 s at 10 bytes per second.
    assert (spans["a"].begin, spans["a"].end) == (11.5, 14.5)
    assert (spans["b"].begin, spans["b"].end) == (14.5, 15.5)  # on the same comm stream
    waits = [s for s in result.timeline.spans if s.kind == "wait for reduction"]
    assert sum(s.seconds for s in waits) == 3.5
    assert result.step_seconds == (16.0,)


def test_a_reduction_waits_for_all_its_ranks() -> None:
    made = program("1f1b", 2, 4)
    tie = {"tie": CollectiveCosts(40, 2, stages=(0, 1))}
    costs = Costs((StageCosts(1, 2), StageCosts(1, 2)), Network(10.0), tie)
    timeline = recorded(made, costs)
    spans = [s for s in timeline.spans if s.kind == "reduction"]
    assert {(s.rank, s.begin, s.end) for s in spans} == {(0, 15.0, 19.0), (1, 15.0, 19.0)}


def test_the_owner_of_a_tied_weight_receives_before_its_own_gradient_is_complete() -> None:
    """Stage 1 is final at 13: its part of 40 bytes leaves then, in the drain, and not at 15."""
    made = program("1f1b", 2, 4)
    costs = {
        "tie": CollectiveCosts(40, 2, "send", stages=(0, 1)),
        "mean": CollectiveCosts(10, 2, stages=(0,)),
    }
    timeline = recorded(made, Costs((StageCosts(1, 2),) * 2, Network(10.0), costs))
    spans = {(s.label, s.rank): (s.begin, s.end) for s in timeline.spans if s.kind == "reduction"}
    assert spans["tie", 1] == (13.0, 17.0)
    # The comm stream of rank 0 is in order: the mean leaves when the tied weight has arrived.
    assert spans["mean", 0] == (17.0, 18.0)


def test_parameters_return_under_the_next_forwards() -> None:
    """Rank 1 needs the tied weight when its first forward begins; rank 0 has stepped it."""
    made = program("1f1b", 2, 4)
    stages = (StageCosts(1, 2, outputs={"x": 1}), StageCosts(1, 2))
    tie = {"tie": CollectiveCosts(40, 2, "send", sync_bytes=20, stages=(0, 1), readers=(1,))}
    result = simulate(made, Costs(stages, Network(10.0), tie), num_steps=3)
    assert result.timeline is not None
    syncs = [s for s in result.timeline.spans if s.kind == "parameter sync" and s.rank == 0]
    assert [round(s.seconds, 9) for s in syncs] == [2.2, 2.2, 2.0]  # two values pass meanwhile
    waits = [s for s in result.timeline.spans if s.kind == "wait for parameters"]
    assert {s.step for s in waits} == {1, 2}
    assert {s.rank for s in waits} == {1}
    # The last step ends without its sync: it would run beside the next one.
    assert result.step_seconds[0] < result.step_seconds[1]


def test_parameters_that_return_while_the_host_takes_a_message_are_there() -> None:
    """A rank looked for them, went on with its message, and then waited for what had happened."""
    made = program("1f1b", 2, 4)
    found = []
    for half_seconds in range(20):
        tie = CollectiveCosts(sync_seconds=half_seconds / 2, stages=(0, 1), readers=(1,))
        costs = Costs((StageCosts(1, 2),) * 2, IDEAL, {"tie": tie}, HostCosts(message_seconds=1.0))
        found.append(sum(simulate(made, costs, num_steps=2).step_seconds))
    assert found == sorted(found)
    assert found[0] == found[1] < found[-1]


def test_steps_of_ranks_that_do_not_meet_overlap() -> None:
    """Without a meeting zbv has no bubble: a tail overlaps the next head."""
    made = program("zbv", 4, 8)
    costs = unit_costs(made)
    apart = Costs(costs.stages, ranks_meet=False)
    assert simulate(made, costs, num_steps=3).step_seconds == (25.5,) * 3
    assert simulate(made, apart, num_steps=3).step_seconds == (25.5, 24.0, 24.0)


# Memory.


@pytest.mark.parametrize("name", NAMES)
def test_peak_activations_are_those_that_the_proof_counts(name: str) -> None:
    made = program(name, 4, 8)
    held = StageCosts(1, 2, 1, activation_bytes=1, factor_bytes=1)
    result = simulate(made, Costs((held,) * len(made.schedule.stage_to_rank)))
    assert result.peak_bytes == verify(made).live_activations
    assert result.timeline is not None
    for rank, points in enumerate(result.timeline.memory):
        assert max(p.num_bytes for p in points) == result.peak_bytes[rank]
        assert points[-1].num_bytes == 0
    # So are buffers, beside the parameters.
    sent = StageCosts(1, 2, 1, outputs={"x": 1}, parameter_bytes=1000)
    for each in (made, program(name, 4, 8, forward_only=True)):
        result = simulate(each, Costs((sent,) * len(made.schedule.stage_to_rank)))
        assert result.timeline is not None
        for rank, most in enumerate(verify(each).receive_buffers):
            held_bytes = 1000 * made.schedule.stage_to_rank.count(rank)
            # A gradient on its way out is held beside the receive buffers.
            assert 0 <= result.peak_bytes[rank] - held_bytes - most <= 8
            assert result.timeline.memory[rank][-1].num_bytes == held_bytes


# Odd input.


def test_a_timeline_survives_json_and_is_cut_into_steps() -> None:
    made = program("1f1b", 3, 4)
    timeline = recorded(made, unit_costs(made, Network(3.0)), num_steps=2)
    assert Timeline.from_json(timeline.to_json()) == timeline
    first, second = timeline.of_step(0), timeline.of_step(1)
    assert first.seconds + second.seconds == pytest.approx(timeline.seconds)
    for step in (first, second):
        assert sum(s.kind in COMPUTE for s in step.spans) == 3 * 4 * 2
        assert all(0 <= s.begin <= s.end <= step.seconds for s in step.spans)
        assert {s.kind for s in step.spans if s.kind in BESIDE} == {"transfer"}
    assert math.isclose(first.seconds, second.seconds)


# Issue 20, a review: what the first version got wrong.


def test_one_rank_has_steps_that_end_with_its_reductions_and_syncs() -> None:
    costs = {"b": CollectiveCosts(num_bytes=8, kind="send", stages=(0,), readers=(0,))}
    made = program("1f1b", 1, 1)
    assert seconds(made, Costs((StageCosts(1, 2),), Network(), costs)) == 3.0
    made = program("1f1b", 1, 1, forward_only=True)
    assert simulate(made, Costs((StageCosts(1),)), num_steps=2).step_seconds == (1.0, 1.0)


def test_what_an_owner_gets_goes_from_rank_to_rank() -> None:
    """Over three ranks two messages follow each other, with the latency of each link."""
    made = program("gpipe", 3, 1)
    stages = (StageCosts(1, 1),) * 3
    network = Network(100.0, links=(LinkCosts(2, 1, 0.5), LinkCosts(1, 0, 0.25)))
    summed = CollectiveCosts(200, num_ranks=3, kind="send", stages=(0, 1, 2))
    reduced = Costs(stages, network, {"b": summed})
    # It begins when rank 1 has its gradients: 1.25 s before rank 0 has its own, and a step ends.
    extra = seconds(made, reduced) - seconds(made, Costs(stages, network))
    assert extra == pytest.approx(2.0 + 0.5 + 2.0 + 0.25 - 1.25)


def test_a_message_does_not_leave_before_its_host_has_sent_it() -> None:
    """The host takes 1 s for each of two messages; the second one waits for it, not for the first.

    Rank 0: F ends at 1, x is sent at 2 and y at 3. Both arrive 0.1 s later, and rank 1 takes 1 s
    to receive each of them.
    """
    links = (Link("x", 0, (1,)), Link("y", 0, (1,)))
    made = lower(build("gpipe", num_ranks=2, num_microbatches=1), links=links)
    stages = (StageCosts(1, 1, outputs={"x": 10, "y": 10}), StageCosts(1, 1))
    timeline = recorded(made, Costs(stages, Network(100.0), {}, HostCosts(0, 1.0)))
    there = [(s.begin, s.end) for s in timeline.spans if s.kind == "transfer" and s.rank == 0]
    assert [time for both in there for time in both] == pytest.approx([2.0, 2.1, 3.0, 3.1])


def test_a_part_of_a_timeline_is_a_timeline() -> None:
    """Computes of no time at its begin stay, and its step has the number 0."""
    made = program("1f1b", 2, 2)
    costs = Costs((StageCosts(0, 0, outputs={"x": 1}), StageCosts(1, 2)))
    timeline = recorded(made, costs, num_steps=2)
    for step in range(2):
        part = timeline.of_step(step)
        assert sum(s.kind == "F" for s in part.spans) == 4
        assert explain(part).breakdown.step == 0
        assert not any("no advice" in note for note in explain(part).notes)


PAIR = (StageCosts(),) * 2


@pytest.mark.parametrize(
    ("given", "costs", "says"),
    [
        (program("1f1b", 2, 4), None, "costs is a NoneType, expected Costs"),
        (program("1f1b", 2, 4), {"stages": []}, "Costs.from_json reads data"),
        (build("1f1b", num_ranks=2, num_microbatches=4), Costs(()), "program is a Schedule"),
        (program("1f1b", 2, 4), Costs(PAIR[1:]), "costs of 1 stages.*has 2"),
        (program("1f1b", 2, 4), Costs(PAIR, Network(hosts=(0, 1, 2))), "3 hosts.*2 ranks"),
    ],
)
def test_what_is_no_program_or_no_costs_is_refused(given: Any, costs: Any, says: str) -> None:
    with pytest.raises(ScheduleError, match=says):
        simulate(given, costs)
    with pytest.raises(ScheduleError, match="num_steps is 0"):
        simulate(program("1f1b", 2, 4), Costs(PAIR), num_steps=0)
