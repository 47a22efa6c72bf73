"""Defects of a pipeline on real ranks are named, each with its cause and no other."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn

from pipegrad.audit import Report
from pipegrad.audit.script import Run
from tests.support.ranked import gathered

MICROBATCHES, ROWS = 3, 12  # as many as there are of nothing else
FILE = Path(__file__).parents[3] / "examples" / "audit_defects.py"


def audited(defect: str, monkeypatch: pytest.MonkeyPatch) -> Report:
    """Audits the example's right pipeline, 2 stages x 2 replicas, with a defect."""
    monkeypatch.syspath_prepend(FILE.parent)
    example: Any = importlib.import_module(FILE.stem)
    monkeypatch.setattr(example, "MICROBATCHES", MICROBATCHES)
    monkeypatch.setattr(example, "ROWS", ROWS)

    class Spoiled(example.Right):  # type: ignore[misc]
        def step(self, inputs: Tensor, target: Tensor) -> None:
            if defect == "stale":
                self.optimizer.zero_grad = bool
            super().step(inputs, target)

        def reduce(self) -> None:
            own = list(self.module.parameters())
            for _ in range(2 if defect == "tie twice" else 1):
                dist.all_reduce(self.tied.grad, group=self.pipeline)
            for parameter in own if defect != "replicas apart" else ():
                dist.all_reduce(parameter.grad, group=self.data)
            if defect == "missing" and self.stage == 0:
                self.module[1].zero_grad()

        def clip(self) -> None:
            copy = self.tied if self.is_last and defect != "copies in norm" else None
            gradients = [p.grad for p in self.module.parameters() if p is not copy]
            squares = nn.utils.get_total_norm([g for g in gradients if g is not None]) ** 2
            dist.all_reduce(squares, group=self.pipeline)
            norm = squares.sqrt()
            nn.utils.clip_grads_with_norm_(self.module.parameters(), example.MAX_NORM, norm)

    report: Report = example.audit(Spoiled(), microbatches=MICROBATCHES).run()
    return report


DEFECTS = {
    "replicas apart": "the gradient is not reduced over the 2 replicas",
    "tie twice": "the tie is reduced twice",
    "copies in norm": "the gradient norm counts each copy of a parameter that several ranks hold",
    "missing": "the gradient is missing",
    "stale": "the gradient is stale",
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("defect", DEFECTS)
def test_defects_are_named(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    report = audited(defect, monkeypatch)
    causes = [finding.cause for finding in report.findings]
    assert causes
    assert all(DEFECTS[defect] in cause for cause in causes), causes
    assert gathered(report.findings) == [report.findings] * 4


# The example's defects have the causes that docs/audit.md shows, and its right pipeline none.


EXAMPLES: dict[str, list[str]] = {
    "right": [],
    "times_tokens": ["the gradient is 103 times too large: it is multiplied by the number of targ"],
    "scaled_by_each_stage": [
        "the gradient is 4 times too small: it is divided by the number of microbatches",
    ],
    "last_microbatches": ["only the last 4 microbatches are in the gradient, of 8"],
    "tie_apart": ["the tie is not reduced"],
    "local_norm": ["the gradient norm is that of this rank's parameters alone"],
    "mean_of_means": ["the gradient is a mean of means"],
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", EXAMPLES)
def test_each_defect_has_its_cause_and_no_other(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FILE.parent)
    causes = [finding.cause for finding in Run(f"{FILE}:{name}").here().findings]
    assert len(causes) == len(EXAMPLES[name]), causes
    for cause, words in zip(causes, EXAMPLES[name], strict=True):
        assert cause.startswith(words)
