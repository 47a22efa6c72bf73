"""lower says all that each rank does, and nothing earlier or more often than it must."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import given, settings

from pipegrad import schedules
from pipegrad.errors import ScheduleError
from pipegrad.schedules import Action, Schedule
from pipegrad.schedules.program.lower import lower
from pipegrad.schedules.program.program import Channel, Item, Link, Op, Program
from pipegrad.schedules.program.verify import verify
from pipegrad.simulation.costs import Costs, Network, StageCosts
from tests.support.schedules.makespan import recorded
from tests.support.schedules.programs import places_of, programs, rows

quick = settings(deadline=None, max_examples=60, derandomize=True)
TRANSFERS = (Op.POST_RECEIVE, Op.WAIT_RECEIVE, Op.SEND, Op.RELEASE)
FULL = ("gpipe", "1f1b", "eager-1f1b", "hop-aware-1f1b", "interleaved-1f1b")  # backwards are whole
NAMES = (*FULL, "zb-h1", "hop-aware-zb-h1", "zbv", "v-half", "v-min")


def build(name: str, num_ranks: int, num_microbatches: int) -> Schedule:
    """Returns a schedule; one where hops differ, if it knows them."""
    numbers = {"num_ranks": num_ranks, "num_microbatches": num_microbatches}
    if name.startswith("hop-aware"):
        hops = [0.0, 0.5, 2.0, 0.1] * 2
        return schedules.build(
            name, **numbers, hop_seconds=hops[: num_ranks - 1], compute_seconds=1
        )
    return schedules.build(name, **numbers)


def computes(program: Program, rank: int) -> list[tuple[int, Action]]:
    """Returns the actions of a rank, and where they are."""
    return [(at, program.action(item)) for at, item in places_of(program, rank, Op.COMPUTE)]


def ranks_of(program: Program) -> range:
    return range(len(program.items))


# Every schedule.


def numbers() -> Iterator[tuple[str, int, int]]:
    """Yields each schedule with each size for which it is defined."""
    for name, num_ranks in product(NAMES, (1, 2, 4)):
        for num_microbatches in sorted({1, 2, num_ranks, 2 * num_ranks, 4 * num_ranks + 1}):
            if name != "interleaved-1f1b" or num_microbatches % num_ranks == 0:
                yield name, num_ranks, num_microbatches


@pytest.mark.parametrize(("name", "num_ranks", "num_microbatches"), list(numbers()))
def test_every_schedule_is_proven_at_any_depth(
    name: str, num_ranks: int, num_microbatches: int
) -> None:
    schedule = build(name, num_ranks, num_microbatches)
    for depth in range(5):
        program = lower(schedule, depth=depth)
        verify(program)
        for rank in ranks_of(program):
            assert tuple(action for _, action in computes(program, rank)) == schedule.actions[rank]
            # A neighbour before and one behind of each stage of the rank, if on another rank.
            pairs = pairwise(schedule.stage_to_rank)
            num_sends = num_microbatches * sum(rank in p for p in pairs if p[0] != p[1])
            assert len(places_of(program, rank, Op.SEND)) == num_sends
            assert len(places_of(program, rank, Op.WAIT_RECEIVE)) == num_sends


@quick
@given(program=programs())
def test_a_value_goes_to_each_rank_once_and_its_gradient_comes_back_once(program: Program) -> None:
    places, microbatches = program.schedule.stage_to_rank, program.schedule.num_microbatches
    channels = list[Channel]()
    for number, link in enumerate(program.links):
        source = places[link.producer]
        for target in {places[consumer] for consumer in link.consumers} - {source}:
            channels.append(Channel(number, "F", source, target))
            if link.differentiable:
                channels.append(Channel(number, "B", target, source))
    assert sorted(program.channels) == sorted(channels)
    for op in TRANSFERS:
        at_source = op in (Op.SEND, Op.RELEASE)
        expected = Counter(
            (channel.source if at_source else channel.target, channel, microbatch)
            for channel in channels
            for microbatch in range(microbatches)
        )
        found = Counter(
            (rank, program.channels[item.which], item.microbatch)
            for rank in ranks_of(program)
            for _, item in places_of(program, rank, op)
        )
        assert found == expected
    # The same comes of the same.
    given: dict[str, Any] = {"links": program.links, "synced": program.synced}
    again = [lower(program.schedule, depth=2, **given) for _ in range(2)]
    assert again[0] == again[1]
    assert (again[0].items, again[0].channels) == (again[1].items, again[1].channels)


# Receives.


@pytest.mark.parametrize("depth", range(5))
@pytest.mark.parametrize("num_microbatches", [1, 2, 5, 16, 64])
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_1f1b_holds_as_many_buffers_as_are_in_flight(
    num_ranks: int, num_microbatches: int, depth: int
) -> None:
    """Never more than P + 2 depth, whatever M; torch 2.13 holds M for each edge.

    Most are held when rank r begins its first backward: the inputs of its P-r forwards and the
    gradient, and of each of the two edges `depth` ahead of these, as far as there are so many.
    From then on a forward takes one up for each that a backward gives back. Rank 0 receives no
    inputs, the last rank no gradients; so the most is on rank 1: P-1 + depth + 1 + depth.
    """

    def at_most(in_use: int) -> int:
        return min(num_microbatches, in_use + depth)

    held = verify(lower(build("1f1b", num_ranks, num_microbatches), depth=depth)).receive_buffers
    assert held == tuple(
        (at_most(num_ranks - rank) if rank > 0 else 0) + (at_most(1) if rank + 1 < num_ranks else 0)
        for rank in range(num_ranks)
    )
    assert max(held) <= num_ranks + 2 * depth


@quick
@given(program=programs())
def test_waits_stand_directly_before_the_first_action_that_reads(program: Program) -> None:
    between = {Op.WAIT_RECEIVE, Op.RELEASE, Op.FIRST_USE, Op.LAST_BACKWARD}
    for rank in ranks_of(program):
        items, done = list(program.decoded(rank)), computes(program, rank)
        for place, item in places_of(program, rank, Op.WAIT_RECEIVE):
            reader, action = next((at, action) for at, action in done if at > place)
            readers = [at for at, other in done if reads(program, item, other)]
            assert readers[0] == reader, f"{program.words(item)} before {action}"
            assert {op for op, _, _ in items[place:reader]} <= between


def reads(program: Program, item: Item, action: Action) -> bool:
    """Returns whether an action takes what a WAIT_RECEIVE waits for."""
    number, kind, _, _ = program.channels[item.which]
    link = program.links[number]
    return action.microbatch == item.microbatch and (
        (action.kind == "F" and action.stage in link.consumers)
        if kind == "F"
        else (action.kind in ("B", "I") and action.stage == link.producer)
    )


@pytest.mark.parametrize("depth", range(5))
def test_depth_is_how_many_receives_of_an_edge_are_posted_ahead(depth: int) -> None:
    """Two by default: each one more costs a rank in the middle two buffers, and gained nothing."""
    program = lower(build("gpipe", 2, 6), depth=depth)
    ahead, found = 0, list[int]()
    for op, _, _ in program.decoded(1):
        ahead += (op is Op.POST_RECEIVE) - (op is Op.WAIT_RECEIVE)
        if op is Op.WAIT_RECEIVE:
            found.append(ahead)
    assert found == [min(depth, left) for left in (5, 4, 3, 2, 1, 0)]
    assert (program == lower(program.schedule)) == (depth == 2)


@pytest.mark.parametrize(
    ("producer", "consumers"), [(1, (0,)), (0, (2,)), (0, ()), (0, (1, 1)), (-1, (0,))]
)
def test_links_go_on_to_later_stages_that_there_are(
    producer: int, consumers: tuple[int, ...]
) -> None:
    with pytest.raises(ScheduleError) as caught:
        lower(rows("0F0 0B0", "1F0 1B0"), links=[Link("x", producer, consumers)])
    assert str(caught.value) == (
        f"link 'x' goes from stage {producer} to stages {list(consumers)}: "
        "expected later ones, ascending, below 2"
    )
    with pytest.raises(ScheduleError, match="depth is -1, expected 0 or more"):
        lower(rows("0F0 0B0", "1F0 1B0"), depth=-1)


# Without backwards.


@pytest.mark.parametrize("name", NAMES)
def test_forwards_alone_have_no_gradients_and_reduce_nothing(name: str) -> None:
    schedule = build(name, 4, 8)
    stages = tuple(s for s, place in enumerate(schedule.stage_to_rank) if place in (0, 3))
    program = lower(schedule, depth=0, synced=stages[-1:], forward_only=True)
    assert program.forward_only
    assert {channel.kind for channel in program.channels} == {"F"}
    for rank in ranks_of(program):
        forwards = tuple(a for a in schedule.actions[rank] if a.kind == "F")
        assert tuple(action for _, action in computes(program, rank)) == forwards
        others = [i for i in program.decoded(rank) if i.op not in {*TRANSFERS, Op.COMPUTE}]
        used = rank == schedule.stage_to_rank[stages[-1]]
        assert others == [Item(Op.FIRST_USE, stages[-1], 0)] * used
    most = (1,) * 4 if name in ("interleaved-1f1b", "zbv", "v-half", "v-min") else (0, 1, 1, 1)
    assert verify(program).receive_buffers == most


# Gradients and parameters of other ranks.


@quick
@given(program=programs())
def test_a_stage_is_final_behind_its_last_backward_and_what_that_sends(program: Program) -> None:
    for rank in ranks_of(program):
        items = list(program.decoded(rank))
        finals = {item.which: at for at, item in places_of(program, rank, Op.FINAL)}
        last = {action.stage: at for at, action in computes(program, rank) if action.kind in "BW"}
        assert finals.keys() == last.keys()
        for stage, place in finals.items():
            assert {item.op for item in items[last[stage] + 1 : place]} <= {Op.SEND}


@quick
@given(program=programs())
def test_parameters_of_other_ranks_are_awaited_before_their_first_use(program: Program) -> None:
    for rank in ranks_of(program):
        for stage in {action.stage for _, action in computes(program, rank)}:
            (first, *_) = [at for at, a in computes(program, rank) if a.stage == stage]
            uses = [at for at, i in places_of(program, rank, Op.FIRST_USE) if i.which == stage]
            assert uses == ([first - 1] if stage in program.synced else [])


@pytest.mark.parametrize("num_ranks", range(2, 9))
@pytest.mark.parametrize("name", FULL)  # else weights' gradients fill the end, on all ranks
def test_all_but_stage_0_reduce_before_the_step_ends(name: str, num_ranks: int) -> None:
    """Data parallel: only the reductions of stage 0 come when nothing is left to hide them."""
    for num_microbatches in (num_ranks, 2 * num_ranks, 4 * num_ranks):
        first, *others = build(name, num_ranks, num_microbatches).stage_ticks
        assert max(others) < first


# Skips have a connection of their own where they would hold up what the next stage takes.

NEXT = tuple(Link("x", stage, (stage + 1,)) for stage in range(3))
LOOP, V, ROW = (0, 1, 0, 1), (0, 1, 1, 0), (0, 1, 2, 3)  # stages to ranks


def skips(places: tuple[int, ...], *others: Link) -> list[tuple[str, str, int, int]]:
    """Returns the names of skips, which way they go, and between which ranks."""
    num_ranks = 1 + max(places)
    order = [*range(4), *range(7, 3, -1)]
    actions = tuple(
        tuple(
            Action(step if step < 4 else step - 4, "F" if step < 4 else "B", 0)
            for step in order
            if places[step % 4] == rank
        )
        for rank in range(num_ranks)
    )
    program = lower(Schedule("some", 1, places, actions), links=[*NEXT, *others])
    return sorted((program.links[c.link].name, *c[1:]) for c in program.skips)


@pytest.mark.parametrize(
    ("places", "others", "expected"),
    [
        (ROW, [Link("skip", 0, (3,))], []),  # nothing else goes from rank 0 to rank 3
        (LOOP, [], []),
        (LOOP, [Link("skip", 0, (3,))], [("skip", "B", 1, 0), ("skip", "F", 0, 1)]),
        (V, [Link("skip", 0, (2,))], [("skip", "B", 1, 0), ("skip", "F", 0, 1)]),
        (V, [Link("skip", 0, (3,))], []),  # it stays on its rank
        # The next stage takes it, too.
        (LOOP, [Link("skip", 0, (1, 3))], []),
        (LOOP, [Link("skip", 0, (2, 3))], [("skip", "B", 1, 0), ("skip", "F", 0, 1)]),
        (LOOP, [Link("mask", 0, (3,), False)], [("mask", "F", 0, 1)]),
        (LOOP, [Link("skip", 1, (3,))], []),
        # From rank 1 only the gradient of x comes back to rank 0, and none of a mask.
        ((0, 1, 1, 1), [Link("skip", 0, (2,))], [("skip", "B", 1, 0), ("skip", "F", 0, 1)]),
    ],
)
def test_a_value_that_skips_stages_beside_one_that_does_not(
    places: tuple[int, ...], others: list[Link], expected: list[tuple[str, str, int, int]]
) -> None:
    assert skips(places, *others) == expected


def test_an_evaluation_knows_the_same_channels() -> None:
    schedule = build("interleaved-1f1b", 2, 2)
    links = [*NEXT, Link("skip", 0, (3,))]
    training = lower(schedule, links=links)
    evaluation = lower(schedule, links=links, forward_only=True)
    assert training.skips == {Channel(3, "F", 0, 1), Channel(3, "B", 1, 0)}
    assert evaluation.skips == {Channel(3, "F", 0, 1)}


def arrivals(program: Program) -> dict[str, float]:
    """Returns when values of the first microbatch come to rank 1, if NICs send a byte a second."""
    stages = (StageCosts(1.0, 2.0, outputs={"x": 1, "skip": 10}),) * 4
    timeline = recorded(program, Costs(stages, Network(nic_bytes_per_second=1.0)))
    spans = (s for s in timeline.spans if s.kind == "transfer" and (s.rank, s.peer) == (0, 1))
    return {s.label.split(" of ")[0]: s.end for s in spans if s.label.endswith("of 0F0")}


def test_in_a_simulation_both_share_the_nic() -> None:
    """Behind the skip x would come at 1 + 10 + 1."""
    schedule = build("interleaved-1f1b", 2, 2)
    program = lower(schedule, links=[Link("skip", 0, (3,)), *NEXT])
    found = arrivals(program)
    assert found["x"] == pytest.approx(1 + 2)
    assert found["skip"] > 12


# Word for word.


def test_a_skip_and_a_value_with_two_consumers_in_full() -> None:
    """h goes to ranks 1 and 2, and its gradients are summed; skip goes to rank 2 alone."""
    links = [Link("h", 0, (1, 2)), Link("skip", 0, (2,)), Link("x", 1, (2,))]
    schedule = rows("0F0 0B0", "1F0 1I0 1W0", "2F0 2B0", stages=(0, 1, 2))
    program = lower(schedule, links=links, depth=0, synced=(0, 2))
    listings = [program.listing(rank) for rank in range(3)]
    assert str(program) == "\n".join(listings)
    assert (
        "\n".join(listings[:2])
        == """\
rank 0
  first-use      stage 0
  compute        0F0
  send           h of 0F0 to rank 1
  send           h of 0F0 to rank 2
  send           skip of 0F0 to rank 2
  post-receive   gradient of h of 0F0 from rank 1
  post-receive   gradient of h of 0F0 from rank 2
  post-receive   gradient of skip of 0F0 from rank 2
  wait-receive   gradient of h of 0F0 from rank 1
  wait-receive   gradient of h of 0F0 from rank 2
  wait-receive   gradient of skip of 0F0 from rank 2
  release        h of 0F0 to rank 1
  release        h of 0F0 to rank 2
  release        skip of 0F0 to rank 2
  last-backward  stage 0
  compute        0B0
  final          stage 0
rank 1
  post-receive   h of 0F0 from rank 0
  wait-receive   h of 0F0 from rank 0
  compute        1F0
  send           x of 1F0 to rank 2
  post-receive   gradient of x of 1F0 from rank 2
  wait-receive   gradient of x of 1F0 from rank 2
  release        x of 1F0 to rank 2
  compute        1I0
  send           gradient of h of 0F0 to rank 0
  inputs-final   stage 1
  compute        1W0
  final          stage 1
  release        gradient of h of 0F0 to rank 0"""
    )
