"""Defects, one at a time and in pairs, in two kinds of pipelines: each is named, and no other."""

from __future__ import annotations

import itertools

import pytest

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
# Of two that show in one place, either is beside each of the others, in turns.
IN_TURNS = ("copies in norm", "local norm"), ("tie apart", "tie twice")


def is_taken(pair: tuple[str, ...]) -> bool:
    turns = [
        two.index(one) == [*DEFECTS].index(other) % 2
        for two in IN_TURNS
        for one, other in (pair, pair[::-1])
        if one in two
    ]
    return pair not in EXCLUDED and (all(turns) or everything())


# Each alone in each kind of pipeline. In which kind a pair is changes nothing: in the first.
CASES: list[tuple[str, tuple[str, ...]]] = [
    *((host, case) for host in HOSTS for case in ((), ("clipped",), *((one,) for one in DEFECTS))),
    *(
        (host, pair)
        for host in (HOSTS if everything() else [*HOSTS][:1])
        for pair in itertools.combinations(DEFECTS, 2)
        if is_taken(pair)
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
