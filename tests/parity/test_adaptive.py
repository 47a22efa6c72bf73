"""Steps whose schedule changes between them, against one process: tied, and over replicas."""

from __future__ import annotations

from dataclasses import dataclass
from unittest import mock

import pytest

from pipegrad import Scheduler, find_tied
from pipegrad.pipeline.step_times import Layout
from pipegrad.schedules.measured import Times
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
    named,
    run_each,
    share,
    topology,
    wrong,
)
from tests.support.worlds import smoked

TIED = ("0.weight", "7.weight")
STEPS, MICROBATCHES = 7, 8
HOPS = (0.0, 1.5, 1.5, 0.0, 3.0)
LIMIT = 8  # of activations


@dataclass(frozen=True)
class Case:
    """A way to train the tied model."""

    pipeline: int
    data: int = 1
    schedule: str = "adaptive-1f1b"

    def __str__(self) -> str:
        return f"{self.schedule}, {self.pipeline} x {self.data} ranks"

    @property
    def hops(self) -> tuple[float, ...]:
        """Of the steps that are read: of every hop."""
        return HOPS if self.schedule == "adaptive-1f1b" else (1.0,)

    @property
    def num_ranks(self) -> int:
        return self.pipeline * self.data


CASES = [
    Case(2, 2),
    Case(4),
    Case(2, 2, "hop-aware-zb-h1"),
    Case(4, 1, "hop-aware-zb-h1"),
]


def run_case(case: Case) -> Report:
    """Trains steps whose times are told, so that the warm-up changes in four of them."""
    at, report = topology(case.pipeline), Report()
    model, true = build("tied"), build("tied")
    stages = cut(model, tuple(range(case.pipeline)), at)
    scheduler = Scheduler(
        stages,
        at,
        schedule={"name": case.schedule, "max_live_activations": LIMIT},
        num_microbatches=MICROBATCHES,
        loss_fn=loss_of,
        tied=find_tied(model),
        handlers=["pipeline-shared", "data-parallel"],
    )
    once = (1.0,) * case.pipeline
    told = [
        Times(once, tuple(2 * t for t in once), (c,) * (case.pipeline - 1), once) for c in case.hops
    ]
    warm_ups = list[int]()
    with mock.patch.object(Layout, "times", side_effect=told):
        for step in range(STEPS):
            tokens, target = batch(100 + step, ROWS * MICROBATCHES * case.data)
            loss = scheduler.step(share(tokens, at), target=share(target, at)).loss
            true_loss = loss_of(true(tokens), target)
            true_loss.backward()
            report.errors[f"step {step} loss"] = error(loss, true_loss.detach())
            mine = named(stages)
            report.bits.append({digest(mine[name].grad) for name in TIED if name in mine})
            compare(report.errors, step, mine, true)
            warm_ups.append([a.kind in "BI" for a in scheduler.schedule.actions[0]].index(True))
    report.losses = [float(w) for w in warm_ups]
    scheduler.close()
    return report


def run_cases(names: list[str]) -> list[Report]:
    return run_each(run_case, CASES, names)


found = finder(CASES, run_cases)
every = pytest.mark.parametrize("case", smoked(CASES, CASES[0]))


@every
def test_every_gradient_is_that_of_one_process_whatever_the_warm_up(case: Case) -> None:
    reports = found(case)

    assert {f"step {step} loss" for step in range(STEPS)} <= {*reports[0].errors}
    for at, report in enumerate(reports):
        assert wrong(report.errors, MOST) == {}, f"{case}, rank {at}"


@every
def test_the_warm_up_changed_alike_on_all_ranks(case: Case) -> None:
    p = case.pipeline
    most = min(LIMIT, 3 * p - 2)
    expected = [p, p, p, 2 * p - 1, 2 * p - 1, p, most]
    if case.schedule == "hop-aware-zb-h1":  # it is made anew once
        expected = [p, p, *[2 * p - 1] * 5]
    assert {tuple(report.losses) for report in found(case)} == {tuple(map(float, expected))}


@every
def test_tied_gradients_have_the_same_bits_wherever_they_are(case: Case) -> None:
    for step in range(STEPS):
        digests = set[str]().union(*(report.bits[step] for report in found(case)))
        assert len(digests) == 1, f"{case}, step {step}"
