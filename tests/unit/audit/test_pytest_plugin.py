"""Audits are tests of pytest, by a fixture."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipegrad.audit.report import Finding, Report
from pipegrad.audit.script import Run
from pipegrad.errors import ConfigError
from pipegrad_pytest import _checked

pytest_plugins = ["pytester"]

RIGHT = Report((), (), (), num_steps=2, num_ranks=4, seconds=1.0)
WRONG = Report((Finding("the gradient is stale", "call zero_grad"),), (), (), 2, 4, 1.0)
PLUGIN = "-p", "pipegrad_pytest"


class Ranks:
    """Stands for ranks: their report, or their error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.result: Report | Exception = RIGHT
        self.started: list[tuple[Run, int]] = []
        ranks = self

        def in_ranks(run: Run, num_ranks: int) -> Report:
            ranks.started.append((run, num_ranks))
            if isinstance(ranks.result, Exception):
                raise ranks.result
            return ranks.result

        monkeypatch.setattr(Run, "in_ranks", in_ranks)


@pytest.fixture(autouse=True)
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    # Otherwise an installed pipegrad is a second plugin.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    return Ranks(monkeypatch)


def run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return pytester.runpytest_inprocess(*PLUGIN, "-rA", *arguments)


FIXTURE = """
def test_it(audit_pipeline):
    report = audit_pipeline('a.py:one', ranks=2, steps=3, tolerance=0.5)
    assert report.num_steps == 2
"""
CAUSE = ["wrong, 1 cause*", "1. step 1: the gradient is stale"]


@pytest.mark.parametrize(
    ("outcome", "lines", "has_traceback"),
    [
        (WRONG, CAUSE, False),
        (ConfigError("a.py has no function 'one'"), ["a.py has no function 'one'"], False),
        (ZeroDivisionError("strange"), ["*ZeroDivisionError: strange*"], True),
    ],
)
def test_an_audit_that_finds_something_or_cannot_be_run_fails_with_what_it_says(
    pytester: pytest.Pytester,
    ranks: Ranks,
    outcome: Report | Exception,
    lines: list[str],
    has_traceback: bool,
) -> None:
    ranks.result = outcome
    pytester.makepyfile(FIXTURE)
    result = run(pytester)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(lines)
    assert ("pipegrad_pytest/__init__.py:" in result.stdout.str()) == has_traceback
    assert has_traceback or "Traceback" not in result.stdout.str()


def test_the_fixture_returns_the_report_or_fails_with_it(
    pytester: pytest.Pytester, ranks: Ranks
) -> None:
    pytester.makepyfile(FIXTURE)
    run(pytester).assert_outcomes(passed=1)
    assert ranks.started == [(Run("a.py:one", 3, 0.5), 2)]
    ranks.result = WRONG
    result = run(pytester)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(CAUSE)


def test_a_pipeline_is_audited_on_four_ranks_unless_more_are_wanted(ranks: Ranks) -> None:
    assert _checked("a.py:one") is RIGHT
    assert _checked("a.py:one", 6) is RIGHT
    assert ranks.started == [(Run("a.py:one"), 4), (Run("a.py:one"), 6)]


SCRIPT = """
import torch
from torch import nn
from pipegrad.audit import Audit

def audited(factor=1.0):
    torch.manual_seed(0)
    module, model = nn.Linear(3, 1), nn.Linear(3, 1)
    model.load_state_dict(module.state_dict())
    loss_fn = nn.MSELoss()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def step(inputs, target):
        optimizer.zero_grad()
        for x, y in zip(inputs.chunk(2), target.chunk(2)):
            (factor * loss_fn(module(x), y) / 2).backward()
        optimizer.step()

    batch = torch.randn(8, 3), torch.randn(8, 1)
    return Audit(step=step, modules=module, model=model, loss_fn=loss_fn, batches=[batch],
                 microbatches=2)

def twice():
    return audited(2.0)
"""


TESTS = """
import pytest

@pytest.mark.parametrize("name", ["audited", "twice"])
def test_it(audit_pipeline, name):
    audit_pipeline(f"somebodys.py:{name}", 1)
"""


def test_audits_run_in_ranks_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "somebodys.py").write_text(SCRIPT)
    (tmp_path / "test_it.py").write_text(TESTS)
    options = ["-rA", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *PLUGIN, *options],
        cwd=tmp_path, env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 1, result.stdout + result.stderr
    assert "PASSED test_it.py::test_it[audited]\n" in result.stdout
    assert "FAILED test_it.py::test_it[twice] - Failed: wrong, 1 cause" in result.stdout
    assert "the gradient is 2 times too large" in result.stdout
