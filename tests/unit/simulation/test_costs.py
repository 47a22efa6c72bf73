"""Costs: what files say, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipegrad.errors import ScheduleError
from pipegrad.simulation.costs import CollectiveCosts, Costs, LinkCosts, Network, StageCosts

COSTS = Costs(
    (StageCosts(0.01, 0.02, outputs={"x": 2**20}), StageCosts(0.01, 0.02)),
    Network(125e6, 1e-4, (0, 1), (LinkCosts(0, 1, 1e-3),)),
    {"bucket 0": CollectiveCosts(100, 2, "send", 50)},
)


def test_costs_survive_a_file(tmp_path: Path) -> None:
    COSTS.save(tmp_path / "costs.json")
    assert Costs.load(tmp_path / "costs.json") == COSTS
    assert "Infinity" not in (tmp_path / "costs.json").read_text()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (None, "costs should be an object, found None"),
        ([], "costs should be an object"),
        ({}, "stages is missing"),
        ({"stages": [{"forward": 1}]}, r"stages\.0\.forward"),
        ({"stages": [{"forward_seconds": -1}]}, "forward_seconds is -1"),
        ({"stages": [{"forward_seconds": float("nan")}]}, "forward_seconds is nan"),
        ({"stages": [{"forward_seconds": "fast"}]}, r"stages\.0\.forward_seconds"),
        ({"stages": [{"weight_seconds": 1}]}, "a part of backward_seconds"),
        ({"stages": [{"outputs": {"x": -1}}]}, "outputs is -1"),
        ({"stages": [], "network": {"latency_seconds": float("inf")}}, "latency_seconds is inf"),
        ({"stages": [], "collectives": {"a": {"num_ranks": 0}}}, "num_ranks is 0, expected"),
        ({"stages": [], "network": {"nic_bytes_per_second": 0}}, "above 0"),
        ({"stages": [], "collectives": {"a": {"kind": "gather"}}}, "'all-reduce'"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(data: object, words: str) -> None:
    with pytest.raises(ScheduleError, match=words) as error:
        Costs.from_json(data)
    assert "\n" not in str(error.value)


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
