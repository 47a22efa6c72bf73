"""diloco: no gradient is sent between replicas, and every parameter meets its copies."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from pipegrad import OuterStep, ParameterRecord, Placement, Reduction, Topology, handlers
from pipegrad.errors import PluginOptionError, TopologyError
from pipegrad.testing import HandlerContract
from pipegrad_handlers.diloco import DiLoCo

AVERAGING: dict[str, Any] = {"name": "diloco", "every": 1, "lr": 1.0, "momentum": 0.0}


class TestDiLoCo(HandlerContract):
    handler: ClassVar[Any] = AVERAGING
    beside = ("pipeline-shared",)


class TestDiLoCoBehindOwners(HandlerContract):
    """The owner of a tie meets the owners of other replicas, and then sends the result on."""

    handler: ClassVar[Any] = AVERAGING
    beside = ({"name": "pipeline-shared", "placement": "owner"},)


def record(name: str, holders: tuple[int, ...], stage: int) -> ParameterRecord:
    key = f"{holders[0]}.{name}"
    return ParameterRecord(key, name, stage, (2,), torch.float32, name != "frozen", holders, 0)


@pytest.mark.parametrize(("rank", "copies"), [(0, (0, 1)), (5, (4, 5))])
def test_every_parameter_meets_its_copies(rank: int, copies: tuple[int, ...]) -> None:
    topology = Topology.build(axes=(("pp", 4), ("dp", 2)), rank=rank)
    stage = topology.local_stages[0]
    records = [record("w", (stage,), stage), record("emb", (0, 3), stage)]
    records.append(record("frozen", (stage,), stage))
    assert DiLoCo(every=3).reductions(records, topology) == [
        Reduction(r, copies, "mean", Placement.MEET) for r in records
    ]


def test_the_dimension_may_be_an_outer_one() -> None:
    topology = Topology.build(axes=(("pp", 1), ("dp", 2), ("out", 2)), data=("dp", "out"), rank=1)
    w = record("w", (0,), 0)
    assert DiLoCo(every=3, axis="out").reductions([w], topology) == [
        Reduction(w, (0, 1), "mean", Placement.MEET)
    ]
    with pytest.raises(TopologyError, match=r"no dimension 'in', only \['pp', 'dp', 'out'\]"):
        DiLoCo(every=3, axis="in").reductions([w], topology)


def test_its_options_are_those_of_the_outer_step() -> None:
    resolved = handlers.resolve({"name": "diloco", "every": 50})
    assert resolved.plugin.outer == OuterStep(every=50, lr=0.7, momentum=0.9)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "needs the option 'every'"),
        ({"every": 0}, "every is 0, expected a whole number of steps, 1 or more"),
        ({"every": 2.0}, "every is 2.0, expected a whole number"),
        ({"every": True}, "every is True, expected a whole number"),
        ({"every": None}, "every is None, expected a whole number"),
        ({"every": 5, "momentum": 1}, "momentum is 1, expected at least 0 and below 1"),
        ({"every": 5, "momentum": -0.1}, "momentum is -0.1, expected at least 0 and below 1"),
        ({"every": 5, "momentum": "0.9"}, "momentum is '0.9', expected a number"),
        ({"every": 5, "lr": 0}, "lr is 0, expected a number above 0"),
        ({"every": 5, "lr": float("nan")}, "lr is nan, expected a number"),
        ({"evry": 5}, "has no option 'evry', needs the option 'every'"),
    ],
)
def test_a_wrong_option_is_refused_in_words(options: dict[str, Any], says: str) -> None:
    with pytest.raises(PluginOptionError) as caught:
        handlers.resolve({"name": "diloco", **options})
    assert says in str(caught.value)
