"""Stages that are hung together by names, in every way a pipeline must be able to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

from pipegrad.schedules import Kind
from tests.support.pipeline.models import TOKENS, VOCAB, WIDTH
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
    lenient: bool = False
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
        keywords: Sequence[str] = getattr(module, "keywords", ())
        positions = [known[name] for name in inputs.split() if name not in keywords]
        out = module(*positions, **{name: known[name] for name in keywords})
        names = outputs.split()
        if isinstance(out, Mapping):
            known |= {name: out[name] for name in names}
        else:
            values = out if isinstance(out, tuple | list) else (out,)
            known |= dict(zip(names, values, strict=True))
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


def wired(*placements: Sequence[int], **options: Any) -> Callable[..., Parts]:
    """Makes a function that returns stages a case of each of these placements."""

    def add(parts: Parts, name: str = "") -> Parts:
        name = name or parts.__name__
        wirings.extend(Wiring(name, parts, tuple(p), **options) for p in placements)
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


@wired((0, 1, 2, 3), (0, 1, 0, 1), (0, 1, 1, 0), (0, 0, 1, 1), (0, 1, 1, 1), (0, 0, 0, 1), (0,) * 4)
def skips() -> list[Part]:
    """A value for three stages, and its gradients back: wherever those are."""
    return [
        (Piece(lambda m, x: (m.linear(x), x.cos() * m.linear(x))), "x", "x skip"),
        (Piece(lambda m, x, skip: (m.linear(x) + skip, x * 2)), "x skip", "x other"),
        (Piece(lambda m, x, skip: m.linear(x) * skip.sigmoid()), "x skip", "x"),
        (Piece(lambda m, x, skip, other: m.linear(x) + skip + other), "x skip other", "x"),
    ]


class Masked(Piece):
    """Takes a mask by keyword alone; behind it what passes whole."""

    keywords = ("attention_mask", "scale", "nothing")

    def __init__(self) -> None:
        super().__init__(lambda *_: None)

    def forward(  # type: ignore[override]
        self,
        hidden: Tensor,
        *,
        attention_mask: Tensor,
        scale: float,
        nothing: object,
    ) -> Tensor:
        assert type(scale) is float
        assert nothing is None
        attention = (hidden @ hidden.mT * scale).masked_fill(~attention_mask[:, None], -1e9)
        attended: Tensor = self.linear(attention.softmax(-1) @ hidden)
        return hidden + attended


def masks(rows: int) -> dict[str, object]:
    mask = torch.rand(rows, TOKENS) < 0.7
    mask[:, 0] = True
    return {"attention_mask": mask, "scale": 0.3, "nothing": None, "whole": torch.tensor(2.0)}


@wired((0, 1, 2, 3), (0, 1, 1, 0), given=masks)
def named_inputs_of_middle_stages() -> list[Part]:
    return [
        (block(), "x", "x"),
        (Masked(), "x attention_mask scale nothing", "x"),
        (Masked(), "scale attention_mask x nothing", "x"),
        (Piece(lambda m, whole, x: m.linear(x) * whole), "whole x", "x"),
    ]


def tokens(rows: int) -> dict[str, object]:
    return {"x": torch.randint(VOCAB, (rows, TOKENS))}


@wired((0, 1, 2), (0, 1, 0), (0, 1, 1), given=tokens)
def integers_and_bools() -> list[Part]:
    """A stage that only sends what has no gradient, and one that sends both."""

    def first(m: Piece, x: Tensor) -> tuple[Tensor, ...]:
        return m.table[x], (x + 1) % VOCAB, x > VOCAB // 2  # type: ignore[index]

    def second(m: Piece, x: Tensor, ids: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        return (m.linear(x) + m.table[ids]) * keep[..., None], ids * 3 % VOCAB  # type: ignore[index]

    return [
        (Piece(first, table=(VOCAB, WIDTH)), "x", "x ids keep"),
        (Piece(second, table=(VOCAB, WIDTH)), "x ids keep", "x ids"),
        (
            Piece(
                lambda m, x, ids, keep: m.linear(x) + m.table[ids] * ~keep[..., None],
                table=(VOCAB, WIDTH),
            ),
            "x ids keep",
            "x",
        ),
    ]


@wired((0, 1, 2), given=tokens)
def nothing_but_integers() -> list[Part]:
    return [
        (Plain(lambda x: (x + 1) % VOCAB), "x", "x"),
        (Piece(lambda m, x: m.table[x], table=(VOCAB, WIDTH)), "x", "x"),
        (block(), "x", "x"),
    ]


def frozen(*stages: int) -> Parts:
    """Returns what makes three stages, some of them frozen."""
    return lambda: [(block().requires_grad_(s not in stages), "x", "x") for s in range(3)]


FROZEN = {
    "frozen_first": ((0,), ((0, 1, 2), (0, 1, 0), (0, 0, 1))),
    "frozen_middle": ((1,), ((0, 1, 2), (0, 1, 0))),
    "frozen_but_the_last": ((0, 1), ((0, 1, 2), (0, 1, 0))),
    "frozen_last": ((2,), ((0, 1, 2), (0, 1, 0))),
}
for name, (stages, placements) in FROZEN.items():
    wired(*placements)(frozen(*stages), name)


@wired((0, 1, 2), (0, 1, 1), (0, 0, 1), (0, 0, 0), lenient=True)
def unused_by_consumers() -> list[Part]:
    """One value nobody computes with, one of two consumers does; one for one microbatch alone."""
    return [
        (Piece(lambda m, x: (m.linear(x), x * m.p, x * m.q), p=(), q=()), "x", "x none half"),
        (Piece(lambda m, x, none, half: m.linear(x)), "x none half", "x"),
        (Piece(lambda m, x, none, half: m.linear(x) * half), "x none half", "x"),
    ]


@wired((0, 1, 2, 3), (0, 1, 0, 1), (0, 1, 1, 0), (0, 0, 0, 0), first="F")
@wired((0, 1, 2, 3), (0, 1, 0, 1), (0, 1, 1, 0), (0, 0, 1, 1))
def views() -> list[Part]:
    """What leaves is what came in, in a buffer that is used again; and so back."""
    return [
        (Piece(lambda m, x: m.linear(x).mT), "x", "x"),
        (Plain(lambda x: x.view_as(x)), "x", "x"),
        (Plain(lambda x: x.transpose(1, 2)), "x", "x"),
        (Plain(lambda x: x), "x", "x"),
    ]


@wired((0, 1, 2, 3), (0, 1, 1, 0), (0, 1, 0, 1))
def views_that_others_take_too() -> list[Part]:
    return [
        (block(), "x", "x"),
        (Plain(lambda x: (x, x.view_as(x), x[:, 1:])), "x", "x y z"),
        (Plain(lambda x, y: (x.mT, y)), "x y", "x y"),
        (Piece(lambda m, x, y, z: m.linear(x.mT) + y * z.mean()), "x y z", "x"),
    ]


@wired((0, 1, 2), (0, 1, 0))
def outputs_in_a_mapping_and_in_sequences() -> list[Part]:
    return [
        (Piece(lambda m, x: {"b": m.linear(x), "more": None, "a": x.sin()}), "x", "a b"),
        (Piece(lambda m, a, b: [m.linear(a) - b]), "a b", "x"),
        (Piece(lambda m, x: (m.linear(x),)), "x", "x"),
    ]


@wired((0, 1, 2), (0, 1, 0))
def a_parameter_that_is_handed_on() -> list[Part]:
    return [
        (Piece(lambda m, x: (m.linear(x), m.p, m.p.view(WIDTH, 1)), p=(WIDTH,)), "x", "x p q"),
        (Piece(lambda m, x, p: m.linear(x) * p), "x p", "x"),
        (Piece(lambda m, x, p, q: m.linear(x) + p + x @ q), "x p q", "x"),
    ]


@wired((0, 1), (0, 0))
def scalars() -> list[Part]:
    return [
        (Piece(lambda m, x: (m.linear(x), m.linear(x).sum())), "x", "x total"),
        (Piece(lambda m, x, total: m.linear(x) * total), "x total", "x"),
    ]


def added(x: Tensor, p: Tensor) -> Tensor:
    """Returns a sum whose gradient, and that of p and that of x, torch leaves in one storage."""
    return (x.flatten() + p.flatten()).view(x.shape)


BATCH = ROWS, TOKENS, WIDTH


@wired((0, 1, 2), (0, 1, 0), options=(("handlers", ("noop",)),))
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


@wired((0, 1, 2), (0, 1, 0), first="F")
@wired((0, 1, 2), (0, 1, 0))
def a_parameter_that_the_first_microbatch_does_not_use() -> list[Part]:
    return [(block(), "x", "x"), (FromTheSecondOn(), "x", "x"), (Plain(lambda x: x * x), "x", "x")]


def square_of_sum() -> Piece:
    return Piece(lambda m, x: added(x, m.p) ** 2, p=BATCH)


@wired((0, 0), (0, 1), first="F")
def gradients_of_values_in_those_of_parameters() -> list[Part]:
    """The next microbatch adds to the parameter's, before the value's is read."""
    return [(block(), "x", "x"), (square_of_sum(), "x", "x")]


@wired((0, 0, 0), (0, 1, 1), (0, 1, 2))
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


@wired((0, 1), (0, 0), loss=lambda loss, _: loss)
def losses_that_arrive() -> list[Part]:
    """The loss function hands on what a stage before the last has computed."""
    return [
        (Piece(lambda m, x: m.linear(x).square().mean()), "x", "x"),
        (Plain(lambda x: x), "x", "x"),
    ]
