"""Right pipelines of many kinds have no finding; what differs from one process beside gradients."""

from __future__ import annotations

import pytest

from pipegrad.audit import Report
from pipegrad.testing import run_ranks
from tests.support.audit.pipelines import KINDS, OTHERS, Pipeline
from tests.support.versions import IS_OLD

SPLIT_BACKWARD = {"InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"}
ASKED = [name for name in KINDS if not (IS_OLD and name in SPLIT_BACKWARD)]


def audited(names: list[str]) -> list[Report]:
    found = []
    for name in names:
        pipeline = Pipeline({**KINDS, **OTHERS}[name])
        try:
            found.append(pipeline.audit(steps=2).run())
        finally:
            pipeline.close()
    return found


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    names = [*ASKED, *OTHERS]
    return dict(zip(names, run_ranks(audited, 4, names)[0], strict=True))


@pytest.mark.parametrize("name", ASKED)
def test_a_right_pipeline_has_no_finding(reports: dict[str, Report], name: str) -> None:
    report = reports[name]
    assert report.findings == ()
    assert report.gradients
    assert all(gradient.error <= gradient.allowed < 0.1 for gradient in report.gradients)


def test_parameters_are_compared_after_the_optimizer(reports: dict[str, Report]) -> None:
    notes = [note for name in ASKED for note in reports[name].notes if "optimizer" in note]
    assert notes == []


def causes(report: Report) -> list[str]:
    return [finding.cause for finding in report.findings]


def test_a_forward_too_many_shows_in_buffers(reports: dict[str, Report]) -> None:
    """torch's schedules learn shapes by a forward of their own, in training mode."""
    [cause] = causes(reports["BatchNorm from the first step"])
    assert cause.startswith("the buffer differs after the step")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("other dropout", ["the module drops 0.5, and in the uncut model it drops nothing"]),
        ("another buffer", ["the buffer starts with other values than in the uncut model"]),
        ("copies that drift", ["copies of the parameter differ after the optimizer's step"]),
        ("random numbers in a stage", ["the step is not deterministic"]),
        ("a learning rate of one rank", ["copies of the parameter differ after the optimizer's"]),
        ("weights that are scaled", ["the optimizer's step is not that of one process"]),
        ("a parameter that nobody steps", ["no optimizer steps the parameter"]),
        ("mean of means", ["the gradient is a mean of means"]),
        ("two steps of the optimizer", ["the optimizer stepped 2 times in one step"]),
    ],
)
def test_what_differs_is_named(reports: dict[str, Report], name: str, words: list[str]) -> None:
    found = causes(reports[name])
    assert len(found) == len(words), found
    assert all(cause.startswith(word) for cause, word in zip(found, words, strict=True)), found
