"""recut: the cut that balances what layers took, in words, and what it gains."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import pipegrad
from pipegrad import schedules
from pipegrad.errors import TopologyError
from pipegrad.partition.boundaries import Layer, costs_of_layers, recut
from pipegrad.schedules import Schedule
from pipegrad.simulation.costs import StageCosts

MIB = 2**20
LAYER = StageCosts(forward_seconds=1.0, backward_seconds=2.0, activation_bytes=MIB)


def layers(*weights: float) -> dict[str, StageCosts]:
    """Returns layers that take so much of a usual one."""
    return {
        f"layers.{i}": replace(LAYER, forward_seconds=w, backward_seconds=2 * w)
        for i, w in enumerate(weights)
    }


def schedule(num_ranks: int = 2, num_microbatches: int = 8) -> Schedule:
    return schedules.build("1f1b", num_ranks=num_ranks, num_microbatches=num_microbatches)


def test_a_known_imbalance_is_found_and_its_gain_is_that_of_the_simulation() -> None:
    found = recut(layers(1, 1, 1, 1, 1, 3), [3], schedule=schedule())
    assert found.boundaries == (4,)
    # The last stage took 15 of 8 + 1 turns; now both take 12.
    assert found.seconds == pytest.approx(9 * 12)
    assert found.seconds_before == pytest.approx(8 * 15 + 9)
    assert str(found) == "move layers.3 to stage 0: 16% less time"
    even = recut(layers(1, 1, 1, 1), [2], schedule=schedule())
    assert (even.boundaries, even.gain) == ((2,), 0)
    assert str(even) == "the cut is the best there is"


def test_moves_are_said_by_names_or_numbers_of_layers() -> None:
    found = recut(layers(*[1] * 9, 2, 2, 2), [3, 6, 9], schedule=schedule(4))
    assert str(found) == "move layers.6 to stage 1; layers.9 to stage 2: 25% less time"
    two = recut(layers(1, 1, 1, 1, 5), [2], schedule=schedule())
    assert str(two).startswith("move layers.2 and layers.3 to stage 0: ")
    numbered = {str(i): LAYER for i in range(6)}
    assert str(recut(numbered, [2], schedule=schedule())).startswith("move layer 2 to stage 0: ")
    assert str(recut(numbered, [1], schedule=schedule())).startswith("move layers 1 and 2 to stage")


def test_no_stage_holds_more_than_the_limit() -> None:
    weights = layers(3, 1, 1, 1, 1, 1)
    free = recut(weights, [3], schedule=schedule())
    # Stage 0 holds two microbatches of its layers, and stage 1 one.
    tight = recut(weights, [3], schedule=schedule(), memory_limit_bytes=4 * MIB)
    assert (free.boundaries, tight.boundaries) == ((2,), (2,))
    tighter = recut(layers(1, 1, 1, 1), [2], schedule=schedule(), memory_limit_bytes=3 * MIB)
    assert tighter.boundaries == (1,)
    with pytest.raises(TopologyError, match="no cut of 6 layers into 2 stages fits into"):
        recut(weights, [3], schedule=schedule(), memory_limit_bytes=2 * MIB)


def test_a_model_says_where_it_should_be_cut() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    options: dict[str, Any] = {"how": "structural", "example": {"input": torch.ones(2, 8)}}
    assert all(layer.seconds for layer in pipegrad.cut(model, 2, by="measured", **options).layers)
    worse = pipegrad.cut(model, 2, boundaries=[5], by="time", **options)
    found = worse.recut(schedule(), stage_seconds=[5.0, 1.0])
    assert found.boundaries == (3,)
    assert found.names == tuple(layer.name for layer in worse.layers)
    # Layers alone look even, but the second stage took three times as long.
    found = recut(layers(1, 1, 1, 1), [2], schedule=schedule(), stage_seconds=[2.0, 6.0])
    assert found.boundaries == (3,)
    assert found.seconds_before == pytest.approx(8 * 6 + 2)
    assert found.seconds == pytest.approx(8 * 5 + 4 / 3)


def test_layers_without_times_are_refused() -> None:
    with pytest.raises(TopologyError, match="the times of layers are unknown"):
        costs_of_layers([Layer("0", {1: (4, 1)})])
    cut = pipegrad.cut(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 2)
    with pytest.raises(TopologyError, match="the times of layers are unknown"):
        cut.recut(schedule())


def test_bytes_of_layers_are_counted() -> None:
    layer = Layer("0", {1: (40, 10), 2: (4, 1)}, saved_bytes=7, seconds=3.0)
    assert costs_of_layers([layer])["0"] == StageCosts(
        forward_seconds=1.0,
        backward_seconds=2.0,
        parameter_bytes=44,
        gradient_bytes=44,
        optimizer_bytes=88,
        activation_bytes=7,
    )


def test_boundaries_and_seconds_that_do_not_fit_are_refused() -> None:
    for boundaries in ([0], [4], [3, 2], [1, 2]):
        with pytest.raises(TopologyError, match="expected ascending indices from 1 to 3"):
            recut(layers(1, 1, 1, 1), boundaries, schedule=schedule())
    with pytest.raises(TopologyError, match="stage_seconds has 1 numbers, expected one for each"):
        recut(layers(1, 1), [1], schedule=schedule(), stage_seconds=[1.0])
