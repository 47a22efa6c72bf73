"""Scheduler against one process: batches as a DataLoader gives them, another one in each step.

Trees, ragged rows, other lengths, ready and packed microbatches, other numbers of microbatches, and
evaluations in between. One process runs the same microbatches one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

from pipegrad import Scheduler, Stage, schedules
from tests.support.pipeline.schedulers import (
    Report,
    compare,
    digest,
    error,
    finder,
    named,
    run_each,
    topology,
    wrong,
)
from tests.support.rounding import rounding
from tests.support.worlds import smoked

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


class First(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, batch: dict[str, Any]) -> tuple[Tensor, None, int]:
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


class Last(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor, mask: Tensor, segments: Segments | None) -> Output:
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
    *(Case(name, 1) for name in ("interleaved-1f1b", "zbv")),
    *(Case(name, 2) for name in ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zbv")),
    *(Case(name, 4) for name in ("gpipe", "eager-1f1b", "interleaved-1f1b", "zb-h1", "zbv")),
    Case("1f1b", 2, data=2),
]


def run_case(case: Case) -> Report:
    """Takes all steps. Runs on every rank."""
    at, report, default = topology(case.pipeline), Report(), 2 * case.pipeline
    places = schedules.build(
        case.schedule, num_ranks=case.pipeline, num_microbatches=default
    ).stage_to_rank
    modules, true = built(len(places)), built(len(places))
    if places[0] != places[-1]:  # else one rank has both
        modules[-1] = built(2)[-1]
    stages = [stage_of(modules[s], s) for s in at.with_stages(places).local_stages]
    scheduler = Scheduler(
        stages,
        at,
        schedule=case.schedule,
        num_microbatches=default,
        loss_fn=loss_of,
        tied=[{0: "weight", len(places) - 1: "weight"}],
    )
    mine = {f"{s.index}.{n}": p for s in stages for n, p in named([s]).items()}
    replica = at.coordinate("dp")
    for number, step in enumerate(STEPS):
        num_microbatches = step.times * case.pipeline
        # Replicas have batches of their own size.
        steps = [step_of(step, other) for other in range(case.data)]
        seeds = [1000 * other + number for other in range(case.data)]
        options, _ = given(steps[replica], num_microbatches, seeds[replica])
        inputs = [options.pop("only")] if "only" in options else []
        take = scheduler.evaluate if step.evaluate else scheduler.step
        result = take(*inputs, **options)
        true_loss = torch.zeros(())
        for other, seed in zip(steps, seeds, strict=True):
            _, microbatches = given(other, num_microbatches, seed)
            for part, target in microbatches:
                loss = alone(true, part, target) / (num_microbatches * case.data)
                true_loss += loss.detach()
                if not step.evaluate:
                    loss.backward()
        report.errors[f"step {number} loss"] = error(result.loss, true_loss)
        if not step.evaluate:
            tied = [p for name, p in mine.items() if name.endswith(".weight") and p.dim() == 2]
            tied = [p for p in tied if p.shape == (VOCAB, WIDTH)]
            report.bits.append({digest(parameter.grad) for parameter in tied})
            compare(report.errors, number, mine, nn.ModuleList(true))
    scheduler.close()
    return report


def step_of(step: Step, replica: int) -> Step:
    """Returns what a replica has of a step: more rows than the one before it."""
    if isinstance(step.rows, int):
        return Step(step.rows + 3 * replica, step.tokens, step.times, evaluate=step.evaluate)
    return step


def run_cases(names: list[str]) -> list[Report]:
    return run_each(run_case, CASES, names)


MOST = rounding(2 * 24 * LONGEST)  # tokens of the largest batch, of two replicas
found = finder(CASES, run_cases)
every = pytest.mark.parametrize("case", smoked(CASES, Case("1f1b", 2)))


@every
def test_every_batch_has_the_loss_and_gradients_of_one_process(case: Case) -> None:
    reports = found(case)

    steps = {f"step {n} loss" for n in range(len(STEPS))}
    assert all(steps <= report.errors.keys() for report in reports)
    for at, report in enumerate(reports):
        assert wrong(report.errors, MOST) == {}, f"{case}, rank {at}"
    trained = {name.split()[1] for report in reports for name in report.errors} - {"loss"}
    assert trained == {f"{n}" for n in range(len(STEPS))}


@every
def test_tied_gradients_of_every_batch_have_the_same_bits(case: Case) -> None:
    reports = found(case)

    for step in range(sum(not step.evaluate for step in STEPS)):
        assert len(set().union(*(report.bits[step] for report in reports))) == 1, f"step {step}"
