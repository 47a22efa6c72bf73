"""Split backward of stages with weights that cannot wait: right, and said once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipegrad import Scheduler, Stage
from tests.support.gradients.cases import DATA, outcome, rank
from tests.support.pipeline.models import Block, build
from tests.support.pipeline.schedulers import MOST, error, named, topology, wrong
from tests.support.pipeline.twins import Twins, tied

pytestmark = pytest.mark.ranks(2)


class Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight.T, x.flatten(0, -2).T @ grad.flatten(0, -2)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


class Custom(Block):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(Multiply.apply(x, self.linear.weight))  # type: ignore[no-untyped-call]
        return out


class CustomWithoutWeights(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Doubled.apply(x))  # type: ignore[no-untyped-call]


def third(make: Callable[[], nn.Module]) -> nn.Sequential:
    """Returns the tied model with another third layer, which is in its first stage."""
    found = tied()
    found[2] = make()
    return found


def compiled() -> nn.Module:
    return torch.compile(Block(), backend="aot_eager")  # type: ignore[return-value]  # quick


def unwrapped(parameters: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Returns them by the names in the uncut model."""
    return {name.replace("_orig_mod.", ""): parameter for name, parameter in parameters.items()}


@pytest.mark.parametrize(
    ("make", "num_warnings"),  # of each rank
    [
        (partial(third, compiled), (1, 0)),
        (partial(third, Custom), (1, 0)),
        (partial(third, CustomWithoutWeights), (0, 0)),
        (partial(build, "reentrant"), (1, 1)),
        (partial(build, "non-reentrant"), (1, 1)),
    ],
    ids=["compiled", "custom", "custom without weights", "reentrant", "non-reentrant"],
)
def test_what_cannot_wait_is_right_and_said_once_a_stage(
    make: Callable[[], nn.Sequential], num_warnings: tuple[int, int]
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        twins = Twins(make, schedule="zb-h1")
        mine = unwrapped(named(twins.stages))
        theirs = unwrapped(dict(twins.true.named_parameters(remove_duplicate=False)))
        for step in range(3):
            twins.step(step, num_parts=4)
            for name, parameter in mine.items():
                twins.errors[f"{step} {name}"] = error(parameter.grad, theirs[name].grad)
            for parameter in (*mine.values(), *theirs.values()):
                parameter.grad = None
    errors = twins.close()
    assert wrong(errors, MOST) == {}
    assert len(errors) > 3 * 13
    said = [str(w.message) for w in caught if "weights" in str(w.message)]
    assert len(said) == num_warnings[rank()], said
    assert all(f"stage {rank()}: " in words for words in said)


def make(layers: list[Any], schedule: str, **options: Any) -> Scheduler:
    stages = [Stage(layers[rank()], rank())]
    return Scheduler(stages, topology(2), schedule=schedule, num_microbatches=4, **options)


def test_what_is_no_parameter_of_a_stage_has_its_gradient_too() -> None:
    """A matrix of the loss, and what the first stage is given."""
    found = []
    for schedule in ("1f1b", "zb-h1"):
        torch.manual_seed(3)
        layers, head = [nn.Linear(4, 4), nn.Linear(4, 4)], nn.Linear(4, 4)

        def loss_fn(out: Tensor, target: Tensor, head: nn.Module = head) -> Tensor:
            loss: Tensor = (head(out) - target).square().mean()
            return loss

        x = torch.randn(8, 4, requires_grad=True)
        with closing(make(layers, schedule, handlers=["noop"], loss_fn=loss_fn)) as scheduler:
            scheduler.step(x, target=x.detach())
        found.append((x.grad, head.weight.grad, layers[rank()].weight.grad))
    assert all(error(split, whole) <= MOST for whole, split in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("schedule", "handlers"), [("1f1b", ["noop"]), ("zb-h1", []), ("zb-h1", [DATA])]
)
def test_a_sparse_gradient_is_right_then_all_is_closed(schedule: str, handlers: list[str]) -> None:
    tokens, target = torch.arange(8) % 3, torch.ones(8, 4)
    layers: list[Any] = [nn.Embedding(5, 4, sparse=True), nn.Linear(4, 4)]

    def loss_fn(out: Tensor, wanted: Tensor) -> Tensor:
        return (out - wanted).square().mean()

    scheduler = make(layers, schedule, handlers=handlers, loss_fn=loss_fn)
    scheduler.step(tokens, target=target)
    scheduler.close()
    mine: Any = layers[rank()].weight.grad
    layers[0].weight.grad = layers[1].weight.grad = None
    loss_fn(nn.Sequential(*layers)(tokens), target).backward()
    true: Any = layers[rank()].weight.grad
    assert error(mine.to_dense(), true.to_dense()) <= MOST
    closed = outcome(lambda: scheduler.step(tokens, target=target))
    assert closed == "StepError: this Scheduler is closed: make another one"
