"""The example's defects have the causes that docs/audit.md shows, and its right pipeline none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pipegrad.audit import Report
from pipegrad.audit.script import Run
from pipegrad.testing import run_ranks

FILE = Path(__file__).parents[3] / "examples" / "audit_defects.py"
DEFECTS = {
    "right": [],
    "times_tokens": ["the gradient is 103 times too large: it is multiplied by the number of targ"],
    "scaled_by_each_stage": [
        "uses of the tied parameter count differently in its gradient: [0.25, 1.0] times",
        "the gradient is 4 times too small: it is divided by the number of microbatches",
    ],
    "last_microbatches": ["only the last 4 microbatches are in the gradient, of 8"],
    "tie_apart": ["the tie is not reduced"],
    "local_norm": ["the gradient norm is that of this rank's parameters alone"],
    "mean_of_means": ["the gradient is a mean of means"],
}


def audited() -> dict[str, Report]:
    sys.path.insert(0, str(FILE.parent))
    return {name: Run(f"{FILE}:{name}").here() for name in DEFECTS}


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    return run_ranks(audited, 4)[0]


@pytest.mark.parametrize("name", DEFECTS)
def test_each_defect_has_its_cause_and_no_other(reports: dict[str, Report], name: str) -> None:
    causes = [finding.cause for finding in reports[name].findings]
    assert len(causes) == len(DEFECTS[name]), causes
    for cause, words in zip(causes, DEFECTS[name], strict=True):
        assert cause.startswith(words)
