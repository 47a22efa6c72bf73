"""Scheduler against one process: batches as a DataLoader gives them, another one in each step.

Trees, ragged rows, other lengths, ready and packed microbatches, other numbers of microbatches, and
evaluations in between. One process runs the same microbatches one after the other, and takes the
mean over rows of those that were cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

from pipegrad import Scheduler, Stage, schedules
from tests.support.pairwise import everything
from tests.support.pipeline.models import Head
from tests.support.pipeline.schedulers import named, topology
from tests.support.pipeline.trained import (
    Seen,
    backward,
    bits,
    checked,
    differences,
    on_ranks,
    once,
    train,
)
from tests.support.ranked import gathered
from tests.support.rounding import rounding

WIDTH, VOCAB, LONGEST = 8, 16, 7

# The model: its first stage takes a tree, the others a mask and an object; the last one is tied.


@dataclass
class Output:
    """What the last stage returns, as models of Hugging Face do."""

    logits: Tensor
    loss: Tensor | None = None
    parts: list[Tensor] = field(default_factory=list)


class Segments:
    """Where packed sequences lie in a row: no tensor, and of no type that torch knows."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)

    @property
    def lengths(self) -> list[int]:
        found: list[int] = self.cu_seqlens.diff().tolist()
        return found


def mixed(x: Tensor, segments: Segments | None) -> Tensor:
    """Adds to each token the mean of its sequence."""
    parts = x.split(segments.lengths, dim=1) if segments is not None else [x]
    return torch.cat([part + part.mean(1, keepdim=True) for part in parts], dim=1)


class First(Head):
    def forward(self, batch: dict[str, Any]) -> tuple[Tensor, None, int]:  # type: ignore[override]
        more, nothing = batch["pair"]
        assert nothing is None
        x = F.embedding(batch["ids"], self.weight) * batch["scale"]
        return x + more[:, None, None], nothing, 3


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor, segments: Segments | None) -> dict[str, Any]:
        x = mixed(x, segments)
        return {"x": x + self.linear(x).tanh() * mask[..., None], "cache": None, "layers": 1}


class Last(Head):
    def forward(  # type: ignore[override]
        self, x: Tensor, mask: Tensor, segments: Segments | None
    ) -> Output:
        return Output(F.linear(mixed(x, segments) * mask[..., None], self.weight))


def loss_of(logits: Tensor, target: dict[str, Any]) -> Tensor:
    losses = F.cross_entropy(logits.transpose(1, 2), target["labels"], reduction="none")
    more: Tensor = target["more"][0]
    return (losses.mean(1) * more).mean()


def built(num_stages: int) -> list[nn.Module]:
    """Returns all stages, the same in every process; the first and the last one are tied."""
    torch.manual_seed(5)
    weight = nn.Parameter(torch.randn(VOCAB, WIDTH) * 0.5)
    return [First(weight), *(Middle() for _ in range(num_stages - 2)), Last(weight)]


def stage_of(module: nn.Module, index: int) -> Stage:
    outputs = ("logits",) if isinstance(module, Last) else ("x",)
    return Stage(module, index, ("x", "mask", "segments") if index else ("batch",), outputs)


# What steps are given.


@dataclass(frozen=True)
class Step:
    """A step, or an evaluation.

    Attributes:
        rows: Rows of each microbatch; one number is a batch that is cut.
        tokens: Length of each microbatch, or of the batch.
        times: The number of microbatches is so many times the number of pipeline ranks.
    """

    rows: int | tuple[int, ...]
    tokens: int | tuple[int, ...]
    times: int = 2
    packed: bool = False
    evaluate: bool = False


STEPS = (
    Step(16, 5),
    Step(16, 5),
    Step(19, 3),  # ragged rows, shorter
    Step(17, 7, evaluate=True),
    Step(9, 4, times=1),
    Step((1, 3, 2), (2, 5, 7)),  # each microbatch another shape
    Step((1,), (7, 4), times=3, packed=True),
    Step(21, 2, times=3, evaluate=True),
    Step((2, 1), (4,), times=1),
    Step(8, 6),
)


def tree(
    generator: torch.Generator, rows: int, tokens: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the inputs of all stages by name, and a target."""
    ids, labels = torch.randint(VOCAB, (2, rows, tokens), generator=generator)
    more = torch.randn(2, rows, generator=generator)
    inputs = {
        "batch": {"ids": ids, "scale": 0.5, "pair": (more[0], None)},
        "mask": torch.rand(rows, tokens, generator=generator),
        "segments": None,
    }
    return inputs, {"labels": labels, "more": [more[1].abs(), "a word"]}


def given(step: Step, number: int, seed: int) -> tuple[dict[str, Any], list[tuple[Any, Any]]]:
    """Returns the arguments of a step, and the microbatches that they are."""
    generator = torch.Generator().manual_seed(seed)
    if isinstance(step.rows, int):
        assert isinstance(step.tokens, int)
        inputs, target = tree(generator, step.rows, step.tokens)
        own = {} if step.times == 2 else {"num_microbatches": number}
        return {"only": {**inputs, "target": target}, **own}, list(cut(inputs, target, number))
    assert isinstance(step.tokens, tuple)
    ready = []
    for m in range(number):
        rows, tokens = step.rows[m % len(step.rows)], step.tokens[m % len(step.tokens)]
        inputs, target = tree(generator, rows, tokens)
        if step.packed:
            inputs["segments"] = Segments([1, tokens - 1] if m % 2 else [2, tokens - 3, 1])
        ready.append((inputs, target))
    return {"microbatches": [{**inputs, "target": target} for inputs, target in ready]}, ready


def cut(
    inputs: dict[str, Any], target: dict[str, Any], number: int
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    def part(value: Any, m: int) -> Any:
        if isinstance(value, dict):
            return {name: part(inner, m) for name, inner in value.items()}
        if isinstance(value, tuple | list):
            return type(value)(part(inner, m) for inner in value)
        return value.tensor_split(number)[m] if isinstance(value, Tensor) else value

    for m in range(number):
        yield part(inputs, m), part(target, m)


def alone(modules: Sequence[nn.Module], inputs: dict[str, Any], target: dict[str, Any]) -> Tensor:
    """Returns the loss of a microbatch, in one process."""
    x: Any = modules[0](inputs["batch"])[0]
    for module in modules[1:-1]:
        x = module(x, inputs["mask"], inputs["segments"])["x"]
    return loss_of(modules[-1](x, inputs["mask"], inputs["segments"]).logits, target)


# Cases.


@dataclass(frozen=True)
class Case:
    """A schedule on some ranks."""

    schedule: str
    pipeline: int
    data: int = 1

    def __str__(self) -> str:
        return f"{self.schedule}, {self.pipeline} x {self.data} ranks"

    @property
    def num_ranks(self) -> int:
        return self.pipeline * self.data


CASES = [
    Case("interleaved-1f1b", 1),
    *(Case(name, 2) for name in ("gpipe", "1f1b", "zbv")),
    *(Case(name, 4) for name in ("eager-1f1b", "interleaved-1f1b", "zb-h1")),
    Case("1f1b", 2, data=2),
]
if everything():
    CASES += [
        Case("zbv", 1),
        *(Case(name, 2) for name in ("interleaved-1f1b", "zb-h1")),
        *(Case(name, 4) for name in ("gpipe", "zbv")),
    ]
MOST = rounding(2 * 24 * LONGEST)  # tokens of the largest batch, of two replicas


def step_of(number: int, replica: int, num_microbatches: int) -> Any:
    """Returns what a replica has of a step: more rows than the one before it."""
    step = STEPS[number]
    if isinstance(step.rows, int):
        step = replace(step, rows=step.rows + 3 * replica)
    return given(step, num_microbatches, 1000 * replica + number)


@once
def truth(num_stages: int, pipeline: int, data: int) -> tuple[Seen, list[Tensor]]:
    """Trains in one process; returns the losses of evaluations too."""
    modules, evaluated = built(num_stages), list[Tensor]()

    def loss_at(number: int) -> Tensor:
        num_microbatches = STEPS[number].times * pipeline
        total = torch.zeros(())
        for replica in range(data):
            options, parts = step_of(number, replica, num_microbatches)
            losses = torch.stack([alone(modules, *part) for part in parts])
            rows = torch.tensor([float(len(inputs["mask"])) for inputs, _ in parts])
            shares = torch.ones_like(rows) if "microbatches" in options else rows / rows.mean()
            total = total + (losses * shares).mean() / data
        return total

    def step(number: int, _: int) -> Tensor:
        loss = loss_at(number)
        if STEPS[number].evaluate:
            evaluated.append(loss.detach())
            return loss
        return backward(loss)

    whole = nn.ModuleList(modules)
    held = dict(whole.named_parameters(remove_duplicate=False))
    return train(step, lambda: held, steps=len(STEPS)), evaluated


@pytest.mark.parametrize("case", on_ranks(CASES))
@checked(Case("1f1b", 2))
def test_every_batch_has_the_loss_and_gradients_of_one_process(case: Case) -> None:
    at, default = topology(case.pipeline), 2 * case.pipeline
    places = schedules.build(
        case.schedule, num_ranks=case.pipeline, num_microbatches=default
    ).stage_to_rank
    modules, last = built(len(places)), len(places) - 1
    tie = ("0.weight", f"{last}.weight")
    if places[0] != places[-1]:  # else one rank has both
        modules[-1] = built(2)[-1]
    scheduler = Scheduler(
        [stage_of(modules[s], s) for s in at.with_stages(places).local_stages],
        at,
        schedule=case.schedule,
        num_microbatches=default,
        loss_fn=loss_of,
        tied=[{0: "weight", last: "weight"}],
    )
    stages = list(scheduler.steps.pipeline.stages)
    held = {f"{s.index}.{n}": p for s in stages for n, p in named([s]).items()}

    def step(number: int, _: int) -> Tensor:
        num_microbatches = STEPS[number].times * case.pipeline
        options, _parts = step_of(number, at.coordinate("dp"), num_microbatches)
        inputs = [options.pop("only")] if "only" in options else []
        take = scheduler.evaluate if STEPS[number].evaluate else scheduler.step
        return take(*inputs, **options).loss

    seen = train(step, lambda: held, sync=scheduler.sync, steps=len(STEPS))
    scheduler.close()
    true, evaluated = truth(len(places), case.pipeline, case.data)
    assert len(evaluated) == 2
    assert differences(seen, true, MOST) == {}
    assert set().union(*gathered({*held})) == {*true.parameters}
    for number, gradients in enumerate(seen.gradients):
        ends = {n: g for n, g in gradients.items() if n in tie}
        assert {*bits(ends, [tie])} == {tie[0]}
        assert not ends or STEPS[number].evaluate == (None in ends.values())
