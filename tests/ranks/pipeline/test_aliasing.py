"""What modules do by habit with memory: the numbers of one process, or a refusal in words.

Three stages of a rank each, so that the middle one has received what it hands on. Each habit is
that of one stage, in three steps and in an evaluation.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from pipegrad import Scheduler
from pipegrad.pipeline import edges
from tests.support.gradients.cases import outcome, rank
from tests.support.pairwise import everything
from tests.support.pipeline import layers, schedulers
from tests.support.pipeline.layers import NUM_MICROBATCHES, distance, make, mean_square, normal

pytestmark = pytest.mark.ranks(3)
NAMES: Any = {0: (["x"], ["x", "y"]), 1: (["x", "y"], ["x"])}  # of two values
ROWS, WIDTH = 2, 3  # rows of a microbatch
MOST = layers.MOST, schedulers.MOST  # of gradients, and of losses, which are float32


class Part(nn.Module):
    """A layer with what a habit may need: a parameter, a buffer, and what is remembered."""

    buffer: Tensor

    def __init__(self, function: Callable[..., Any], seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.position = nn.Parameter(normal(ROWS, WIDTH, seed=seed))
        self.register_buffer("buffer", normal(ROWS, WIDTH, seed=seed + 9))
        self.cached = normal(ROWS, WIDTH, seed=seed + 10)
        self.kept = self.cached
        self._function = function

    def forward(self, *values: Tensor) -> Any:
        return self._function(self, *values)

    def swap(self, value: Tensor) -> Tensor:
        """Keeps a value; returns the one before."""
        self.kept, before = value, self.kept
        return before


def plain(m: Part, x: Tensor, *more: Tensor) -> Any:
    out: Tensor = m.linear(sum((v.real for v in more), x.real).tanh())
    return out


def writes(of: Callable[[Part, Tensor], Tensor]) -> Callable[[Part, Tensor], Tensor]:
    """Writes into what it returns, once a forward."""

    def forward(m: Part, x: Tensor) -> Tensor:
        return of(m, x).add_(x.detach().mean())

    return forward


def keeps_row(m: Part, x: Tensor) -> Tensor:
    out = plain(m, x)
    return out + m.swap(out)[:1].detach()  # type: ignore[no-any-return]


def writes_earlier_output(m: Part, x: Tensor) -> Tensor:
    out: Tensor = plain(m, x)
    m.swap(out).detach().zero_()
    return out


def delays(m: Part, x: Tensor) -> Tensor:
    """Returns what it made for the microbatch before, and twice what it makes for the first."""
    out: Tensor = plain(m, x)
    before = m.swap(out)
    return before if before.requires_grad == out.requires_grad else out


def writes_input(m: Part, x: Tensor) -> Any:
    x.detach().mul_(2)
    return plain(m, x)


class Named(Tensor):
    """A subclass of a user's."""


class Habit(NamedTuple):
    """What a stage does, and what becomes of it.

    Attributes:
        stage: Which one.
        forward: Of a Part and its inputs.
        refused: A part of the error; "" if numbers are those of one process.
        recomputed: Likewise, if the stages recompute.
        first: Of stage 0, if that makes a second value for stage 1.
    """

    stage: int
    forward: Callable[..., Any]
    refused: str = ""
    recomputed: str = ""
    first: Callable[..., Any] | None = None


def twice(m: Part, x: Tensor) -> Any:
    return (plain(m, x),) * 2


AGAIN = "something else when its forward ran again"
CLONE = "return a clone of it"
GIVEN = "has changed in place what the stage was given"
GRADIENT = "always or never has a gradient"
LEAF = "a leaf Variable that requires grad is being used in an in-place operation"
HABITS = {
    "returns its input": Habit(1, lambda m, x: x),
    "returns a view of its input": Habit(1, lambda m, x: x[:, :]),
    "returns what it has cached": Habit(0, lambda m, x: m.cached),
    "returns a buffer": Habit(0, lambda m, x: m.buffer),
    "returns a parameter": Habit(1, lambda m, x: m.position),
    "returns a buffer that it writes": Habit(0, writes(lambda m, x: m.buffer)),
    "returns what it has cached and writes": Habit(1, writes(lambda m, x: m.cached), "", AGAIN),
    "returns a tensor twice": Habit(1, plain, first=twice),
    "returns a tensor and a row of it": Habit(
        1, plain, first=lambda m, x: ((y := plain(m, x)), y[:1])
    ),
    "returns its input beside its output": Habit(1, plain, first=lambda m, x: (plain(m, x), x)),
    "keeps a row of its output": Habit(0, keeps_row, "", AGAIN),
    "keeps its input, detached": Habit(1, lambda m, x: plain(m, x, m.swap(x.detach())), "", AGAIN),
    "keeps an input without a gradient": Habit(
        1,
        lambda m, x, sign: plain(m, x, m.swap(sign)),
        "",
        AGAIN,
        first=lambda m, x: (plain(m, x), x.detach().sign()),
    ),
    "writes into its input": Habit(1, lambda m, x: plain(m, x.mul_(2)), LEAF, LEAF),
    "writes into its input, detached": Habit(1, writes_input, "", GIVEN),
    "writes into the batch": Habit(0, lambda m, x: plain(m, x.mul_(2)), "", GIVEN),
    "writes into its output": Habit(0, lambda m, x: plain(m, x).mul_(2)),
    "writes into an earlier output": Habit(0, writes_earlier_output, CLONE, CLONE),
    "returns an expanded tensor": Habit(
        0, lambda m, x: plain(m, x).mean(0, keepdim=True).expand(ROWS, WIDTH)
    ),
    "returns an output of another microbatch": Habit(1, delays, "a second time", AGAIN),
    "returns an output of another microbatch, detached": Habit(
        1, lambda m, x: m.swap(plain(m, x).detach()), "", AGAIN
    ),
    "returns now a gradient, now none": Habit(1, lambda m, x: m.swap(x), GRADIENT, GRADIENT),
    "returns a transposed tensor": Habit(0, lambda m, x: plain(m, x).t().contiguous().t()),
    "returns a subclass": Habit(0, lambda m, x: plain(m, x).as_subclass(Named)),
    "returns a conjugated view": Habit(0, lambda m, x: torch.complex(y := plain(m, x), y).conj()),
    "returns a negated view": Habit(0, lambda m, x: torch.complex(y := plain(m, x), y).conj().imag),
}


def parts(habit: Habit) -> list[Part]:
    forwards = [habit.first or plain, plain, plain]
    forwards[habit.stage] = habit.forward
    return [Part(forward, seed) for seed, forward in enumerate(forwards)]


def one_process(modules: list[Part], x: Tensor, target: Tensor) -> float:
    """Returns the loss; microbatches come one after the other, their backwards too."""
    losses = []
    for part, wanted in zip(*(t.chunk(NUM_MICROBATCHES) for t in (x, target)), strict=True):
        values: Any = (part,)
        for module in modules:
            out = module(*values)
            values = out if isinstance(out, tuple) else (out,)
        losses.append(mean_square(values[0], wanted) / NUM_MICROBATCHES)
        if torch.is_grad_enabled():
            losses[-1].backward()
    return sum(map(float, losses))


def batch(seed: int) -> tuple[Tensor, Tensor]:
    shape = ROWS * NUM_MICROBATCHES, WIDTH
    return normal(*shape, seed=2 * seed), normal(*shape, seed=2 * seed + 1)


def compared(habit: Habit, scheduler: Scheduler, module: Part) -> dict[str, float]:
    """Returns how far steps and an evaluation are from one process."""
    twins, found = parts(habit), dict[str, float]()
    for step in range(3):
        for part in (module, *twins):
            part.zero_grad()
        x, target = batch(step)
        loss = float(scheduler.step(x.clone(), target=target).loss)
        found[f"loss {step}"] = abs(loss - one_process(twins, x.clone(), target))
        for name, p in twins[rank()].named_parameters():
            zeros = torch.zeros_like(p)
            mine, true = (
                zeros if g is None else g for g in (module.get_parameter(name).grad, p.grad)
            )
            if true.any() or mine.any():
                found[f"{name} {step}"] = distance(mine, true)
    with torch.no_grad():
        x, target = batch(9)
        evaluated = float(scheduler.evaluate(x.clone(), target=target).loss)
        found["loss of evaluation"] = abs(evaluated - one_process(twins, x.clone(), target))
    return {name: error for name, error in found.items() if not error <= MOST[name[:4] == "loss"]}


def rows() -> Iterator[Any]:
    """Yields each habit once, and once with recompute where that is another story."""
    ways = list(itertools.product(("1f1b", "gpipe", "zb-h1"), (True, False)))
    for number, (name, habit) in enumerate(HABITS.items()):
        for recompute in (False, True):
            some = ways if everything() else [ways[number % len(ways)]]
            if everything() or not recompute or habit.recomputed != habit.refused:
                yield from (pytest.param(name, *way, recompute) for way in some)


@pytest.mark.parametrize(("name", "schedule", "tags", "recompute"), list(rows()))
def test_a_habit_is_right_or_refused(
    name: str, schedule: str, *, tags: bool, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    habit = HABITS[name]
    monkeypatch.setattr(edges, "has_tags", lambda *_: tags)  # messages of a device have none
    modules = parts(habit)
    with closing(
        make(*modules, names=NAMES if habit.first else None, schedule=schedule, recompute=recompute)
    ) as scheduler:
        said = outcome(lambda: compared(habit, scheduler, modules[rank()]))
    refused = habit.recomputed if recompute else habit.refused
    assert refused in said if refused else said == "{}"
