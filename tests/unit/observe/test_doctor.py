"""What is odd about ranks and links, in words."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from pipegrad.observe.doctor import Examination, RankFacts, _pairs, lateness, oddities
from pipegrad.observe.links import network_of
from pipegrad.observe.recording import Reading
from pipegrad.simulation.costs import Costs, LinkCosts

FACTS = RankFacts(
    rank=0,
    host="node0",
    home="node0 boot net0",
    device="cuda:0 (H100)",
    backend="nccl",
    versions={"pipegrad": "1", "torch": "2.13", "Python": "3.11"},
    cores=16,
    threads="1",
    compute_threads=1,
    asked_seconds=100.0,
)


def ranks(number: int = 4, **changes: object) -> list[RankFacts]:
    """Returns ranks, each on a host of its own."""
    return [
        replace(FACTS, rank=r, host=f"node{r}", home=f"node{r} boot net{r}", **changes)  # type: ignore[arg-type]
        for r in range(number)
    ]


def links(number: int = 4) -> list[LinkCosts]:
    """Returns the links of a chain, both ways, all alike."""
    pairs = [(a, b) for a in range(number) for b in (a - 1, a + 1) if 0 <= b < number]
    return [LinkCosts(*pair, 1e-4, 1e8) for pair in pairs]


def odd(
    facts: list[RankFacts], measured: list[LinkCosts] | None = None, late: list[float] | None = None
) -> list[str]:
    clocks = [Reading(0.0, machine="m") for _ in facts]
    found = measured if measured is not None else links(len(facts))
    return list(oddities(facts, late or [0.0] * len(facts), clocks, found))


def test_nothing_is_odd_where_all_is_alike() -> None:
    assert odd(ranks()) == []
    assert odd(ranks(1), []) == []


def test_other_versions_name_the_ranks_that_have_them() -> None:
    facts = ranks()
    facts[2] = replace(facts[2], versions={**FACTS.versions, "torch": "2.12"})
    assert odd(facts) == ["torch is '2.12' on ranks [2], and '2.13' on the others"]
    facts = ranks(3)
    facts[0] = replace(facts[0], versions={**FACTS.versions, "NCCL": "2.29"})
    assert odd(facts) == ["NCCL is '2.29' on ranks [0], and 'missing' on the others"]
    facts = [replace(each, host="localhost") for each in ranks()]
    assert odd(facts)[0].startswith("4 machines or networks have the host name 'localhost'")


def test_other_devices_and_backends_are_odd_but_not_their_numbers() -> None:
    facts = ranks()
    facts[1] = replace(facts[1], device="cuda:1 (H100)")
    assert odd(facts) == []
    facts[1] = replace(facts[1], device="cuda:1 (A100)", backend="gloo")
    assert odd(facts) == [
        "backend is 'gloo' on ranks [1], and 'nccl' on the others",
        "kind of device is '(A100)' on ranks [1], and '(H100)' on the others",
    ]


def test_a_link_much_slower_than_the_others_is_named() -> None:
    measured = links()
    measured[2] = LinkCosts(1, 2, 0.05, 1e7)
    lines = odd(ranks(), measured)
    assert lines[0] == "rank 1 to rank 2: 10 MB/s, and the median of all links is 100 MB/s"
    assert lines[1].startswith("rank 1 to rank 2: 50.0 ms for an empty message")
    assert lines[2] == "rank 1 to rank 2: 10 MB/s, and back 100 MB/s"
    assert len(lines) == 3


def test_links_inside_of_a_host_on_gloo_say_nothing() -> None:
    measured = links()
    measured[2] = LinkCosts(1, 2, 0.05, 1e7)
    assert (
        odd([replace(f, home="one", host="one", backend="gloo") for f in ranks()], measured) == []
    )


def test_more_ranks_than_cores_and_unset_threads_are_odd() -> None:
    one = {"home": "one", "host": "one", "backend": "gloo", "device": "cpu (x86_64)"}
    facts = [replace(each, **one, cores=2) for each in ranks()]  # type: ignore[arg-type]
    assert odd(facts) == ["one: 4 ranks, [0, 1, 2, 3], compute on 2 cores"]
    facts = [replace(f, cores=8, threads=None, compute_threads=8) for f in facts]
    (line,) = odd(facts)
    assert line.startswith("one: OMP_NUM_THREADS is unset, and ranks [0, 1, 2, 3] compute with 32")
    assert line.endswith("threads on 8 cores: set it to 2")


def test_a_late_rank_is_named_by_one_clock() -> None:
    facts = ranks(2)
    facts[1] = replace(facts[1], asked_seconds=5.0)
    late = lateness(facts, [Reading(0.0), Reading(0.0, 98.0)])
    assert late == (0.0, 3.0)
    (line,) = odd(facts, late=list(late))
    assert line.startswith("rank 1 on node1 answered 3.0 s after the first rank")


@pytest.mark.parametrize(("size", "number"), [(1, 0), (2, 2), (8, 56), (9, 16), (64, 126)])
def test_few_ranks_are_measured_in_all_pairs_many_along_the_pipeline(
    size: int, number: int
) -> None:
    pairs = _pairs(ranks(size))
    assert len(set(pairs)) == len(pairs) == number
    # Links are measured between ranks that can send to each other.
    first, second = ranks(2)
    assert _pairs([first, replace(second, device="cuda:1 (A100)")]) == [(0, 1), (1, 0)]
    assert _pairs([first, replace(second, device="cpu (x86_64)")]) == []
    assert _pairs([first, replace(second, backend="gloo")]) == []


def test_what_was_found_is_strict_json_and_costs() -> None:
    facts, measured = ranks(2), [LinkCosts(0, 1, 1e-4), LinkCosts(1, 0)]
    network = network_of(measured, [f.home for f in facts])
    clocks = (Reading(0.0), Reading(0.0, 1.5))
    found = Examination(tuple(facts), (0.0, 0.2), clocks, tuple(measured), network, ("odd",))
    data = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert data["ranks"][1]["clock_offset_seconds"] == 1.5
    assert data["ranks"][1]["late_seconds"] == 0.2
    assert data["odd"] == ["odd"]
    assert len(data["links"]) == 2
    again = Costs.from_json(json.loads(json.dumps(found.costs.to_json(), allow_nan=False)))
    assert again.network == network
    assert again.network.nic_bytes_per_second == math.inf
    assert again.network.hosts == (0, 1)
