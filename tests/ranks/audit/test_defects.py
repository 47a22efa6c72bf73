"""Defects on real ranks are named, each with its cause and no other; two at a time at night."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from pipegrad.audit.script import Run
from tests.support.audit.hosts import HOSTS, REPLICAS, STAGES
from tests.support.pairwise import everything
from tests.support.ranked import gathered

DEFECTS = {
    "times M": "it is multiplied by the number of microbatches, 3, once too often",
    "divided by M": "it is divided by the number of microbatches, 3, once too often",
    "times targets": "it is multiplied by the number of targets of the step, 84, once too often",
    "sum over replicas": "it is multiplied by the number of replicas, 2, once too often",
    "replicas apart": "the gradient is not reduced over the 2 replicas",
    "last microbatch": "only the last microbatch is in the gradient, of 3",
    "tie apart": "the tie is not reduced",
    "tie twice": "the tie is reduced twice",
    "copies in norm": "the gradient norm counts each copy of a parameter that several ranks hold",
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
NIGHT = everything()
# In which kind a defect is changes nothing, and what two make is in unit/audit/test_explained.
CASES: list[tuple[str, tuple[str, ...]]] = [
    *((host, case) for host in HOSTS for case in ((), ("clipped",))),
    *((host, (one,)) for host in (HOSTS if NIGHT else [*HOSTS][:1]) for one in DEFECTS),
    *(
        (host, pair)
        for host in (HOSTS if NIGHT else ())
        for pair in itertools.combinations(DEFECTS, 2)
        if pair not in EXCLUDED
    ),
]


@pytest.mark.ranks(STAGES * REPLICAS)
@pytest.mark.parametrize(
    ("host", "case"), CASES, ids=[f"{host}-{' and '.join(case) or 'right'}" for host, case in CASES]
)
def test_defects_are_named(host: str, case: tuple[str, ...]) -> None:
    one = HOSTS[host](case)
    report = one.audit(steps=2).run()
    one.close()
    causes = [finding.cause for finding in report.findings]
    expected = PRODUCTS.get(case) or [DEFECTS[name] for name in case if name in DEFECTS]
    assert all(any(words in cause for cause in causes) for words in expected), causes
    assert all(any(words in cause for words in expected) for cause in causes), causes
    assert report.is_right == (not expected)
    assert gathered(report.findings) == [report.findings] * 4


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


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", EXAMPLES)
def test_each_defect_has_its_cause_and_no_other(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FILE.parent)
    causes = [finding.cause for finding in Run(f"{FILE}:{name}").here().findings]
    assert len(causes) == len(EXAMPLES[name]), causes
    for cause, words in zip(causes, EXAMPLES[name], strict=True):
        assert cause.startswith(words)
