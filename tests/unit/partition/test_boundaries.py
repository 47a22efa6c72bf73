"""Where stages begin: by parameters, time, memory, numbers and names, against trying every cut."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import Any

import pytest

from pipegrad.errors import TopologyError
from pipegrad.partition.cutting.boundaries import Layer, cost_of, starts_of


def layers(seed: int) -> list[Layer]:
    """Returns layers with random costs; the last one has the parameters of the first one."""
    chance = random.Random(seed)
    made = [
        Layer(
            f"layers.{i}",
            {i: (4 * size, size)},
            flops=chance.randrange(1, 1000),
            saved_bytes=chance.randrange(100),
        )
        for i, size in enumerate(chance.choices(range(1, 50), k=7))
    ]
    return [*made, Layer("head", made[0].parameters, 5000, 10)]


def heaviest(given: Sequence[Layer], starts: Sequence[int], by: str | Sequence[float]) -> float:
    cost = cost_of(given, len(starts) + 1, by)
    edges = [0, *starts, len(given)]
    return max(cost(stage, a, b) for stage, (a, b) in enumerate(pairwise(edges)))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("by", ["parameters", "time", "memory", [3, 1, 4, 1, 5, 9, 2, 6]], ids=str)
def test_no_cut_has_a_lighter_heaviest_stage(
    by: str | Sequence[float], num_stages: int, seed: int
) -> None:
    given = layers(seed)
    starts = starts_of(given, num_stages, by=by, boundaries=None)
    best = min(
        heaviest(given, others, by) for others in combinations(range(1, len(given)), num_stages - 1)
    )
    assert heaviest(given, starts, by) == best


def test_early_stages_keep_more_microbatches() -> None:
    alike = [Layer(f"{i}", {}, saved_bytes=1) for i in range(6)]
    assert starts_of(alike, 2, by="memory", boundaries=None) == [2]
    assert starts_of(alike, 2, by="parameters", boundaries=None) != []


def test_a_tie_counts_once_in_a_stage() -> None:
    cost = cost_of(layers(1), 2, "parameters")
    assert cost(0, 0, 8) == cost(0, 0, 7)
    assert cost(1, 7, 8) == cost(0, 0, 1)


@pytest.mark.parametrize("boundaries", [["layers.2", "head"], [2, 7], ["layers.2", 7]])
def test_names_and_indices_are_taken_as_told(boundaries: list[int | str]) -> None:
    assert starts_of(layers(0), 3, by="parameters", boundaries=boundaries) == [2, 7]


@pytest.mark.parametrize(
    ("num_stages", "by", "boundaries", "message"),
    [
        (9, "parameters", None, "8 layers cannot be cut into 9 stages"),
        (2, "weight", None, "by is 'weight', expected one of"),
        (2, [1.0, 2.0], None, "by has 2 numbers, expected one for each of the 8 layers"),
        (2, [1.0, math.nan, *[1.0] * 6], None, "nan.* expected finite numbers, none below 0"),
        (2, [1e20, -1.0, *[1.0] * 6], None, "expected finite numbers, none below 0"),
        (2, [None, *[1e308] * 7], None, "expected finite numbers, none below 0"),
        (2, "parameters", ["layer.2"], r"boundaries \['layer.2'\] are no layers"),
        (3, "parameters", ["head", "layers.2"], "names of layers in their order"),
        (2, "parameters", [0], "ascending indices from 1 to 7"),
        (3, "parameters", [2, 2], "ascending indices from 1 to 7"),
        (2, "parameters", [], r"boundaries \[\] do not cut 8 layers into 2 stages"),
    ],
)
def test_what_cannot_be_is_refused(
    num_stages: int, by: Any, boundaries: list[int | str] | None, message: str
) -> None:
    with pytest.raises(TopologyError, match=message):
        starts_of(layers(0), num_stages, by=by, boundaries=boundaries)
