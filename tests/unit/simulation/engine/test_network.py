"""Rates of messages that share NICs."""

from __future__ import annotations

import math
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipegrad.simulation.costs import LinkCosts, Network
from pipegrad.simulation.engine.events import Events
from pipegrad.simulation.engine.network import FairNetwork, Flow, fair_rates

RATE = 12.0


def flow(source: int, target: int, limit: float = math.inf) -> Flow:
    return Flow(1.0, limit, ((0, source), (1, target)), 0.0, lambda _: None)


def rates(*flows: Flow) -> list[float]:
    free = dict.fromkeys(product((0, 1), range(8)), RATE)
    found = dict(fair_rates(flows, free))
    return [found[each] for each in flows]


def test_known_shares() -> None:
    assert rates(flow(0, 1)) == [12]
    assert rates(flow(0, 1), flow(1, 0)) == [12, 12]  # full duplex
    assert rates(flow(0, 1), flow(0, 2)) == [6, 6]
    assert rates(flow(0, 2), flow(1, 2)) == [6, 6]
    # What one flow cannot use, because its other NIC is shared by three, goes to the other.
    assert rates(flow(0, 1), flow(0, 2), flow(3, 2), flow(4, 2)) == [8, 4, 4, 4]
    assert rates(flow(0, 1, 2.0), flow(0, 2)) == [2, 10]


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
    events, ended = Events(), dict[int, float]()
    links = tuple(
        LinkCosts(source, target, 0.0, limit)
        for (source, target), limit in {(s, t): limit for (s, t, limit), _, _ in specs}.items()
    )
    network = FairNetwork(Network(RATE, links=links), events)
    for number, ((source, target, _), begin, num_bytes) in enumerate(specs):

        def begins(now: float, *what: float, number: int = number) -> None:
            def end(then: float) -> None:
                ended[number] = then

            network.begin(now, int(what[0]), int(what[1]), what[2], end)

        events.at(begin, begins, source, target, num_bytes)
    events.run()
    assert len(ended) == len(specs)
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
    """100 hosts in a row send to their neighbours: no rate is above what a NIC has."""
    events, ended = Events(), list[float]()
    network = FairNetwork(Network(RATE), events)
    for host in range(99):
        events.at(0.0, lambda now, a: network.begin(now, a, a + 1, 12.0, ended.append), host)
        events.at(0.0, lambda now, a: network.begin(now, a + 1, a, 12.0, ended.append), host)
    events.run()
    # A host in the middle sends two messages, which take 1 s each alone.
    assert len(ended) == 198
    assert min(ended) == pytest.approx(2.0)
    assert max(ended) == pytest.approx(2.0)
