"""Scheduler against one process: losses and gradients of the uncut model, under every schedule.

The selected cases of one number of ranks run in one spawn, and are asserted one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from torch import Tensor

from pipegrad import Scheduler, find_tied, schedules
from pipegrad.schedules import Schedule
from tests.support.pipeline.models import build
from tests.support.pipeline.pipelines import loss_of
from tests.support.pipeline.schedulers import (
    MOST,
    ROWS,
    Report,
    batch,
    compare,
    cut,
    digest,
    error,
    finder,
    greedy,
    most_buffers,
    named,
    run_each,
    share,
    topology,
    wrong,
)
from tests.support.worlds import smoked

SCHEDULES = (
    "gpipe",
    "1f1b",
    "eager-1f1b",
    "hop-aware-1f1b",
    "interleaved-1f1b",
    "zb-h1",
    "hop-aware-zb-h1",
    "zbv",
    "vee",
)
TIED = ("0.weight", "7.weight")


def vee(num_ranks: int, num_microbatches: int) -> Schedule:
    """Returns a schedule whose stages go there and back: the first rank holds the last one too."""
    return greedy([*range(num_ranks), *reversed(range(num_ranks))], num_microbatches, name="vee")


@dataclass(frozen=True)
class Case:
    """A way to train the tied model."""

    schedule: str
    pipeline: int
    num_microbatches: int
    data: int = 1
    handlers: tuple[str, ...] = ("pipeline-shared", "data-parallel")

    def __str__(self) -> str:
        ranks = (
            f"{self.pipeline} x {self.data} ranks" if self.data > 1 else f"{self.pipeline} ranks"
        )
        told = f"{self.schedule}, {ranks}, {self.num_microbatches} microbatches"
        return told if "noop" not in self.handlers else f"{told}, unsynced"

    @property
    def num_ranks(self) -> int:
        return self.pipeline * self.data

    @property
    def spec(self) -> Any:
        """What a user would write."""
        if self.schedule == "vee":
            return vee(self.pipeline, self.num_microbatches)
        if self.schedule == "zb-h1":
            return {"name": self.schedule, "head_w_first": self.num_microbatches % 2 == 0}
        if self.schedule.startswith("hop-aware"):
            hops = [0.6, 0.0, 1.2][: self.pipeline - 1]
            return {"name": self.schedule, "hop_seconds": hops, "compute_seconds": 1.0}
        return self.schedule

    @property
    def places(self) -> tuple[int, ...]:
        if isinstance(self.spec, Schedule):
            return self.spec.stage_to_rank
        generator = schedules.registry.resolve(self.spec)
        return schedules.generate(
            generator, num_ranks=self.pipeline, num_microbatches=self.num_microbatches
        ).stage_to_rank

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Returns tokens and targets, over all data ranks."""
        return batch(100 + step, ROWS * self.num_microbatches * self.data)


def cases(pipeline: int) -> Iterator[Case]:
    """Yields every schedule with every number of microbatches that it is defined for."""
    for schedule in SCHEDULES:
        for number in sorted({1, 2, pipeline, 2 * pipeline, 4 * pipeline + 1}):
            if schedule != "interleaved-1f1b" or number % pipeline == 0:
                yield Case(schedule, pipeline, number)


REPLICATED = [
    *(
        Case(schedule, 2, 4, data=2)
        for schedule in ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zbv", "vee")
    ),
    Case("1f1b", 2, 3, data=2),
    Case("1f1b", 1, 2, data=4),
]
UNSYNCED = Case("1f1b", 4, 4, handlers=("noop",))
CASES = [*cases(1), *cases(2), *cases(4), *REPLICATED]


def run_case(case: Case) -> Report:
    """Trains two steps, the first of which learns what values look like. Runs on every rank."""
    at, report = topology(case.pipeline), Report()
    model, true = build("tied"), build("tied")
    stages = cut(model, case.places, at)
    scheduler = Scheduler(
        stages,
        at,
        schedule=case.spec,
        num_microbatches=case.num_microbatches,
        loss_fn=loss_of,
        tied=find_tied(model),
        handlers=case.handlers,
    )
    for step in range(2):
        tokens, target = case.batch(step)
        loss = scheduler.step(share(tokens, at), target=share(target, at)).loss
        true_loss = loss_of(true(tokens), target)
        true_loss.backward()
        report.losses.append(loss.item())
        report.errors[f"step {step} loss"] = error(loss, true_loss.detach())
        mine = named(stages)
        report.bits.append({digest(mine[name].grad) for name in TIED if name in mine})
        compare(report.errors, step, mine, true)
        report.buffers.append(scheduler.receive_buffers)
    report.most_buffers = most_buffers(scheduler)
    scheduler.close()
    return report


def run_cases(names: list[str]) -> list[Report]:
    return run_each(run_case, [*CASES, UNSYNCED], names)


found = finder([*CASES, UNSYNCED], run_cases)
SMOKE = Case("1f1b", 2, 4, data=2)
every = pytest.mark.parametrize("case", smoked(CASES, SMOKE))


@every
def test_every_gradient_and_the_loss_are_those_of_one_process(case: Case) -> None:
    reports = found(case)

    parameters = dict(build("tied").named_parameters(remove_duplicate=False))
    names = {f"step {step} {name}" for step in range(2) for name in (*parameters, "loss")}
    assert {name for report in reports for name in report.errors} == names
    for at, report in enumerate(reports):
        assert wrong(report.errors, MOST) == {}, f"{case}, rank {at}"


@every
def test_the_loss_is_the_same_on_all_ranks(case: Case) -> None:
    losses = {tuple(report.losses) for report in found(case)}

    assert len(losses) == 1, case
    first, second = losses.pop()
    assert first != second, "a step that was not run again would not show"


@every
def test_tied_gradients_have_the_same_bits_wherever_they_are(case: Case) -> None:
    reports = found(case)

    same = (
        case.schedule in ("vee", "zbv") or case.pipeline == 1
    )  # rank of the first and of the last stage
    for step in range(2):
        holders = [at for at, report in enumerate(reports) if report.bits[step]]
        assert len(holders) == case.data * (1 if same else 2)
        digests = set().union(*(report.bits[step] for report in reports))
        assert len(digests) == 1, f"{case}, step {step}: they differ"
        assert digests != {"None"}


@every
def test_no_more_buffers_are_made_than_proven(case: Case) -> None:
    for at, report in enumerate(found(case)):
        assert report.buffers[-1] <= report.most_buffers, f"{case}, rank {at}"
        if case.pipeline > 1:
            assert report.buffers[-1] > 0


def test_without_a_handler_ties_are_wrong() -> None:
    """A control: these comparisons can fail."""
    reports = found(UNSYNCED)

    mistaken = {name for report in reports for name in wrong(report.errors, 0.01)}
    assert mistaken == {
        f"step {step} {name}" for step in range(2) for name in ("0.weight", "7.weight")
    }
    assert len(set().union(*(report.bits[1] for report in reports))) == 2
