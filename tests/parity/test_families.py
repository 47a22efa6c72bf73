"""Families of transformers models, cut and trained, against one process that has the uncut model.

The selected cases run in one spawn of four ranks: a pipeline of four, or two replicas of a pipeline
of two. ``FAMILIES_TABLE=FILE pytest ...`` writes what was found as a table.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipegrad
from pipegrad.testing import run_ranks
from tests.support.partition.families import FAMILIES
from tests.support.pipeline.schedulers import digest, error, run_each, share, topology
from tests.support.rounding import ADAM_EPS
from tests.support.worlds import World, smoked

STEPS = 5
WAYS = ("structural",)
SCHEDULES = {"1f1b": 1, "eager-1f1b": 1, "interleaved-1f1b": 2, "zb-h1": 1, "zbv": 2}  # stages


@dataclass(frozen=True)
class Case:
    """A way to train a family."""

    family: str
    how: str
    schedule: str
    pipeline: int

    def __str__(self) -> str:
        return f"{self.family}, {self.how}, {self.schedule}, {self.pipeline} ranks"


CASES = [
    Case(family, how, schedule, pipeline)
    for family in FAMILIES
    for how in WAYS
    for schedule in SCHEDULES
    for pipeline in (2, 4)
]


@dataclass
class Report:
    """What a rank found in a case.

    Attributes:
        losses: Errors of the loss, by step.
        gradients: Errors of all gradients of the first step, by name.
        parameters: Errors of all parameters after all steps, by name.
        bits: Digest of each parameter after all steps, by name.
    """

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, float] = field(default_factory=dict)
    parameters: dict[str, float] = field(default_factory=dict)
    bits: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass
class Truth:
    """What one process finds, which trains the uncut model on whole batches."""

    losses: list[Tensor]
    gradients: dict[str, Tensor | None]
    model: nn.Module


@functools.cache
def truth(family: str) -> Truth:
    """Trains the uncut model."""
    model, true = FAMILIES[family].build(), Truth([], {}, nn.Module())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=ADAM_EPS)
    for step in range(STEPS):
        loss = model(**batch(family, step)).loss
        loss.backward()
        true.losses.append(loss.detach())
        if step == 0:
            true.gradients = {n: p.grad for n, p in model.named_parameters(remove_duplicate=False)}
        optimizer.step()
        optimizer.zero_grad()
    true.model = model
    return true


def batch(family: str, step: int) -> dict[str, Tensor]:
    """Returns the batch of a step: lengths change where a family takes that."""

    return FAMILIES[family].batch(100 + step)


@functools.cache
def cut(family: str, how: str, num_stages: int) -> tuple[nn.Module, dict[str, Tensor], Any]:
    """Returns an uncut model, its values at the start, and its cut: schedules share it."""
    model = FAMILIES[family].build()
    start = {name: x.clone() for name, x in model.state_dict().items()}
    return model, start, pipegrad.cut(model, num_stages, how=how)


def run_case(case: Case) -> Report:
    """Trains the cut model. Runs on every rank."""
    import time
    t=time.time()
    at, report, true = topology(case.pipeline), Report(), truth(case.family)
    model, start, parts = cut(
        case.family, case.how, case.pipeline * SCHEDULES[case.schedule]
    )
    model.load_state_dict(start)
    scheduler = pipegrad.Scheduler(parts, at, schedule=case.schedule, num_microbatches=4 // at.size("dp"))
    optimizer = scheduler.optimizer(torch.optim.AdamW, lr=1e-3, eps=ADAM_EPS)
    held = {
        name: parameter
        for stage in scheduler.topology.local_stages
        for name, parameter in parts.modules[stage].named_parameters(remove_duplicate=False)
    }
    for step in range(STEPS):
        given = {name: share(x, at) for name, x in batch(case.family, step).items()}
        loss = scheduler.step(**given).loss
        report.losses.append(error(loss, true.losses[step].float()))
        if step == 0:
            largest = max(float(g.abs().max()) for g in true.gradients.values() if g is not None)
            report.gradients = {
                name: error(p.grad, true.gradients[name], lenient=True) for name, p in held.items()
            }
        optimizer.step()
        optimizer.zero_grad()
    report.parameters = {name: error(p, true.model.get_parameter(name)) for name, p in held.items()}
    report.bits = {name: digest(p) for name, p in held.items()}
    scheduler.close()
    report.seconds=time.time()-t
    return report


def run_cases(names: list[str]) -> list[Report]:
    return run_each(run_case, CASES, names)


def spawn(cases: Sequence[Case]) -> list[list[Report]]:
    ranks = run_ranks(run_cases, 4, [str(case) for case in cases], timeout_seconds=1800.0)
    return [list(reports) for reports in zip(*ranks, strict=True)]


found = World(CASES, spawn)
SMOKE = Case("Llama 3.2", "structural", "1f1b", 4)
every = pytest.mark.parametrize("case", smoked(CASES, SMOKE))

@every
def test_all(case: Case) -> None:
    reports = found[case]
    print(f"{case!s:50} loss {max(max(r.losses) for r in reports):.1e} grad {max(max(r.gradients.values()) for r in reports):.1e} par {max(max(r.parameters.values()) for r in reports):.1e} {reports[0].seconds:.2f}")
