"""What explains the times of messages: latency, rate, and NICs that several links share."""

from __future__ import annotations

import math

import pytest

from pipegrad.observe.links import Measured, fitted, network_of
from pipegrad.simulation.costs import LinkCosts


def link(source: int, target: int, rate: float, busy: float = 1.0) -> Measured:
    return Measured(LinkCosts(source, target, 1e-4, rate), busy)


def test_the_latency_is_half_of_an_empty_round_trip_and_the_rate_that_of_what_is_added() -> None:
    latency, rate = fitted(0.002, 1_000_000, 0.010)
    assert latency == 0.001
    assert rate == pytest.approx(1_000_000 / 0.008)


def test_a_large_message_that_is_as_fast_as_an_empty_one_has_no_rate() -> None:
    assert fitted(0.002, 1_000, 0.001) == (0.001, math.inf)


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
