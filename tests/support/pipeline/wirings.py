"""Stages that are hung together by names: what one process has of them, and those once wrong.

tests/fuzz/test_wirings.py draws others: skips, masks, values without gradients, frozen stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

from pipegrad.schedules import Kind
from tests.support.pipeline.models import TOKENS, WIDTH
from tests.support.pipeline.schedulers import ROWS
from tests.support.pipeline.trained import Seen, train

Part = tuple[nn.Module, str, str]  # a stage, and its inputs and outputs, separated by spaces
Parts = Callable[[], list[Part]]


class Piece(nn.Module):
    """A stage of one expression, which may use the layer and the parameters."""

    def __init__(self, function: Callable[..., Any], **parameters: tuple[int, ...]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        for name, shape in parameters.items():
            setattr(self, name, nn.Parameter(torch.randn(shape)))
        self._function = function

    def forward(self, *values: Any) -> Any:
        return self._function(self, *values)


class Plain(nn.Module):
    """A stage of one expression, without parameters."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *values: Any) -> Any:
        return self._function(*values)


def mean_square(out: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(out.reshape(target.shape), target)


@dataclass(frozen=True)
class Wiring:
    """Stages, where they are, and what they are given."""

    name: str
    parts: Parts
    places: tuple[int, ...]
    first: Kind = "B"
    num_microbatches: int = 6
    given: Callable[[int], dict[str, object]] = lambda rows: {}
    loss: Callable[[Tensor, Tensor], Tensor] = mean_square
    options: tuple[tuple[str, Any], ...] = ()
    late: int = -1  # as in `greedy`
    recompute: bool = False

    def __str__(self) -> str:
        told = f"{self.name} {self.places}, {self.first} first, {self.num_microbatches}"
        if self.late >= 0:
            told += f", split, {self.late} late"
        if self.recompute:
            told += ", recomputed"
        return told + "".join(f", {name} {value}" for name, value in self.options)

    @property
    def num_ranks(self) -> int:
        return max(self.places) + 1

    def built(self) -> list[Part]:
        """Returns the stages, the same ones each time."""
        torch.manual_seed(11)
        return self.parts()

    def batch(self, step: int) -> tuple[dict[str, Any], Tensor]:
        torch.manual_seed(200 + step)
        rows = ROWS * self.num_microbatches
        x, target = torch.randn(2, rows, TOKENS, WIDTH)
        return {"x": x, **self.given(rows)}, target

    def microbatches(self, step: int) -> Iterator[tuple[dict[str, Any], Tensor]]:
        """Yields what each microbatch of a step is given, and its target."""
        (given, target), number = self.batch(step), self.num_microbatches
        is_cut = {n: isinstance(v, Tensor) and v.dim() > 0 for n, v in given.items()}
        for m, part in enumerate(target.chunk(number)):
            yield {n: v.chunk(number)[m] if is_cut[n] else v for n, v in given.items()}, part


def alone(parts: Sequence[Part], given: Mapping[str, Any]) -> Tensor:
    """Returns what the last stage makes, in one process."""
    known = dict(given)
    for module, inputs, outputs in parts:
        out = module(*(known[name] for name in inputs.split()))
        known |= dict(zip(outputs.split(), out if isinstance(out, tuple) else (out,), strict=True))
    last: Tensor = known[parts[-1][2]]
    return last


Evaluated = list[tuple[Tensor, Tensor]]  # losses, and what the last stage makes
STEPS, EVALUATIONS = 3, 2  # the first ones of which learn


def trained_alone(wiring: Wiring) -> tuple[Seen, Evaluated]:
    """Trains in one process; returns that, and two evaluations."""
    parts = wiring.built()
    modules = nn.ModuleList([module for module, _, _ in parts])
    trained = [p for p in modules.parameters() if p.requires_grad]

    def step(number: int, _: int) -> Tensor:
        """Not by backward(): torch may leave the gradients of two parameters in one storage, and
        then adds those of the next microbatch to both."""
        total = torch.zeros(())
        for given, target in wiring.microbatches(number):
            loss = wiring.loss(alone(parts, given), target) / wiring.num_microbatches
            gradients = torch.autograd.grad(loss, trained, allow_unused=True)
            for parameter, gradient in zip(trained, gradients, strict=True):
                if gradient is not None:
                    before = 0.0 if parameter.grad is None else parameter.grad
                    parameter.grad = gradient + before
            total += loss.detach()
        return total

    seen = train(step, lambda: dict(modules.named_parameters(remove_duplicate=False)), steps=STEPS)
    return seen, [evaluated(wiring, parts, number) for number in range(EVALUATIONS)]


@torch.no_grad()
def evaluated(wiring: Wiring, parts: Any, number: int) -> tuple[Tensor, Tensor]:
    losses, outputs = list[Tensor](), list[Tensor]()
    for given, target in wiring.microbatches(number):
        outputs.append(alone(parts, given))
        losses.append(wiring.loss(outputs[-1], target))
    whole = torch.cat(outputs) if outputs[0].dim() else torch.stack(outputs)
    return torch.stack(losses).mean(), whole


wirings: list[Wiring] = []


def wired(*placements: tuple[int, ...], **options: Any) -> Callable[[Parts], Parts]:
    """Makes a function that returns stages a case of each of these placements."""

    def add(parts: Parts) -> Parts:
        wirings.extend(Wiring(parts.__name__, parts, p, **options) for p in placements)
        return parts

    return add


def block() -> Piece:
    return Piece(lambda m, x: x + torch.tanh(m.linear(x)))


@wired((0, 1))
def several_tensors() -> list[Part]:
    return [
        (Piece(lambda m, x: (m.linear(x), x.sin(), m.linear(x)[:, 0])), "x", "a b c"),
        (Piece(lambda m, a, b, c: m.linear(a * b) + c[:, None]), "a b c", "x"),
    ]


def added(x: Tensor, p: Tensor) -> Tensor:
    """Returns a sum whose gradient, and that of p and that of x, torch leaves in one storage."""
    return (x.flatten() + p.flatten()).view(x.shape)


BATCH = ROWS, TOKENS, WIDTH


@wired((0, 1, 0), options=(("handlers", ("noop",)),))
@wired((0, 1, 2), num_microbatches=1, options=(("handlers", ("noop",)),))
@wired((0, 1, 2), num_microbatches=1, options=(("reduce_dtype", torch.float64),))
def gradients_of_parameters_in_received_ones() -> list[Part]:
    """With one microbatch a parameter is final before its gradient can be copied."""
    return [
        (Piece(lambda m, x: x + m.p.view(x.shape), p=(ROWS * TOKENS * WIDTH,)), "x", "x"),
        (Piece(lambda m, x: added(x, m.p) + m.q.view(x.shape), p=BATCH, q=(160,)), "x", "x"),
        (Plain(lambda x: x * 2), "x", "x"),
    ]


class FromTheSecondOn(nn.Module):
    """Uses a parameter from the second microbatch of a step on."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(ROWS * TOKENS * WIDTH))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * 1.0 if self.calls % 6 == 1 else x + self.p.view(x.shape)


@wired((0, 1, 0), first="F")
@wired((0, 1, 2))
def a_parameter_that_the_first_microbatch_does_not_use() -> list[Part]:
    return [(block(), "x", "x"), (FromTheSecondOn(), "x", "x"), (Plain(lambda x: x * x), "x", "x")]


def square_of_sum() -> Piece:
    return Piece(lambda m, x: added(x, m.p) ** 2, p=BATCH)


@wired((0, 0), (0, 1), first="F")
def gradients_of_values_in_those_of_parameters() -> list[Part]:
    """The next microbatch adds to the parameter's, before the value's is read."""
    return [(block(), "x", "x"), (square_of_sum(), "x", "x")]


@wired((0, 0, 0), (0, 1, 1))
def gradients_of_two_values_in_one_storage() -> list[Part]:
    """A stage before adds to one of them."""
    return [
        (Piece(lambda m, x: (m.linear(x), x * m.p), p=()), "x", "a b"),
        (Plain(torch.sin), "a", "c"),
        (Plain(lambda a, b, c: added(a, b) ** 2 * c), "a b c", "x"),
    ]


@wired((0, 0, 0, 1))
def gradients_of_two_values_in_one_storage_joined() -> list[Part]:
    """What another rank sends back is added to one of them."""
    return [
        (Piece(lambda m, x: (m.linear(x), x * m.p), p=()), "x", "a b"),
        (Plain(added), "a b", "c"),
        (Plain(lambda c: c * c), "c", "d"),
        (Plain(lambda d, a: d + a.sin()), "d a", "x"),
    ]


@wired((0, 1), loss=lambda loss, _: loss)
def losses_that_arrive() -> list[Part]:
    """The loss function hands on what a stage before the last has computed."""
    return [
        (Piece(lambda m, x: m.linear(x).square().mean()), "x", "x"),
        (Plain(lambda x: x), "x", "x"),
    ]
