"""Defects of Megatron-LM#7452, beside tensor, context and expert parallelism: found or missed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pipegrad.errors import AgreementError
from tests.support.audit.axes import (
    Beside,
    ContextParallel,
    SequenceParallel,
    TensorParallel,
    TwoTokens,
)
from tests.support.ranked import gathered

pytestmark = pytest.mark.ranks(4)
HOSTS = [TensorParallel, ContextParallel, SequenceParallel, TwoTokens]
LOSS = "the loss is not that of one process"
OTHER = "other values were computed than in one process"
# The defect, where it is, in which step it is found, and how causes begin. docs/audit.md has them.
FOUND: Sequence[tuple[str, type[Beside], int, Sequence[str]]] = [
    ("7452.1", TensorParallel, 1, [LOSS, OTHER]),
    ("7452.2", TensorParallel, 1, [LOSS, OTHER]),
    ("7452.3", TwoTokens, 1, [LOSS, "parts of the batch have wrong weights in the gradient"]),
    ("7452.4", SequenceParallel, 1, [OTHER]),
    ("7452.5", ContextParallel, 1, [LOSS, OTHER]),
    ("7452.6", SequenceParallel, 1, [LOSS, OTHER]),
    ("7452.7", SequenceParallel, 1, [LOSS, OTHER]),
    ("7452.8", TensorParallel, 1, ["the gradient norm is not that of all parameters"]),
    ("7452.9", ContextParallel, 1, [LOSS, OTHER]),
    (
        "7452.10",
        ContextParallel,
        1,
        [LOSS, "the part of the loss that comes from output[1] is multiplied by 2"],
    ),
    ("7452.11", TensorParallel, 1, ["the gradient is not summed over the ranks that hold the"]),
    ("7452.13", SequenceParallel, 2, [LOSS, OTHER]),
    (
        "7452.B",
        SequenceParallel,
        1,
        ["the tie is reduced twice: the gradient is 2 times too large", "the gradient is 2 times"],
    ),
    (
        "715",
        TensorParallel,
        1,
        ["the gradient norm counts each copy of a parameter that several ranks hold"],
    ),
]


@pytest.mark.parametrize("host", HOSTS)
def test_a_right_pipeline_beside_other_axes_has_no_finding(host: type[Beside]) -> None:
    report = host().audit().run()
    assert report.is_right, str(report)
    assert all(gradient.error <= gradient.allowed < 1e-3 for gradient in report.gradients)
    held = {gradient.name for gradient in report.gradients}
    assert held == {name for name, _ in host().model.named_parameters()}


@pytest.mark.parametrize(
    ("defect", "host", "step", "causes"), FOUND, ids=[defect for defect, *_ in FOUND]
)
def test_a_defect_beside_other_axes_is_found(
    defect: str, host: type[Beside], step: int, causes: Sequence[str]
) -> None:
    report = host((defect,)).audit().run()
    found = [finding.cause for finding in report.findings]
    assert len(found) == len(causes), found
    assert all(f.startswith(words) for f, words in zip(found, causes, strict=True)), found
    assert {finding.step for finding in report.findings} == {step}
    assert gathered(report.findings) == [report.findings] * 4


def test_a_wrong_evaluation_is_missed() -> None:
    """An audit looks at gradients, norms and parameters, and evaluation changes none."""
    host, right = SequenceParallel(("7452.13 in evaluation",)), SequenceParallel()
    audit = host.audit()
    assert audit.run().is_right
    right.module.load_state_dict(host.module.state_dict())
    inputs = next(iter(audit.batches))[0].chunk(2)[audit.replica]
    error = host.evaluated(inputs) - right.evaluated(inputs)
    assert error.norm() > 0.01 * right.evaluated(inputs).norm()


def test_layers_of_another_stage_are_noted_as_other_values_to_start_with() -> None:
    """A file is no part of a step: an audit begins with the values that stages have."""
    report = TensorParallel(("7452.12",)).audit().run()
    assert report.is_right
    assert report.notes[0].startswith("stages start with other values than the uncut model, in 2.")
    with pytest.raises(AgreementError, match="no runs of the uncut model's parameters have the"):
        TensorParallel(("7452.12",)).audit(names=None).run()


def test_shards_without_a_dtensor_are_refused() -> None:
    audit = TensorParallel(("plain shards",)).audit()
    with pytest.raises(
        AgreementError, match=r"0.qkv is \(3, 3, 6\), and 2.qkv of the uncut model "
    ):
        audit.run()
