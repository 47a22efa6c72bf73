"""What explains the times of messages: latency, rate, and NICs that several links share."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping

import pytest

from pipegrad.observe import links
from pipegrad.observe.links import Measured, fitted, network_of, reached
from pipegrad.simulation.costs import LinkCosts


def link(source: int, target: int, rate: float, busy: float = 1.0) -> Measured:
    return Measured(LinkCosts(source, target, 1e-4, rate), busy)


def test_the_latency_is_half_of_an_empty_round_trip_and_the_rate_that_of_what_is_added() -> None:
    latency, rate = fitted(0.002, 1_000_000, 0.010)
    assert latency == 0.001
    assert rate == pytest.approx(1_000_000 / 0.008)


def test_a_large_message_that_is_as_fast_as_an_empty_one_has_no_rate() -> None:
    assert fitted(0.002, 1_000, 0.001) == (0.001, math.inf)


class FarWires:
    """A sender's end of a link of 100 MB/s and a round trip of 40 ms, now and then 4 ms more."""

    rank = 0

    def __init__(self) -> None:
        self.now = 0.0
        self._late = itertools.cycle([0.0, 0.004, 0.004])

    def tell(self, peer: int, number: int) -> None: ...

    def exchange(self, sends: Mapping[int, int], receives: Mapping[int, int]) -> float:
        self.now += sum(sends.values()) / 1e8
        return self.now

    def hear(self, peer: int) -> int:
        self.now += 0.040 + next(self._late)
        return 0


def test_the_rate_of_a_far_link_is_not_that_of_its_round_trip(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """64 KiB over 40 ms showed 15 to 23 MB/s of 91, as round trips differ by some ms."""
    wires = FarWires()
    monkeypatch.setattr(time, "perf_counter", lambda: wires.now)
    measured = links._alone(wires, (0, 1))  # type: ignore[arg-type]
    assert measured is not None
    latency, rate = measured
    assert latency == pytest.approx(0.020)
    # 2 of 3 round trips take 4 ms more than the fastest, beside 4 MiB.
    assert rate == pytest.approx(2**22 / (2**22 / 1e8 + 0.004))


def test_links_at_once_are_compared_by_what_their_bytes_take() -> None:
    """Full duplex over 40 ms was called half: a message waits until its receive is posted."""
    alone = LinkCosts(0, 1, 0.020, 1e8)
    assert reached(alone, 4_000_000, 0.040) == 1.0
    assert reached(alone, 4_000_000, 0.080) == 0.5
    assert reached(alone, 4_000_000, -0.001) == 1.0  # empty ones were late
    assert reached(LinkCosts(0, 1), 4_000_000, 0.080) == 1.0  # its rate was too high to be seen


def test_links_that_leave_a_host_and_are_slower_together_share_its_nic() -> None:
    # Ranks 0 and 1 on one host, each sends to a host of its own.
    measured = [link(0, 2, 100.0, 0.5), link(1, 3, 100.0, 0.5), link(2, 0, 100.0)]
    network = network_of(measured, ["a", "a", "b", "c"])
    assert network.nic_bytes_per_second == 100.0
    assert network.hosts == (0, 0, 1, 2)
    assert network.links == tuple(each.costs for each in measured)


def test_where_hosts_have_one_link_each_a_nic_does_what_the_link_does_under_load() -> None:
    measured = [link(0, 1, 100.0, 0.9), link(1, 0, 100.0, 0.8)]
    assert network_of(measured, ["a", "b"]).nic_bytes_per_second == 90.0


@pytest.mark.parametrize(
    ("measured", "hosts"),
    [
        ([link(0, 1, 100.0, 0.5), link(1, 2, 100.0, 0.5)], ["a", "a", "a"]),
        ([link(0, 2, 100.0, 0.9), link(1, 3, 100.0, 0.9)], ["a", "a", "b", "c"]),
        ([], ["a"]),
    ],
    ids=["one host", "hardly slower", "one rank"],
)
def test_other_links_share_nothing(measured: list[Measured], hosts: list[str]) -> None:
    assert network_of(measured, hosts).nic_bytes_per_second == math.inf
