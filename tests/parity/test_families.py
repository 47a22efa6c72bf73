"""Five shapes of models of transformers, cut and trained for three steps, against one process.

What is read of a model takes most of the time, on each rank: there are no more ranks, and no more
layers, than a case needs. All schedules on 2 and on 4 ranks are left to `everything()`, and other
families to `scripts/families`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import pipegrad
from tests.support import with_transformers  # noqa: F401 - a fork server imports it once
from tests.support.pairwise import everything
from tests.support.partition.families import FAMILIES, ROWS, TOKENS
from tests.support.partition.twins import difference
from tests.support.pipeline.schedulers import error, share, topology
from tests.support.pipeline.trained import Seen, backward, bits, once, train
from tests.support.ranked import gathered
from tests.support.rounding import ADAM_EPS, rounding

pytest.importorskip("transformers")

STEPS = 3
SECONDS = 400.0  # the first case of a world imports transformers, in each rank
# Losses and norms of transformers compute in float32, whatever the dtype of the model.
MOST = 1e-6
MICROBATCH = 2  # rows
SCHEDULES = {"1f1b": 1, "eager-1f1b": 1, "interleaved-1f1b": 2, "zb-h1": 1, "zbv": 2}  # stages
MOST_EXACT = rounding(ROWS * TOKENS, dtype=torch.float64)  # of BERT, all of which is in float64
LAYERS = 6
# Learnt positions and a tie, rotations, experts, an encoder alone, and an encoder with a decoder.
SHAPES = {
    "GPT-2": [("1f1b", 2), ("zbv", 4)],
    "Llama 3.2": [("eager-1f1b", 4)],
    "Mixtral": [("zb-h1", 2), ("zbv", 2)],
    "BERT": [("1f1b", 4)],
    "T5": [("1f1b", 2), ("interleaved-1f1b", 4)],
}


def cases() -> Iterator[tuple[str, str, int]]:
    every = [*itertools.product(SCHEDULES, (2, 4))]
    for family, ways in SHAPES.items():
        for way in every if everything() else ways:
            yield family, *way


def batch(family: str, step: int) -> dict[str, Any]:
    return FAMILIES[family].batch(100 + step)


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, eps=ADAM_EPS)


@once
def truth(family: str) -> Seen:
    model = FAMILIES[family].with_layers(LAYERS).build()
    held = dict(model.named_parameters(remove_duplicate=False))
    return train(
        lambda step, _: backward(model(**batch(family, step)).loss),
        lambda: held,
        optimizer=optimizer_of(model.parameters()),
        steps=STEPS,
    )


def worst(found: Mapping[str, Tensor | None], true: Mapping[str, Tensor | None]) -> float:
    """Returns the largest error, relative to the largest true value of all."""
    largest = max(value.abs().max().item() for value in true.values() if value is not None)
    return max(difference(x, true[name]) / largest for name, x in found.items())


@pytest.mark.ranks(4, seconds=SECONDS)
@pytest.mark.parametrize(("family", "schedule", "pipeline"), [*cases()])
def test_losses_gradients_and_trained_parameters_are_those_of_one_process(
    family: str, schedule: str, pipeline: int
) -> None:
    """Ranks that the pipeline does not need are replicas."""
    at, number = topology(pipeline), ROWS // MICROBATCH
    model = FAMILIES[family].with_layers(LAYERS).build()
    parts = pipegrad.cut(model, pipeline * SCHEDULES[schedule])
    scheduler = pipegrad.Scheduler(
        parts, at, schedule=schedule, num_microbatches=number // at.size("dp")
    )
    held = {
        name: parameter
        for stage in scheduler.topology.local_stages
        for name, parameter in parts.modules[stage].named_parameters(remove_duplicate=False)
    }

    def step(number: int, _: int) -> Tensor:
        whole = batch(family, number)
        given: Any = {name: share(value, at) for name, value in whole.items()}
        return scheduler.step(**given).loss

    optimizer = scheduler.optimizer(optimizer_of)
    seen = train(step, lambda: held, sync=scheduler.sync, optimizer=optimizer, steps=STEPS)
    scheduler.close()

    true = truth(family)
    most = MOST_EXACT if family == "BERT" else MOST
    assert max(map(error, seen.losses, true.losses)) <= MOST
    assert worst(seen.gradients[0], true.gradients[0]) <= most
    # Each step adds its own error, which AdamW scales with 1e-3 / ADAM_EPS.
    assert worst(seen.parameters, true.parameters) <= STEPS * most
    # Everything is held somewhere.
    assert set().union(*gathered({*held})) == {*true.parameters}
    bits(seen.parameters, parts.tied)
