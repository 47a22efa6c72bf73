"""Split backward of stages with weights that cannot wait: right, and said once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.gradients.cases import DATA, outcome, rank
from tests.support.pipeline.layers import make, mean_square
from tests.support.pipeline.models import Block, build
from tests.support.pipeline.schedulers import MOST, error
from tests.support.pipeline.trained import Twins, held_by, tied

pytestmark = pytest.mark.ranks(2)


def third(make: Callable[[], nn.Module]) -> nn.Sequential:
    """Returns the tied model with another third layer, which is in its first stage."""
    found = tied()
    found[2] = make()
    return found


def compiled() -> nn.Module:
    return torch.compile(Block(), backend="aot_eager")  # type: ignore[return-value]  # quick


@pytest.mark.parametrize(
    ("make", "num_warnings"),  # of each rank
    [
        (partial(third, compiled), (1, 0)),
        (partial(build, "reentrant"), (1, 1)),
        (partial(build, "non-reentrant"), (1, 1)),
    ],
    ids=["compiled", "reentrant", "non-reentrant"],
)
def test_what_cannot_wait_is_right_and_said_once_a_stage(
    make: Callable[[], nn.Sequential], num_warnings: tuple[int, int]
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        twins = Twins(make, schedule="zb-h1")
        for step in range(3):
            twins.step(step, num_parts=4)
    assert len(held_by(twins.scheduler)) > 12
    twins.close()
    said = [str(w.message) for w in caught if "weights" in str(w.message)]
    assert len(said) == num_warnings[rank()], said
    assert all(f"stage {rank()}: " in words for words in said)


@pytest.mark.parametrize(
    ("schedule", "handlers"), [("1f1b", ["noop"]), ("zb-h1", []), ("zb-h1", [DATA])]
)
def test_a_sparse_gradient_is_right_then_all_is_closed(schedule: str, handlers: list[str]) -> None:
    tokens, target = torch.arange(8) % 3, torch.ones(8, 4)
    layers: list[Any] = [nn.Embedding(5, 4, sparse=True), nn.Linear(4, 4)]

    scheduler = make(*layers, schedule=schedule, handlers=handlers, loss_fn=mean_square)
    scheduler.step(tokens, target=target)
    scheduler.close()
    mine: Any = layers[rank()].weight.grad
    layers[0].weight.grad = layers[1].weight.grad = None
    mean_square(nn.Sequential(*layers)(tokens), target).backward()
    true: Any = layers[rank()].weight.grad
    assert error(mine.to_dense(), true.to_dense()) <= MOST
    closed = outcome(lambda: scheduler.step(tokens, target=target))
    assert closed == "StepError: this Scheduler is closed: make another one"
