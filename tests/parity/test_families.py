"""Families of transformers models, cut and trained, against one process that has the uncut model.

The selected cases of a way of cutting run in one spawn of four ranks: a pipeline of four, or two
replicas of a pipeline of two. ``-v`` prints a table at the end. ``PIPEGRAD_FAMILIES=all`` in the
environment runs every family with every schedule on 2 and on 4 ranks; else cuts into two and into
eight stages are left to some families.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipegrad
from pipegrad.errors import TopologyError
from pipegrad.testing import run_ranks
from tests.support.partition.families import FAMILIES, ROWS, TOKENS
from tests.support.partition.twins import difference
from tests.support.pipeline.schedulers import digest, run_each, share, topology
from tests.support.rounding import ADAM_EPS, rounding
from tests.support.worlds import World, smoked

pytest.importorskip("transformers")

STEPS = 5
# Losses and norms of transformers compute in float32, whatever the dtype of the model.
MOST = 1e-6
MICROBATCH = 2  # rows
WAYS = ("structural", "traced")
SCHEDULES = {"1f1b": 1, "eager-1f1b": 1, "interleaved-1f1b": 2, "zb-h1": 1, "zbv": 2}  # stages
# Which experts a token goes to depends on its values, and so would the graph.
REFUSED = {("Mixtral, expert by expert", "traced"): "cannot trace MixtralForCausalLM"}
# These compute nothing in float32.
EXACT = ("BERT", "BART", "Whisper", "ViT")
MOST_EXACT = rounding(ROWS * TOKENS, dtype=torch.float64)
VARIOUS = ("GPT-2", "Gemma3", "Mixtral", "T5")  # cut into any number of stages


@dataclass(frozen=True)
class Case:
    """A way to train a family."""

    family: str
    how: str
    schedule: str
    pipeline: int

    def __str__(self) -> str:
        return f"{self.family}, {self.how}, {self.schedule}, {self.pipeline} ranks"

    @property
    def num_stages(self) -> int:
        return self.pipeline * SCHEDULES[self.schedule]


ALL = [
    Case(family, how, schedule, pipeline)
    for family in FAMILIES
    for how in WAYS
    for schedule in SCHEDULES
    for pipeline in (2, 4)
]
CASES = [
    case
    for case in ALL
    if (case.family, case.how) not in REFUSED
    and (
        os.environ.get("PIPEGRAD_FAMILIES") == "all"
        or case.num_stages == 4
        or (case.family in VARIOUS and case.how == "structural")
    )
]


@dataclass
class Report:
    """What a rank found in a case. Errors are relative to the largest true value of the kind.

    Attributes:
        losses: Error of the loss of each step.
        gradients: Error of each gradient of the first step, by name.
        parameters: Error of each parameter after all steps, by name.
        bits: Digest of each parameter after all steps, by name.
        tied: What the cut says is tied.
    """

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, float] = field(default_factory=dict)
    parameters: dict[str, float] = field(default_factory=dict)
    bits: dict[str, str] = field(default_factory=dict)
    tied: list[list[str]] = field(default_factory=list)


@dataclass
class Truth:
    """What one process finds, which trains the uncut model on whole batches."""

    losses: list[Tensor]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


def batch(family: str, step: int) -> dict[str, Tensor]:
    return FAMILIES[family].batch(100 + step)


@functools.cache
def truth(family: str) -> Truth:
    """Trains the uncut model."""
    model, true = FAMILIES[family].build(), Truth([], {}, {})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=ADAM_EPS)
    named = dict(model.named_parameters(remove_duplicate=False))
    for step in range(STEPS):
        loss = model(**batch(family, step)).loss
        loss.backward()
        true.losses.append(loss.detach())
        if step == 0:
            true.gradients = {n: p.grad for n, p in named.items() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    true.parameters = {name: parameter.detach() for name, parameter in named.items()}
    return true


@functools.cache
def cut(family: str, how: str, num_stages: int) -> tuple[nn.Module, Mapping[str, Tensor], Any]:
    """Returns an uncut model, what it starts with, and its cut, which many schedules run."""
    model = FAMILIES[family].build()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    options: dict[str, Any] = {"how": how}
    if how == "traced":
        options["example"] = {n: x[:MICROBATCH] for n, x in batch(family, 0).items()}
    return model, start, pipegrad.cut(model, num_stages, **options)


def errors(found: Mapping[str, Tensor | None], true: Mapping[str, Tensor]) -> dict[str, float]:
    """Returns the error of each tensor, relative to the largest true value of all."""
    largest = max(value.abs().max().item() for value in true.values())
    return {name: difference(x, true.get(name)) / largest for name, x in found.items()}


def run_case(case: Case) -> Report:
    """Trains the cut model. Runs on every rank."""
    at, true = topology(case.pipeline), truth(case.family)
    model, start, parts = cut(case.family, case.how, case.num_stages)
    model.load_state_dict(start)
    number = ROWS // MICROBATCH // at.size("dp")
    scheduler = pipegrad.Scheduler(parts, at, schedule=case.schedule, num_microbatches=number)
    optimizer = scheduler.optimizer(torch.optim.AdamW, lr=1e-3, eps=ADAM_EPS)
    held = {
        name: parameter
        for stage in scheduler.topology.local_stages
        for name, parameter in parts.modules[stage].named_parameters(remove_duplicate=False)
    }
    report = Report(tied=parts.tied)
    for step in range(STEPS):
        whole = batch(case.family, step).items()
        given: dict[str, Any] = {name: share(value, at) for name, value in whole}
        loss, expected = scheduler.step(**given).loss, true.losses[step]
        report.losses.append(((loss - expected).abs() / expected.abs()).item())
        if step == 0:
            gradients = {name: parameter.grad for name, parameter in held.items()}
            report.gradients = errors(gradients, true.gradients)
        optimizer.step()
        optimizer.zero_grad()
    report.parameters = errors({n: p.detach() for n, p in held.items()}, true.parameters)
    report.bits = {name: digest(parameter) for name, parameter in held.items()}
    scheduler.close()
    return report


def run_cases(names: list[str]) -> list[Report]:
    cases: Any = CASES
    reports: Any = run_each(run_case, cases, names)  # type: ignore[arg-type]  # its own Report
    return reports  # type: ignore[no-any-return]


def spawn(cases: Sequence[Case]) -> list[list[Report]]:
    ranks = run_ranks(run_cases, 4, [str(case) for case in cases], timeout_seconds=580.0)
    return [list(reports) for reports in zip(*ranks, strict=True)]


worlds = {how: World([case for case in CASES if case.how == how], spawn) for how in WAYS}
SMOKE = Case("T5", "structural", "1f1b", 4)
every = pytest.mark.parametrize("case", smoked(CASES, SMOKE))
_table = dict[Case, str]()


@pytest.fixture(scope="module", autouse=True)
def table(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    plugins = request.config.pluginmanager
    if request.config.option.verbose > 0:
        reporter: Any = plugins.get_plugin("terminalreporter")
        capture: Any = plugins.get_plugin("capturemanager")
        with capture.global_and_fixture_disabled():
            reporter.write_line("")
            for case, words in _table.items():
                reporter.write_line(f"{case!s:55}{words}")


@every
def test_losses_gradients_and_trained_parameters_are_those_of_one_process(case: Case) -> None:
    reports = worlds[case.how][case]
    loss = max(max(report.losses) for report in reports)
    gradient = max(max(report.gradients.values()) for report in reports)
    parameter = max(max(report.parameters.values()) for report in reports)
    _table[case] = f"loss {loss:.1e}  gradients {gradient:.1e}  parameters {parameter:.1e}"
    most = MOST_EXACT if case.family in EXACT else MOST
    assert loss <= MOST
    assert gradient <= most
    # Each step adds its own error, which AdamW scales with 1e-3 / ADAM_EPS.
    assert parameter <= STEPS * most


@every
def test_every_parameter_is_held_somewhere(case: Case) -> None:
    names = set(truth(case.family).parameters)  # also frozen ones, such as Whisper's positions
    assert set().union(*(report.parameters for report in worlds[case.how][case])) == names


@every
def test_ties_and_replicas_have_the_same_bits(case: Case) -> None:
    reports = worlds[case.how][case]
    first = {name: tie[0] for tie in reports[0].tied for name in tie}
    bits = dict[str, set[str]]()
    for report in reports:
        for name, found_bits in report.bits.items():
            bits.setdefault(first.get(name, name), set()).add(found_bits)
    assert [name for name, digests in bits.items() if len(digests) > 1] == []


@pytest.mark.parametrize(("family", "how"), REFUSED)
def test_what_cannot_be_is_refused_in_words(family: str, how: str) -> None:
    example = {name: value[:MICROBATCH] for name, value in batch(family, 0).items()}
    with pytest.raises(TopologyError, match=REFUSED[family, how]):
        pipegrad.cut(FAMILIES[family].build(), 2, how=how, example=example)
