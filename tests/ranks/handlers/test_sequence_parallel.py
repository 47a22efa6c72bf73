"""sequence-parallel: parts of a gradient, summed where a parameter is whole on every rank."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from pipegrad import ParameterRecord, Reduction, Topology, handlers
from pipegrad.errors import PlanError, PluginOptionError, TopologyError
from pipegrad.plan.options import GradientOptions
from pipegrad.plan.plan import make_plans
from pipegrad.testing import HandlerContract
from pipegrad_handlers.sequence_parallel import SequenceParallel
from tests.support.plan.manifests import manifest


class TestSequenceParallel(HandlerContract):
    handler: ClassVar[Any] = {"name": "sequence-parallel", "axis": "dp", "parameters": ["*"]}
    beside = ("pipeline-shared",)

    def expected(self, whole: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        return 2 * whole  # of which `whole` is the mean


class TestMeanOverSequenceParallelRanks(HandlerContract):
    handler: ClassVar[Any] = {
        "name": "sequence-parallel",
        "axis": "dp",
        "op": "mean",
        "parameters": ["*"],
    }
    beside = ({"name": "pipeline-shared", "placement": "owner"},)


def record(name: str, key: str = "", stage: int = 0) -> ParameterRecord:
    holders = tuple({0, stage})
    return ParameterRecord(key or f"0.{name}", name, stage, (2,), torch.float32, True, holders, 0)


CUBE = Topology.build(axes=(("pp", 2), ("dp", 2), ("tp", 2)), rank=3)


@pytest.mark.parametrize(
    ("options", "ranks", "op"),
    [({}, (2, 3), "sum"), ({"axis": "dp", "op": "mean"}, (1, 3), "mean")],
)
def test_what_matches_is_reduced_along_the_axis(
    options: dict[str, Any], ranks: tuple[int, ...], op: Any
) -> None:
    records = [record("norm.weight"), record("up.weight")]
    handler = SequenceParallel(parameters=["*norm*"], **options)
    assert handler.reductions(records, CUBE) == [Reduction(records[0], ranks, op)]
    everything = SequenceParallel(parameters=["*"], **options)
    assert everything.reductions(records, CUBE) == [Reduction(r, ranks, op) for r in records]


def test_patterns_match_the_name_here_and_where_the_key_is_from() -> None:
    tied = record("head.weight", "0.embed.weight", 1)
    for pattern in ("head.*", "embed.weight", "*.weigh?"):
        assert SequenceParallel(parameters=[pattern]).reductions([tied], CUBE), pattern
    for pattern in ("embed", "Head.*", "1.head.weight", "0.head.*"):
        assert not SequenceParallel(parameters=[pattern]).reductions([tied], CUBE), pattern


def test_the_number_of_a_layer_is_not_that_of_a_stage() -> None:
    """The key of layer 1 on stage 0 is "0.1.weight", which "0.*" means layer 0 by."""
    layers = [record("0.weight"), record("1.weight")]
    asked = SequenceParallel(parameters=["0.*"]).reductions(layers, CUBE)
    assert [reduction.record.name for reduction in asked] == ["0.weight"]


def test_patterns_that_match_nothing_of_the_whole_model_are_refused() -> None:
    model = manifest(["up"], ["norm"])
    options: dict[str, Any] = {"bucket_bytes": 64}
    chosen = [("mine", SequenceParallel(parameters=["*nrom*"]))]
    with pytest.raises(PlanError) as caught:
        make_plans(model, CUBE, chosen, GradientOptions(**options))
    assert "handler 'mine': check() failed: ValueError" in str(caught.value)
    assert "parameters is ['*nrom*'], which matches none of the model's 2" in str(caught.value)
    flat = Topology.build(axes=(("pp", 2), ("dp", 2), ("tp", 1)))
    for patterns, mesh in ((["*nrom*"], flat), ([], CUBE), (["norm"], CUBE)):  # on one stage alone
        assert make_plans(
            model,
            mesh,
            [("mine", SequenceParallel(parameters=patterns))],
            GradientOptions(**options),
        )


@pytest.mark.parametrize(
    ("options", "said"),
    {
        "a pattern that is no list": (
            {"parameters": "*norm*"},
            r"parameters is '\*norm\*', expected a list of patterns",
        ),
        "patterns that are no strings": ({"parameters": [1]}, r"parameters is \[1\], expected"),
        "no patterns": ({}, "needs the option 'parameters'"),
        "another op": ({"parameters": ["*"], "op": "max"}, "op is 'max', expected 'sum' or 'mean'"),
    }.values(),
)
def test_options_that_mean_nothing_are_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(PluginOptionError, match=said):
        handlers.resolve({"name": "sequence-parallel", **options})


def test_a_dimension_that_is_missing_is_named() -> None:
    flat = Topology.build(axes=(("pp", 2), ("dp", 2)))
    with pytest.raises(TopologyError, match=r"no dimension 'tp', only \['pp', 'dp'\]"):
        SequenceParallel(parameters=["*"]).reductions([record("w")], flat)
