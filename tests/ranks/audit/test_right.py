"""Right pipelines of many kinds have no finding; what differs from one process beside gradients."""

from __future__ import annotations

import pytest

from pipegrad.audit import Report
from tests.support.audit.pipelines import KINDS, OTHERS, Pipeline
from tests.support.versions import IS_OLD

SPLIT_BACKWARD = {"InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"}


def audited(name: str) -> Report:
    pipeline = Pipeline({**KINDS, **OTHERS}[name])
    report = pipeline.audit(steps=2).run()
    pipeline.close()
    return report


@pytest.mark.ranks(4)
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


@pytest.mark.ranks(4)
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
