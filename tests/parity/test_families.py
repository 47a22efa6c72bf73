"""Families of transformers models, cut and trained, against one process that has the uncut model.

Each family is cut into four stages, some also into two and into eight. What is read of
a model takes most of the time, on each rank: there are no more ranks, and no more layers, than a
case needs. All families with all schedules on 2 and on 4 ranks are left to `everything()`.
`scripts/families` makes small models of all that transformers has, and a few of them are here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import pipegrad
from tests.support import with_transformers  # noqa: F401 - a fork server imports it once
from tests.support.pairwise import everything
from tests.support.partition import small_models
from tests.support.partition.families import FAMILIES, ROWS, TOKENS
from tests.support.partition.twins import difference
from tests.support.pipeline.schedulers import error, share, topology
from tests.support.pipeline.trained import Seen, backward, bits, on_ranks, once, train
from tests.support.ranked import gathered
from tests.support.rounding import ADAM_EPS, rounding

pytest.importorskip("transformers")

STEPS = 3
SECONDS = 400.0  # the first case of a world imports transformers, in each rank
# Losses and norms of transformers compute in float32, whatever the dtype of the model.
MOST = 1e-6
MICROBATCH = 2  # rows
SCHEDULES = {"1f1b": 1, "eager-1f1b": 1, "interleaved-1f1b": 2, "zb-h1": 1, "zbv": 2}  # stages
# These compute nothing in float32.
EXACT = ("BERT", "BART", "Whisper", "ViT")
MOST_EXACT = rounding(ROWS * TOKENS, dtype=torch.float64)
VARIOUS = {  # cut into two stages, and into eight
    "GPT-2": ("1f1b", "zbv"),
    "Gemma3": ("eager-1f1b", "interleaved-1f1b"),
    "Mixtral": ("zb-h1", "zbv"),
    "T5": ("1f1b", "interleaved-1f1b"),
}
# Four stages are on four ranks here, and on two elsewhere.
FOUR_RANKS = {
    "Llama 3.2": "eager-1f1b",
    "Qwen3": "zb-h1",
    "BERT": "1f1b",
    "BART": "eager-1f1b",
    "Whisper": "zb-h1",
}


@dataclass(frozen=True)
class Case:
    """A way to train a family; ranks that a pipeline does not need are replicas."""

    family: str
    schedule: str
    pipeline: int
    num_ranks: int
    num_layers: int = 4

    def __str__(self) -> str:
        return f"{self.family}, {self.schedule}, {self.pipeline} ranks"


def cases() -> Iterator[Case]:
    names = list(SCHEDULES)
    loops = ("interleaved-1f1b", "zbv")  # of two stages a rank
    for at, family in enumerate(FAMILIES):
        schedule = FOUR_RANKS.get(family, loops[at % 2])
        pipeline = 4 // SCHEDULES[schedule]
        yield Case(family, schedule, pipeline, pipeline)
        for pipeline, schedule in zip((2, 4), VARIOUS.get(family, ()), strict=False):
            yield Case(family, schedule, pipeline, num_ranks=4, num_layers=6)
        if everything():
            for schedule, pipeline in itertools.product(names, (2, 4)):
                yield Case(family, schedule, pipeline, num_ranks=4, num_layers=6)


CASES = [*dict.fromkeys(cases())]
SMOKE = next(case for case in CASES if case.family == "T5")


def batch(family: str, step: int) -> dict[str, Any]:
    return FAMILIES[family].batch(100 + step)


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, eps=ADAM_EPS)


@once
def truth(family: str, num_layers: int) -> Seen:
    model = FAMILIES[family].with_layers(num_layers).build()
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


@pytest.mark.parametrize("case", on_ranks(CASES, SMOKE, seconds=SECONDS))
def test_losses_gradients_and_trained_parameters_are_those_of_one_process(case: Case) -> None:
    at, number = topology(case.pipeline), ROWS // MICROBATCH
    model = FAMILIES[case.family].with_layers(case.num_layers).build()
    parts = pipegrad.cut(model, case.pipeline * SCHEDULES[case.schedule])
    scheduler = pipegrad.Scheduler(
        parts, at, schedule=case.schedule, num_microbatches=number // at.size("dp")
    )
    held = {
        name: parameter
        for stage in scheduler.topology.local_stages
        for name, parameter in parts.modules[stage].named_parameters(remove_duplicate=False)
    }

    def step(number: int, _: int) -> Tensor:
        whole = batch(case.family, number)
        given: Any = {name: share(value, at) for name, value in whole.items()}
        return scheduler.step(**given).loss

    optimizer = scheduler.optimizer(optimizer_of)
    seen = train(step, lambda: held, sync=scheduler.sync, optimizer=optimizer, steps=STEPS)
    scheduler.close()

    true = truth(case.family, case.num_layers)
    most = MOST_EXACT if case.family in EXACT else MOST
    assert max(map(error, seen.losses, true.losses)) <= MOST
    assert worst(seen.gradients[0], true.gradients[0]) <= most
    # Each step adds its own error, which AdamW scales with 1e-3 / ADAM_EPS.
    assert worst(seen.parameters, true.parameters) <= STEPS * most
    # Everything is held somewhere, also what is frozen, such as Whisper's positions.
    assert set().union(*gathered({*held})) == {*true.parameters}
    bits(seen.parameters, parts.tied)


# Of each kind of head, and what was wrong or refused once.
SAMPLE = [
    ("blip", 2, "1f1b"),
    ("git", 4, "1f1b"),
    ("kosmos-2.5", 4, "zb-h1"),
    ("marian", 2, "zb-h1"),
    ("encoder-decoder", 4, "1f1b"),
    ("deberta-v2", 4, "zb-h1"),
    ("deepseek_v3", 2, "1f1b"),
    ("mixtral", 4, "zb-h1"),
    ("falcon", 2, "zb-h1"),
    ("wavlm", 4, "1f1b"),
    ("vit", 2, "1f1b"),
    ("layoutlm", 4, "1f1b"),
    ("gemma4", 4, "zb-h1"),
    ("musicgen", 2, "zb-h1"),
]


@pytest.mark.ranks(4, seconds=SECONDS)
@pytest.mark.parametrize(("kind", "num_stages", "schedule"), SAMPLE)
def test_a_small_model_of_any_family_has_the_gradients_of_one_process(
    kind: str, num_stages: int, schedule: str
) -> None:
    row = small_models.compare(kind, num_stages, schedule)
    assert "errors" in row, row
    assert row["errors"][0][0] <= small_models.MOST
