"""A report as text and as JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pipegrad.audit.report import Finding, Gradient, Report, Variant, listed, merged

FINDING = Finding("the gradient is stale", "call zero_grad", ("0.weight",), (0, 1), step=2)
GRADIENTS = (
    Gradient("0.weight", (0, 1), error=0.5, allowed=1.0),
    Gradient("1.weight", (2,), error=0.2, allowed=0.25),
)
RIGHT = Report((), ("a note",), GRADIENTS, num_steps=3, num_ranks=4, seconds=1.25)
WRONG = replace(RIGHT, findings=(FINDING,))


def test_the_summary_counts_causes_and_has_the_gradient_that_is_nearest_to_its_limit() -> None:
    assert RIGHT.is_right
    assert RIGHT.summary == (
        "right: 3 steps on 4 ranks, 2 gradients in each, the worst is off by 0.2 (allowed: 0.25), "
        "1.2 s"
    )
    assert str(RIGHT) == f"{RIGHT.summary}\nnote: a note"
    assert replace(RIGHT, gradients=()).summary == "right: 4 ranks, 1.2 s"
    assert not WRONG.is_right
    assert WRONG.summary.startswith("wrong, 1 cause: 3 steps on 4 ranks")
    assert replace(RIGHT, findings=(FINDING, FINDING)).summary.startswith("wrong, 2 causes: ")


def test_the_text_numbers_findings_with_where_they_are() -> None:
    other = Finding("the loss is wrong")
    lines = str(replace(WRONG, findings=(FINDING, other))).splitlines()
    assert lines[1:] == [
        "1. step 2: the gradient is stale",
        "     ranks:      0-1",
        "     parameters: 0.weight",
        "     what to do: call zero_grad",
        "2. step 1: the loss is wrong",
        "note: a note",
    ]
    names = tuple(f"{index}.weight" for index in range(6))
    assert "0.weight, 1.weight, 2.weight, 3.weight and 2 more" in str(Finding("", names=names))
    assert str(Finding("", names=names[:4])).endswith("2.weight, 3.weight")


VARIANTS = (
    Variant("packing", "lost in the pipeline", "gradient", 0.33, 0.0),
    Variant("Muon", "not compared", "update", None, 0.5),
    Variant("<b>", "without effect in both"),
)


def test_variants_are_lines_under_the_findings() -> None:
    report = replace(RIGHT, variants=VARIANTS)
    assert str(report).splitlines()[1:-1] == [
        "packing  lost in the pipeline: gradient 0.33 in one process, 0 in the pipeline",
        "Muon     not compared: update ? in one process, 0.5 in the pipeline",
        "<b>      without effect in both",
    ]
    assert json.loads(report.as_json())["variants"][0]["one"] == 0.33


def test_json_has_all_that_the_report_has() -> None:
    data = json.loads(WRONG.as_json())
    assert data.pop("is_right") is False
    findings = tuple(
        Finding(**{**f, **{key: tuple(f[key]) for key in ("names", "ranks", "details")}})
        for f in data.pop("findings")
    )
    gradients = tuple(Gradient(**{**g, "ranks": tuple(g["ranks"])}) for g in data.pop("gradients"))
    assert data.pop("variants") == []
    assert Report(findings, tuple(data.pop("notes")), gradients, **data) == WRONG
    assert json.loads(RIGHT.as_json())["is_right"] is True


def test_findings_of_one_cause_are_one_with_all_names_and_ranks() -> None:
    findings = [
        Finding("stale", "do", ("b",), (3,)),
        Finding("other", "", ("c",), (0,)),
        Finding("stale", "do", ("a",), (1,)),
        Finding("stale", "do", ("b",), (1,)),
    ]
    assert merged(findings) == (
        Finding("stale", "do", ("b", "a"), (1, 3)),
        Finding("other", "", ("c",), (0,)),
    )


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((), ""),
        ((3,), "3"),
        ((0, 1, 2, 3), "0-3"),
        ((6, 0, 2, 1), "0-2, 6"),
        ((1, 3, 5), "1, 3, 5"),
        ((0, 1, 4, 5, 9), "0-1, 4-5, 9"),
    ],
)
def test_ranks_are_listed_in_runs(ranks: tuple[int, ...], text: str) -> None:
    assert listed(ranks) == text
