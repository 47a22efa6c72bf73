"""Losses of stages, weights and metrics against one process, under schedules and placements.

With ``token_mean`` one process calls cross_entropy with ignore_index once, over the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from pipegrad import Scheduler
from tests.support.pipeline.losses import LEARNING_RATE, MOST, TIED, Case, Truth, build, truth
from tests.support.pipeline.schedulers import (
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

SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1")
PLACEMENTS = ("replicate", "sharded", "owner", "owner+sharded")
SMOKE = Case("1f1b", mesh="2x1")
CASES = [
    *(
        Case(schedule, handlers, recompute=(s + h) % 2 == 1)
        for s, schedule in enumerate(SCHEDULES)
        for h, handlers in enumerate(PLACEMENTS)
    ),
    *(Case(s, loss_reduction="mean", recompute=n % 2 == 0) for n, s in enumerate(SCHEDULES)),
    *(Case(s, mesh="4x1") for s in SCHEDULES if s != "interleaved-1f1b"),  # it has eight stages
    *(Case(s, mesh="4x1", loss_reduction="mean") for s in ("1f1b", "zb-h1")),
    Case("1f1b", "sharded", mesh="1x4"),
    Case("zb-h1", "owner", mesh="2x1", loss_reduction="mean", recompute=True),
    SMOKE,
]
STEPS = 3  # the first one learns the names of the metrics, and the last one accumulates two batches


@dataclass
class Report:
    """What one rank found in a case.

    Attributes:
        errors: By step and name.
        results: The loss and the metrics of each step, and of the evaluation.
        bits: For each step digests of the tied weights, after the optimizer.
    """

    errors: dict[str, float] = field(default_factory=dict)
    results: list[tuple[float, ...]] = field(default_factory=list)
    bits: list[set[str]] = field(default_factory=list)

    def compare(self, what: str, result: Any, true: Truth, outputs: torch.Tensor) -> None:
        """Adds the errors of a result."""
        self.errors[f"{what} loss"] = error(result.loss, true.loss.detach())
        assert result.metrics.keys() == true.metrics.keys()
        for name, value in result.metrics.items():
            true_value = true.metrics[name]
            self.errors[f"{what} {name}"] = abs(value - true_value) / (abs(true_value) or 1.0)
        for found in result.outputs:
            self.errors[f"{what} outputs"] = error(found, outputs)
        self.results.append((result.loss.item(), *result.metrics.values()))


def compare_gradients(
    report: Report, step: int, scheduler: Scheduler, gradients: Mapping[str, torch.Tensor]
) -> None:
    """Adds the errors of what this rank's optimizer steps: parameters, or shards of them."""
    for main in scheduler.sync.main_parameters():
        name, gradient = main.record.name, main.tensor.grad
        true = gradients[name]
        if main.sharded and gradient is not None:
            largest = true.abs().max()
            part = true.flatten()[main.begin : main.begin + main.tensor.numel()]
            difference = (gradient - part).abs()
            found = (difference.max() / largest).item() if len(part) else 0.0
        else:
            found = error(gradient, true)
        report.errors[f"step {step} {name} from {main.begin}"] = found


def run_case(case: Case) -> Report:
    """Trains and evaluates. Runs on every rank."""
    report, at, true = Report(), topology(case.pipeline), build()
    scheduler = case.scheduler(build())
    sync, last = scheduler.sync, at.size("pp") - 1
    optimizer = torch.optim.SGD(sync.optimizer_parameters(), lr=LEARNING_RATE)
    true_optimizer = torch.optim.SGD(true.parameters(), lr=LEARNING_RATE)
    for step in range(STEPS):
        # A step that accumulates over two batches: with weights it is one batch of both.
        parts = (10, 11) if step == STEPS - 1 else (step,)
        if case.is_weighted:
            truth(case, true, *parts).loss.backward()
        for part in parts:
            with sync.accumulate() if part == 10 else nullcontext():
                result = case.step(scheduler, part)
            found = truth(case, true, part)
            report.compare(f"step {part}", result, found, share(found.outputs, at))
            if not case.is_weighted:
                found.loss.backward()
        gradients = dict(true.named_parameters(remove_duplicate=False))
        compare_gradients(report, step, scheduler, {n: p.grad for n, p in gradients.items()})  # type: ignore[misc]
        for each in (optimizer, true_optimizer):
            each.step()
            each.zero_grad()
        sync.wait_parameters()
        mine = named(list(scheduler._stages.values()))
        report.bits.append({digest(mine[n]) for n in TIED[0] if n in mine})
    result = case.step(scheduler, 20, evaluates=True)
    with torch.no_grad():
        found = truth(case, true, 20)
    report.compare("evaluation", result, found, share(found.outputs, at))
    assert bool(result.outputs) == (at.coordinate("pp") == last)
    sync.check_replicas()
    scheduler.close()
    return report


def run_cases(names: list[str]) -> Any:
    return run_each(run_case, CASES, names)  # type: ignore[arg-type]


found = finder(CASES, run_cases)
every = pytest.mark.parametrize("case", smoked(CASES, SMOKE))


@every
def test_loss_metrics_and_gradients_are_those_of_one_process(case: Case) -> None:
    reports: Any = found(case)

    for at, report in enumerate(reports):
        assert wrong(report.errors, MOST) == {}, f"{case}, rank {at}"
    names = {name for report in reports for name in report.errors}
    parameters = dict(build().named_parameters(remove_duplicate=False))
    for step in range(STEPS):
        for name in parameters:
            # Of two tied names the main parameter has the first.
            wanted = f"step {step} {TIED[0][0] if name in TIED[0] else name} from "
            assert any(found.startswith(wanted) for found in names), wanted
    assert {"evaluation outputs", "step 0 outputs", "step 11 balance"} <= names


@every
def test_the_loss_and_the_metrics_are_the_same_on_all_ranks(case: Case) -> None:
    reports: Any = found(case)

    results = {tuple(report.results) for report in reports}
    assert len(results) == 1, case
    assert len(set(results.pop())) == STEPS + 2, "a step that was not run again would not show"


@every
def test_tied_weights_have_the_same_bits_after_the_optimizer(case: Case) -> None:
    reports: Any = found(case)

    for step in range(STEPS):
        digests = set().union(*(report.bits[step] for report in reports))
        assert len(digests) == 1, f"{case}, step {step}: they differ"
