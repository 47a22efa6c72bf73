"""Rates of messages that share NICs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipegrad.simulation.costs import LinkCosts, Network
from pipegrad.simulation.engine.flows import Events, FairNetwork, Flow, Process, fair_rates

RATE = 12.0


def flow(source: int, target: int, limit: float = math.inf) -> Flow:
    return Flow(1.0, limit, ((0, source), (1, target)), 0.0)


def rates(*flows: Flow, weights: Sequence[float] = ()) -> list[float]:
    free = dict.fromkeys(product((0, 1), range(8)), RATE)
    weighted = dict(zip(flows, weights or [1.0] * len(flows), strict=True))
    found = dict(fair_rates(weighted, free))
    return [found[each] for each in flows]


def test_known_shares() -> None:
    assert rates(flow(0, 1)) == [12]
    assert rates(flow(0, 1), flow(1, 0)) == [12, 12]  # full duplex
    assert rates(flow(0, 1), flow(0, 2)) == [6, 6]
    assert rates(flow(0, 2), flow(1, 2)) == [6, 6]
    # What one flow cannot use, because its other NIC is shared by three, goes to the other.
    assert rates(flow(0, 1), flow(0, 2), flow(3, 2), flow(4, 2)) == [8, 4, 4, 4]
    assert rates(flow(0, 1, 2.0), flow(0, 2)) == [2, 10]
    # By weight.
    assert rates(flow(0, 1), weights=[0.1]) == [12]
    assert rates(flow(0, 1), flow(0, 2), weights=[1, 2]) == [4, 8]
    assert rates(flow(0, 1, 2.0), flow(0, 2), weights=[3, 1]) == [2, 10]
    # The first NIC leaves 3 to the flow of weight 1, and the second one gives the rest to the last.
    assert rates(flow(0, 1), flow(0, 2), flow(3, 2), weights=[3, 1, 1]) == [9, 3, 9]


def sent(network: FairNetwork, ended: dict[int, float], number: int, *what: float) -> Process:
    """Sends as the process of a message does: from when on, from where, to where, how much."""
    begin, source, target, num_bytes = what
    now = yield begin
    ended[number] = yield network.begin(now, int(source), int(target), num_bytes)


def ends_of(network: Network, *specs: tuple[float, int, int, float]) -> list[float]:
    """Returns when flows end."""
    events, ended = Events(), dict[int, float]()
    shared = FairNetwork(network, events)
    for number, what in enumerate(specs):
        events.start(sent(shared, ended, number, *what))
    events.run()
    return [ended[number] for number in range(len(specs))]


def ends(*specs: tuple[int, int, float]) -> list[float]:
    """Returns when flows end that all begin at 0."""
    return ends_of(Network(RATE), *((0.0, *spec) for spec in specs))


def test_a_longer_round_trip_gets_less() -> None:
    """Ranks 0, 1 and 2 in a row, where 2 also sends to 3: what 1 sends to 2 waits in more queues.

    From 1 to 0: two flows leave 1, and nothing comes back. From 1 to 2: two flows leave 2, too.
    So the weights are 1/2 and 1/4, and the rates 8 and 4.
    """
    found = ends((1, 0, 8.0), (1, 2, 8.0), (2, 3, 100.0), (2, 4, 100.0))
    assert found[:2] == pytest.approx([1.0, 1.0 + 4 / 12])  # both together as long as the NIC takes
    # Equal ones share equally.
    assert ends((0, 1, 6.0), (0, 2, 6.0)) == ends((0, 2, 6.0), (1, 2, 6.0)) == [1.0, 1.0]
    assert ends((0, 1, 12.0), (1, 0, 12.0)) == [1.0, 1.0]


pairs = st.tuples(st.integers(0, 7), st.integers(0, 7), st.sampled_from([1.0, 5.0, math.inf]))


@given(st.lists(pairs, min_size=1, max_size=12))
@settings(max_examples=200, deadline=None)
def test_rates_are_max_min_fair(specs: list[tuple[int, int, float]]) -> None:
    """No NIC is over its rate, and a flow below its limit has a full NIC where none has more."""
    flows = [flow(*spec) for spec in specs]
    found = dict(zip(flows, rates(*flows), strict=True))
    used = {
        nic: sum(rate for each, rate in found.items() if nic in each.nics)
        for nic in product((0, 1), range(8))
    }
    assert all(each <= RATE * (1 + 1e-9) for each in used.values())
    for each, rate in found.items():
        assert rate > 0
        if rate < each.limit * (1 - 1e-9):
            assert any(
                used[nic] >= RATE * (1 - 1e-9)
                and all(r <= rate * (1 + 1e-9) for other, r in found.items() if nic in other.nics)
                for nic in each.nics
            )


@given(st.lists(st.tuples(pairs, st.floats(0, 3), st.floats(0, 50)), min_size=1, max_size=10))
@settings(max_examples=100, deadline=None)
def test_every_byte_leaves_in_time(
    specs: list[tuple[tuple[int, int, float], float, float]],
) -> None:
    """Flows that begin and end at any time take as long as their bytes at full rate, or longer."""
    links = tuple(
        LinkCosts(source, target, 0.0, limit)
        for (source, target), limit in {(s, t): limit for (s, t, limit), _, _ in specs}.items()
    )
    ended = ends_of(
        Network(RATE, links=links), *((begin, s, t, size) for (s, t, _), begin, size in specs)
    )
    for number, (_, begin, num_bytes) in enumerate(specs):
        assert ended[number] >= begin + num_bytes / RATE - 1e-9
    # All flows at once are no faster than a NIC for each sender.
    for host in range(8):
        own = [i for i, ((source, _, _), _, _) in enumerate(specs) if source == host]
        if own:
            first = min(specs[i][1] for i in own)
            total = sum(specs[i][2] for i in own)
            assert max(ended[i] for i in own) >= first + total / RATE - 1e-9


def test_a_long_chain_is_computed_piece_by_piece() -> None:
    """100 hosts in a row send to their neighbours: no NIC does more than it can, or rests."""
    hops = ((a, a + 1) for a in range(99))
    ended = ends(*((*ends, 12.0) for a, b in hops for ends in ((a, b), (b, a))))
    # A host in the middle sends two messages, which take 1 s each alone. Messages of the hosts at
    # both ends have shorter round trips. What they leave moves inwards, and is lost where NICs are
    # computed piece by piece.
    assert len(ended) == 198
    assert min(ended) > 1.0
    assert max(ended) == pytest.approx(2.0, rel=0.2)
