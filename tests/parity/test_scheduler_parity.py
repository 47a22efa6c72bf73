"""Scheduler against one process: losses and gradients of the uncut model, under every schedule."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from pipegrad.schedules import Schedule
from tests.support.pairwise import pairwise
from tests.support.pipeline.models import build
from tests.support.pipeline.pipelines import loss_of
from tests.support.pipeline.schedulers import (
    MOST,
    ROWS,
    batch,
    error,
    greedy,
    share,
    topology,
)
from tests.support.pipeline.trained import (
    Seen,
    backward,
    bits,
    checked,
    differences,
    held_by,
    on_ranks,
    once,
    scheduled,
    train,
)
from tests.support.ranked import gathered
from tests.support.rounding import rounding

SCHEDULES = (
    "gpipe",
    "1f1b",
    "eager-1f1b",
    "hop-aware-1f1b",
    "interleaved-1f1b",
    "zb-h1",
    "hop-aware-zb-h1",
    "zbv",
    "v-half",
    "v-min",
    "vee",
)
TIED = ("0.weight", "7.weight")


@dataclass(frozen=True)
class Case:
    """A way to train the tied model."""

    schedule: str
    pipeline: int
    num_microbatches: int
    data: int = 1

    def __str__(self) -> str:
        ranks = f"{self.pipeline} x {self.data} ranks"
        return f"{self.schedule}, {ranks}, {self.num_microbatches} microbatches"

    @property
    def num_ranks(self) -> int:
        return self.pipeline * self.data

    @property
    def spec(self) -> Any:
        """What a user would write."""
        ranks = range(self.pipeline)
        if self.schedule == "vee":  # the first rank holds the last stage too
            return greedy([*ranks, *reversed(ranks)], self.num_microbatches, name="vee")
        if self.schedule == "zb-h1":
            return {"name": self.schedule, "head_w_first": self.num_microbatches % 2 == 0}
        if self.schedule.startswith("hop-aware"):
            hops = [0.6, 0.0, 1.2][: self.pipeline - 1]
            return {"name": self.schedule, "hop_seconds": hops, "compute_seconds": 1.0}
        return self.schedule


NUMBERS = {"1": (0, 1), "2": (0, 2), "2p": (2, 0), "4p + 1": (4, 1)}  # times ranks, and more


def case_of(schedule: str, pipeline: int, number: str, data: int) -> Case:
    times, more = NUMBERS[number]
    return Case(schedule, pipeline, times * pipeline + more, data)


def is_defined(schedule: str, pipeline: int, number: str, data: int) -> bool:
    num_microbatches = case_of(schedule, pipeline, number, data).num_microbatches
    is_whole = schedule != "interleaved-1f1b" or num_microbatches % pipeline == 0
    return is_whole and pipeline * data <= 4


CASES = list(
    dict.fromkeys(
        case_of(*row)
        for row in pairwise(SCHEDULES, (2, 4, 1), NUMBERS, (1, 2, 4), allowed=is_defined)
    )
)


def batch_of(rows: int, step: int) -> tuple[Tensor, Tensor]:
    return batch(100 + step, rows)


@once
def truth(rows: int) -> Seen:
    model = build("tied")

    def step(number: int, _: int) -> Tensor:
        tokens, target = batch_of(rows, number)
        return backward(loss_of(model(tokens), target))

    return train(step, lambda: dict(model.named_parameters(remove_duplicate=False)))


def seen_of(case: Case, **options: Any) -> tuple[Seen, Seen]:
    """Trains on ranks and in one process. The first step learns what values look like."""
    at, rows = topology(case.pipeline), ROWS * case.num_microbatches * case.data
    number = None if isinstance(case.spec, Schedule) else case.num_microbatches
    scheduler = scheduled(build("tied"), case.spec, at, number, **options)

    def step(number: int, _: int) -> Tensor:
        tokens, target = (share(whole, at) for whole in batch_of(rows, number))
        return scheduler.step(tokens, target=target).loss

    seen = train(step, functools.partial(held_by, scheduler), sync=scheduler.sync)
    scheduler.close()
    return seen, truth(rows)


@pytest.mark.parametrize("case", on_ranks(CASES))
@checked(*CASES[::12])
def test_losses_and_every_gradient_are_those_of_one_process(case: Case) -> None:
    seen, true = seen_of(case)

    assert differences(seen, true, MOST) == {}
    assert set().union(*gathered(set(seen.parameters))) == set(true.parameters)
    losses = {tuple(map(float, one)) for one in gathered(seen.losses)}
    assert len(losses) == 1, "they differ by rank"
    assert len(set(losses.pop())) == 2, "a step that was not run again would not show"
    # Whether a rank has the first stage and the last.
    has_both = case.schedule in ("vee", "zbv", "v-half", "v-min") or case.pipeline == 1
    for gradients in seen.gradients:
        tied = {name: gradients[name] for name in TIED if name in gradients}
        assert bits(tied, [TIED]) == {TIED[0]: case.data * (1 if has_both else 2)}
        assert None not in tied.values()


@pytest.mark.ranks(4)
def test_without_a_handler_ties_are_wrong() -> None:
    """A control: these comparisons can fail."""
    seen, true = seen_of(Case("1f1b", 4, 4), handlers=["noop"])

    mistaken = set().union(*gathered({*differences(seen, true, 0.01)}))
    assert mistaken == {f"step {step} {name}" for step in range(2) for name in TIED}
    mine = [gradient for name, gradient in seen.gradients[1].items() if name in TIED]
    one, other = (gradient for others in gathered(mine) for gradient in others)
    assert error(one, other) > 0.01


# Tolerances, of which a chosen one failed what was right on another processor.


def gradient(terms: int) -> tuple[Tensor, Tensor]:
    """Returns the two factors of a linear layer's gradient, a sum of so many terms."""
    generator = torch.Generator().manual_seed(terms)
    return torch.randn(16, terms, generator=generator), torch.randn(terms, 8, generator=generator)


@pytest.mark.parametrize("terms", [1, 10, 40, 160, 1024, 8192])
def test_sums_in_any_order_pass(terms: int) -> None:
    """One at a time is the worst order: no processor's registers are narrower."""
    left, right = gradient(terms)
    true = left.double() @ right.double()
    one_by_one = torch.zeros(16, 8)
    for column, row in zip(left.T, right, strict=True):
        one_by_one += column[:, None] * row
    backwards = left.flip(1) @ right.flip(0)
    parts = sum(a @ b for a, b in zip(left.chunk(7, 1), right.chunk(7), strict=True))

    for found in (one_by_one, backwards, left @ right, parts):
        assert isinstance(found, Tensor)
        assert error(found.double(), true) <= rounding(terms)
        assert error(found, one_by_one) <= rounding(terms)


def test_it_grows_with_terms_and_with_what_a_dtype_loses() -> None:
    assert rounding(400) == 20 * rounding(1)
    assert rounding(8192) < 1e-4  # what no tolerance lets pass
    assert rounding(1) == 8 * 2.0**-23
    assert rounding(1, dtype=torch.float64) == 8 * 2.0**-52
