"""Split backward of stages with weights that cannot wait: right, and said once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipegrad import Scheduler, Stage
from tests.support.gradients.cases import DATA, Case, Replies, on, outcome, rank, replies
from tests.support.pipeline.models import Block, build
from tests.support.pipeline.schedulers import (
    MOST,
    error,
    named,
    topology,
    wrong,
)
from tests.support.pipeline.twins import Twins, tied

TWO: list[Case] = []
two = replies(2, TWO)

# What cannot wait.


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


def third(make: Callable[[], nn.Module]) -> Callable[[], nn.Sequential]:
    """Returns what makes the tied model with another third layer, which is in its first stage."""

    def model() -> nn.Sequential:
        found = tied()
        found[2] = make()
        return found

    return model


def compiled() -> nn.Module:
    return torch.compile(Block(), backend="aot_eager")  # type: ignore[return-value]  # quick


FALLBACKS: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {  # and warnings of each rank
    "compiled": ({"make": third(compiled)}, (1, 0)),
    "custom function": ({"make": third(Custom)}, (1, 0)),
    "custom function without weights": ({"make": third(CustomWithoutWeights)}, (0, 0)),
    "reentrant": ({"make": lambda: build("reentrant")}, (1, 1)),
    "non-reentrant": ({"make": lambda: build("non-reentrant")}, (1, 1)),
}


@on(TWO)
def fallbacks() -> Any:
    found = {}
    for name, (options, _) in FALLBACKS.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            twins = Twins(schedule="zb-h1", **options)
            for step in range(3):
                twins.step(step, num_parts=4)
                compare_unwrapped(twins, step)
        said = [str(w.message) for w in caught if "weights" in str(w.message)]
        found[name] = twins.close(), said
    return found


def compare_unwrapped(twins: Twins, step: int) -> None:
    """Adds the errors of all gradients, by the names in the uncut model."""
    theirs = {unwrap(n): p for n, p in twins.true.named_parameters(remove_duplicate=False)}
    mine = {unwrap(n): p for n, p in named(twins.stages).items()}
    for name, parameter in mine.items():
        twins.errors[f"{step} {name}"] = error(parameter.grad, theirs[name].grad)
    for parameter in (*mine.values(), *theirs.values()):
        parameter.grad = None


def unwrap(name: str) -> str:
    return name.replace("_orig_mod.", "")


@pytest.mark.parametrize("name", FALLBACKS)
def test_what_cannot_wait_is_right_and_said_once_a_stage(name: str, two: Replies) -> None:
    for at, reply in enumerate(two):
        errors, said = reply["fallbacks"][name]
        assert wrong(errors, MOST) == {}, f"rank {at}"
        assert len(errors) > 3 * 13
        assert len(said) == FALLBACKS[name][1][at], said
        assert all(f"stage {at}: " in words for words in said)


def outsiders(schedule: str) -> Any:
    """Returns the gradients of a loss that has a matrix, and of what the first stage is given."""
    torch.manual_seed(3)
    layers, head = [nn.Linear(4, 4), nn.Linear(4, 4)], nn.Linear(4, 4)

    def loss_fn(out: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = (head(out) - target).square().mean()
        return loss

    at = topology(2)
    stages = [Stage(layers[rank()], rank())]
    options: dict[str, Any] = {"num_microbatches": 4, "handlers": ["noop"], "loss_fn": loss_fn}
    scheduler = Scheduler(stages, at, schedule=schedule, **options)
    x = torch.randn(8, 4, requires_grad=True)
    said = outcome(lambda: type(scheduler.step(x, target=x.detach())).__name__)
    scheduler.close()
    found = {"x": x.grad, "head": head.weight.grad, "stage": layers[rank()].weight.grad}
    return said, found


@on(TWO)
def of_outsiders() -> Any:
    return {schedule: outsiders(schedule) for schedule in ("1f1b", "zb-h1")}


def test_what_is_no_parameter_of_a_stage_has_its_gradient_too(two: Replies) -> None:
    for reply in two:
        (whole, wanted), (said, found) = reply["of_outsiders"].values()
        assert said == whole == "'StepResult'"
        for name in found:
            assert error(found[name], wanted[name]) <= MOST, name


@on(TWO)
def sparse() -> Any:
    """Returns the gradients of a sparse embedding, under no handler and under one, and alone."""
    at, found = topology(2), []
    tokens, target = torch.arange(8) % 3, torch.ones(8, 4)
    for schedule, handlers in (("1f1b", ["noop"]), ("zb-h1", []), ("zb-h1", [DATA])):
        torch.manual_seed(3)
        layers: list[Any] = [nn.Embedding(5, 4, sparse=True), nn.Linear(4, 4)]
        scheduler = Scheduler(
            [Stage(layers[rank()], rank())],
            at,
            schedule=schedule,
            num_microbatches=4,
            loss_fn=lambda out, wanted: (out - wanted).square().mean(),
            handlers=handlers,
        )
        scheduler.step(tokens, target=target)
        scheduler.close()
        mine: Any = layers[rank()].weight.grad
        layers[0].weight.grad = layers[1].weight.grad = None
        (nn.Sequential(*layers)(tokens) - target).square().mean().backward()
        true: Any = layers[rank()].weight.grad
        closed = outcome(lambda: scheduler.step(tokens, target=target))  # noqa: B023
        found.append((error(mine.to_dense(), true.to_dense()), closed))
    return found


def test_a_sparse_gradient_is_right_and_a_closed_scheduler_refuses(two: Replies) -> None:
    for reply in two:
        for wrongness, closed in reply["sparse"]:
            assert wrongness <= MOST
            assert closed == "StepError: this Scheduler is closed: make another one"
