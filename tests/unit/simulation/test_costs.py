"""Costs are read from JSON, and know the codecs of hops."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pipegrad import Placement
from pipegrad.errors import ScheduleError
from pipegrad.observe.measured_costs import _kind, with_codecs
from pipegrad.pipeline.codings import choice_of
from pipegrad.plugins.handler import ReductionStep
from pipegrad.schedules import build, lower
from pipegrad.simulation.choose import times_of
from pipegrad.simulation.costs import (
    CodecCosts,
    CollectiveCosts,
    Costs,
    LinkCosts,
    Network,
    StageCosts,
)
from pipegrad.simulation.simulator import simulate

COSTS = Costs(
    (StageCosts(0.01, 0.02, outputs={"x": 2**20}), StageCosts(0.01, 0.02)),
    Network(125e6, 1e-4, (0, 1), (LinkCosts(0, 1, 1e-3),)),
    {"bucket 0": CollectiveCosts(100, 2, "send", 50)},
)


def coded(**changes: object) -> dict[str, object]:
    """Returns costs of one codec."""
    codec = {"ranks": (0, 1), "carries": "gradients", **changes}
    return {"stages": [{}], "codecs": [codec]}


def test_costs_survive_a_file(tmp_path: Path) -> None:
    chunks = COSTS.of_chunks(4)
    assert chunks.of_chunks(4) == chunks == Costs.from_json(chunks.to_json())
    with pytest.raises(ScheduleError, match="one of 4 chunks of a sequence"):
        chunks.of_chunks(1)
    COSTS.save(tmp_path / "costs.json")
    assert Costs.load(tmp_path / "costs.json") == COSTS
    assert "Infinity" not in (tmp_path / "costs.json").read_text()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (None, "costs: should be a dictionary or an instance of Costs, found None"),
        ({}, "stages: Field required"),
        ({"stages": [{"forward_seconds": float("nan")}]}, "forward_seconds is nan"),
        ({"stages": [{"weight_seconds": 1}]}, "a part of backward_seconds"),
        ({"stages": [], "network": {"latency_seconds": float("inf")}}, "latency_seconds is inf"),
        ({"stages": [], "collectives": {"a": {"num_ranks": 0}}}, "num_ranks is 0, expected"),
        ({"stages": [], "collectives": {"a": {"kind": "gather"}}}, "'all-reduce'"),
        (coded(ranks=(1, 0)), "the lower one first"),
        (coded(ranks=(1, 1)), "the lower one first"),
        (coded(share=-1.0), "share"),
        (coded(carries="x"), "carries"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(data: object, words: str) -> None:
    with pytest.raises(ScheduleError, match=words) as error:
        Costs.from_json(data)
    assert "\n" not in str(error.value)


def test_all_mistakes_of_a_file_are_in_one_message() -> None:
    stages = [
        {"forward_seconds": "x"},
        {"forward": 1},
        {"parameter_bytes": -2, "outputs": {"x": -1}},
    ]
    with pytest.raises(ScheduleError) as error:
        Costs.from_json({"stages": stages, "network": {"nic_bytes_per_second": 0}})
    words = str(error.value).split("; ")
    begins = (
        "stages.0.forward_seconds: should be a valid number",
        "stages.1.forward: Unexpected keyword argument, found 1",
        "stages.2: parameter_bytes is -2, expected a number, at least 0",
        "outputs is -1, expected a number, at least 0",
        "network: nic_bytes_per_second is 0.0",
    )
    for own, begin in zip(words, begins, strict=True):
        assert own.startswith(begin)
    with pytest.raises(ScheduleError, match=r"; and 92 more$"):
        Costs.from_json({"stages": [{"forward": 1}] * 100})


def test_numbers_of_another_unit_are_doubted() -> None:
    assert not list(replace(COSTS, network=Network(125e6, 1e-4)).doubts())
    slow = Costs((StageCosts(15, 30),) * 2, Network(1e9, 50))
    assert list(slow.doubts()) == [
        "the forward of stage 0 takes 15 s: costs are in seconds",
        "an empty message takes 50 s: costs are in seconds",
        "a NIC sends 8000 Mbit/s: rates are in bytes a second, not in bits",
    ]
    assert list(Costs((), Network(125)).doubts()) == [
        "a NIC sends 0.001 Mbit/s: rates are in bytes a second, not in bits"
    ]


def test_links_that_cannot_be_meant_are_doubted_or_refused() -> None:
    """A link to rank 7 of 4, and one without a way back, changed the advice without a word."""
    one_way = replace(COSTS, network=Network(125e6, 1e-4, links=(LinkCosts(0, 1, 40.0),)))
    back = "an empty message back takes 0.0001 s"
    assert list(one_way.doubts()) == [
        "an empty message takes 40 s: costs are in seconds",
        f"links has one from rank 0 to rank 1 and none back: {back}",
    ]
    with pytest.raises(ScheduleError, match="links has two from rank 0 to rank 1"):
        Network(links=(LinkCosts(0, 1), LinkCosts(0, 1, 1.0)))
    far = Costs((STAGE, STAGE), Network(links=(LinkCosts(0, 2),)))
    coded = Costs((STAGE, STAGE), codecs=(CodecCosts((0, 2), "gradients"),))
    for costs in far, coded:
        with pytest.raises(ScheduleError, match=r"the ranks \[0, 2\], and .* the ranks 0 to 1"):
            simulate(PROGRAM, costs)


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '{"stages": 3}'])
def test_a_file_that_holds_no_costs_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "costs.json"
    with pytest.raises(ScheduleError, match=r"costs\.json"):
        Costs.load(path)
    path.write_text(text)
    with pytest.raises(ScheduleError, match=r"costs\.json"):
        Costs.load(path)


def test_a_person_may_leave_out_what_is_zero() -> None:
    text = '{"stages": [{"forward_seconds": 1, "backward_seconds": 2}]}'
    assert Costs.from_json(json.loads(text)) == Costs((StageCosts(1, 2),))


STAGE = StageCosts(forward_seconds=1.0, backward_seconds=2.0, outputs={"x": 1000})
NETWORK = Network(
    links=(LinkCosts(0, 1, bytes_per_second=1000), LinkCosts(1, 0, bytes_per_second=1000))
)
FORTH = CodecCosts((0, 1), "activations", "a", 0.25, 1e-4, 2e-4)
BACK = CodecCosts((0, 1), "gradients", "b", 0.5, 3e-4, 4e-4)
PROGRAM = lower(build("1f1b", num_ranks=2, num_microbatches=1))


def seconds(*codecs: CodecCosts) -> float:
    costs = Costs((STAGE, STAGE), NETWORK, codecs=codecs)
    return simulate(PROGRAM, costs).step_seconds[0]


def test_a_message_takes_its_own_bytes_and_the_time_of_its_ends() -> None:
    assert seconds() == pytest.approx(6 + 2)
    assert seconds(FORTH) == pytest.approx(6 + 0.1 + 0.25 + 0.2 + 1)
    assert seconds(BACK) == pytest.approx(6 + 1 + 0.3 + 0.5 + 0.4)
    assert seconds(FORTH, BACK) == pytest.approx(6 + 0.55 + 1.2)


def test_the_times_of_hops_have_codecs_in_them_also_in_a_file() -> None:
    costs = Costs((STAGE, STAGE), NETWORK, codecs=(FORTH, BACK))
    assert times_of(costs).hop_seconds == pytest.approx(((0.55 + 1.2) / 2,))
    assert Costs.from_json(costs.to_json()) == costs
    assert "codecs" not in Costs((STAGE,)).to_json()


def test_a_job_has_its_own_codecs_and_no_others() -> None:
    measured = replace(FORTH, codec="int8")
    costs = Costs((STAGE, STAGE), NETWORK, codecs=(measured, BACK))
    assert not with_codecs(costs, choice_of(None), PROGRAM).codecs
    forth, back = with_codecs(costs, choice_of("int8"), PROGRAM).codecs
    assert forth == measured
    assert (back.carries, back.codec) == ("gradients", "int8")
    names = [each.codec for each in with_codecs(costs, choice_of("fp8"), PROGRAM).codecs]
    assert names == ["fp8", "fp8"]


@pytest.mark.parametrize(
    ("placement", "kind"),
    [
        (Placement.REPLICATE, "all-reduce"),
        (Placement.WHOLE, "reduce-scatter"),
        (Placement.OWNER, "send"),
        (Placement.SHARD, "reduce-scatter"),
    ],
)
def test_a_sum_on_one_rank_is_sent_to_it_and_shards_are_scattered(
    placement: Placement, kind: str
) -> None:
    assert _kind(ReductionStep("dp", (0, 1), "sum", placement, "mine")) == kind
