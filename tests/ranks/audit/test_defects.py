"""Defects, one at a time and in pairs, in three kinds of pipelines: each is named, and no other."""

from __future__ import annotations

import itertools

import pytest

from pipegrad.audit import Report
from pipegrad.testing import run_ranks
from tests.support.audit.hosts import HOSTS, REPLICAS, STAGES, Groups

DEFECTS = {
    "times M": "it is multiplied by the number of microbatches, 3, once too often",
    "divided by M": "it is divided by the number of microbatches, 3, once too often",
    "times targets": "it is multiplied by the number of targets of the step, 84, once too often",
    "sum over replicas": "it is multiplied by the number of replicas, 2, once too often",
    "replicas apart": "the gradient is not reduced over the 2 replicas",
    "last microbatch": "only the last microbatch is in the gradient, of 3",
    "tie apart": "the tie is not reduced",
    "tie twice": "the tie is reduced twice",
    "copies in norm": "the gradient norm counts each copy of a tied parameter",
    "local norm": "the gradient norm is that of this rank's parameters alone",
    "missing": "the gradient is missing",
    "stale": "the gradient is stale",
}
# These cannot be there together, or are no defect together.
EXCLUDED: set[tuple[str, ...]] = {
    ("times M", "divided by M"),
    ("sum over replicas", "replicas apart"),
    ("tie apart", "tie twice"),
    ("copies in norm", "local norm"),
}
# Two factors in one, for one count or for both.
PRODUCTS: dict[tuple[str, ...], list[str]] = {
    ("times M", "times targets"): [
        "microbatches, 3, once and multiplied",
        "targets of the step, 84",
    ],
    ("times M", "sum over replicas"): ["microbatches, 3, once and multiplied", "replicas, 2"],
    ("divided by M", "times targets"): ["targets", "once too often"],
    ("divided by M", "sum over replicas"): ["divided by", "multiplied by the number of replicas"],
    ("times targets", "sum over replicas"): ["replicas, 2, once and multiplied", "targets"],
    # The mean of the last microbatch alone is M times its part of the mean.
    ("times M", "last microbatch"): ["only the last microbatch is in the gradient"],
}
PAIRS = [pair for pair in itertools.combinations(DEFECTS, 2) if pair not in EXCLUDED]
CASES: list[tuple[str, ...]] = [(), ("clipped",), *((name,) for name in DEFECTS), *PAIRS]


def audited(host: str) -> list[Report]:
    groups, found = Groups.made(), []
    for case in CASES:
        one = HOSTS[host](groups, case)
        try:
            found.append(one.audit(steps=2).run())
        finally:
            one.close()
    return found


@pytest.fixture(scope="module", params=HOSTS)
def reports(request: pytest.FixtureRequest) -> dict[tuple[str, ...], Report]:
    replies = run_ranks(audited, STAGES * REPLICAS, request.param)
    assert all(
        [report.findings for report in reply] == [report.findings for report in replies[0]]
        for reply in replies
    )
    return dict(zip(CASES, replies[0], strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: " and ".join(case) or "right")
def test_defects_are_named(reports: dict[tuple[str, ...], Report], case: tuple[str, ...]) -> None:
    report = reports[case]
    causes = [finding.cause for finding in report.findings]
    expected = PRODUCTS.get(case) or [DEFECTS[name] for name in case if name in DEFECTS]
    assert all(any(words in cause for cause in causes) for words in expected), causes
    assert all(any(words in cause for words in expected) for cause in causes), causes
    assert report.is_right == (not expected)
