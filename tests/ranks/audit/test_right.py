"""Right pipelines of many kinds have no finding; what differs from one process beside gradients."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipegrad.audit import Report
from pipegrad.audit.script import Run
from tests.support.audit.pipelines import KINDS, OTHERS, Pipeline
from tests.support.versions import IS_OLD

pytestmark = pytest.mark.ranks(4)
SPLIT_BACKWARD = {"InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"}


def audited(name: str) -> Report:
    pipeline = Pipeline({**KINDS, **OTHERS}[name])
    report = pipeline.audit(steps=2).run()
    pipeline.close()
    return report


@pytest.mark.parametrize(
    "name", [name for name in KINDS if not (IS_OLD and name in SPLIT_BACKWARD)]
)
def test_a_right_pipeline_has_no_finding(name: str) -> None:
    report = audited(name)
    assert report.findings == ()
    assert report.gradients
    assert all(gradient.error <= gradient.allowed < 0.1 for gradient in report.gradients)
    # Parameters are compared after the optimizer.
    assert [note for note in report.notes if "optimizer" in note] == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        # torch's schedules learn shapes by a forward of their own, in training mode.
        ("BatchNorm from the first step", "the buffer differs after the step"),
        ("other dropout", "the module drops 0.5, and in the uncut model it drops nothing"),
        ("another buffer", "the buffer starts with other values than in the uncut model"),
        ("copies that drift", "copies of the parameter differ after the optimizer's step"),
        ("random numbers in a stage", "the step is not deterministic"),
        ("a learning rate of one rank", "copies of the parameter differ after the optimizer's"),
        ("weights that are scaled", "the optimizer's step is not that of one process"),
        ("a parameter that nobody steps", "no optimizer steps the parameter"),
        ("mean of means", "the gradient is a mean of means"),
        ("two steps of the optimizer", "the optimizer stepped 2 times in one step"),
    ],
)
def test_what_differs_is_named(name: str, words: str) -> None:
    [cause] = [finding.cause for finding in audited(name).findings]
    assert cause.startswith(words)


# The example's defects have the causes that docs/audit.md shows, and its right pipeline none.


FILE = Path(__file__).parents[3] / "examples" / "audit_defects.py"
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


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_defect_has_its_cause_and_no_other(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FILE.parent)
    causes = [finding.cause for finding in Run(f"{FILE}:{name}").here().findings]
    assert len(causes) == len(EXAMPLES[name]), causes
    for cause, words in zip(causes, EXAMPLES[name], strict=True):
        assert cause.startswith(words)
