"""The example's defects have the causes that docs/audit.md shows, and its right pipeline none."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipegrad.audit.script import Run

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


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", DEFECTS)
def test_each_defect_has_its_cause_and_no_other(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FILE.parent)
    causes = [finding.cause for finding in Run(f"{FILE}:{name}").here().findings]
    assert len(causes) == len(DEFECTS[name]), causes
    for cause, words in zip(causes, DEFECTS[name], strict=True):
        assert cause.startswith(words)
