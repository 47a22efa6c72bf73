"""Norms by which ranks clip: which parameters and copies are in them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pipegrad.audit.clipping import factor, right_norm, unclipped, wrong_norms
from pipegrad.audit.report import Finding
from pipegrad.audit.seen import Seen
from pipegrad.audit.states import Entry, entries_of
from pipegrad.errors import PlanError

# Two stages of two replicas: stage s of replica r is rank 2 s + r. Both stages hold "tie".
STAGES = {"tie": (0, 1), "first": (0,), "other": (0,), "last": (1,), "bias": (1,)}
GRADIENTS = {
    "tie": torch.tensor([0.0, 6.0]),
    "first": torch.tensor([8.0]),
    "other": torch.tensor([2.0]),
    "last": torch.tensor([24.0, 0.0]),
    "bias": torch.tensor([-7.0]),
}
NAMES = {name: name for name in GRADIENTS}
RIGHT = 27.0
COPIES = math.hypot(RIGHT, 6)
FIRST_STAGE, LAST_STAGE = math.hypot(6, 8, 2), math.hypot(6, 24, 7)
LOCAL = {0: FIRST_STAGE, 1: FIRST_STAGE, 2: LAST_STAGE, 3: LAST_STAGE}
CLIP_NORM = 2.0
HELD = [[name for name, stages in STAGES.items() if rank // 2 in stages] for rank in range(4)]


def same(norm: float) -> dict[int, float]:
    return dict.fromkeys(range(4), norm)


def of_rank(rank: int) -> Seen:
    held = HELD[rank]
    return Seen(
        rank=rank, replica=rank % 2, groups=dict.fromkeys(held, (rank,)),
        uses={name: (name,) for name in held}, before={},
        gradients={name: GRADIENTS[name] for name in held}, unclipped={}, after={},
        buffers=({}, {}), norm=None, clip_norm=None, losses=(), updates=[],
    )  # fmt: skip


EVERY = [of_rank(rank) for rank in range(4)]


def scaled(gradients: Mapping[str, Tensor | None], by: float) -> dict[str, Tensor | None]:
    return {name: None if g is None else g * by for name, g in gradients.items()}


def clipped_by(
    norms: Mapping[int, float], seen: Sequence[Seen] = EVERY, clip_norm: float = CLIP_NORM
) -> list[Seen]:
    """Returns what ranks have after each of them has clipped by its own norm."""
    return [
        replace(one, gradients=scaled(one.gradients, factor(norms[one.rank], clip_norm)))
        for one in seen
    ]


def watched_by(norms: Mapping[int, float], clip_norm: float = CLIP_NORM) -> list[Seen]:
    """Returns the same with copies of the gradients before clipping."""
    seen = clipped_by(norms, clip_norm=clip_norm)
    return [replace(s, unclipped=o.gradients) for s, o in zip(seen, EVERY, strict=True)]


def entries() -> list[Entry]:
    return entries_of(EVERY, [one.gradients for one in EVERY], NAMES)


def is_unclipped(found: Sequence[Entry]) -> bool:
    """Returns whether these are the gradients of all ranks before clipping."""
    pairs = zip(found, entries(), strict=True)
    return all(
        a.gradient is not None
        and b.gradient is not None
        and (a.name, a.ranks) == (b.name, b.ranks)
        and torch.allclose(a.gradient.double(), b.gradient.double(), rtol=1e-5)
        for a, b in pairs
    )


def causes_of(findings: Sequence[Finding]) -> dict[int, str]:
    return {finding.ranks[0]: finding.cause for finding in findings}


def said(words: str) -> dict[int, str]:
    return dict.fromkeys(range(4), f"the gradient norm {words}")


def test_the_right_norm_counts_each_parameter_of_the_own_replica_once() -> None:
    assert [right_norm(rank, entries()) for rank in range(4)] == pytest.approx([RIGHT] * 4)
    twice = [
        replace(e, gradient=e.gradient * 2 if e.replicas == (1,) else e.gradient)
        for e in entries()
        if e.gradient is not None
    ]
    norms = [right_norm(rank, twice) for rank in range(4)]
    assert norms == pytest.approx([RIGHT, 2 * RIGHT, RIGHT, 2 * RIGHT])
    # A parameter without a gradient has no share, and a sharded gradient counts once.
    without = [replace(e, gradient=None) if e.name == "last" else e for e in entries()]
    assert right_norm(0, without) == pytest.approx(math.hypot(6, 8, 2, 7))
    shared = [Entry("first", (0, 1), (0, 1), ("first",), GRADIENTS["first"])]
    last = [entry for entry in entries() if entry.name == "last"]
    norms = [right_norm(rank, [*shared, *last]) for rank in (0, 1)]
    assert norms == pytest.approx([math.hypot(8, 24)] * 2)


def test_a_norm_may_be_rounded() -> None:
    assert wrong_norms({0: RIGHT, 1: None}, entries()) == []
    assert wrong_norms({0: RIGHT * (1 + 1e-5)}, entries()) == []
    low = [replace(e, gradient=e.gradient.bfloat16()) for e in entries() if e.gradient is not None]
    assert wrong_norms({0: RIGHT * 1.002}, low) == []
    assert wrong_norms({0: RIGHT * 1.002}, entries())
    assert wrong_norms({0: RIGHT * 1.02}, low)


NOT_CLIPPED = dict.fromkeys(range(4), "gradients are not clipped")
LOCALLY, COPIED = (
    "is that of this rank's parameters alone",
    "counts each copy of a parameter that several ranks hold",
)
UNMARKED = watched_by(same(RIGHT), clip_norm=100.0)
UNMARKED[3] = replace(UNMARKED[3], unclipped={})
# What ranks saw, with which clip norm, and what is wrong.
SEEN: dict[str, tuple[Sequence[Seen], float | None, dict[int, str]]] = {
    "no clipping": (EVERY, None, {}),
    "no clipping, a norm": ([replace(s, norm=COPIES) for s in EVERY], None, said(COPIED)),
    "before": (
        [replace(s, norm=RIGHT, clip_norm=CLIP_NORM) for s in watched_by(same(RIGHT))],
        None,
        {},
    ),
    "before, a norm of torch": (
        [replace(s, norm=LOCAL[s.rank], clip_norm=CLIP_NORM) for s in watched_by(LOCAL)],
        None,
        said(LOCALLY),
    ),
    # A norm that nobody returns follows from gradients before and after.
    "before, no norm": (watched_by(same(RIGHT)), CLIP_NORM, {}),
    "before, no norm, copies": (watched_by(same(COPIES)), CLIP_NORM, said(COPIED)),
    "before, below": (watched_by(same(RIGHT), clip_norm=100.0), 100.0, {}),
    "before, above": ([replace(s, unclipped=s.gradients) for s in EVERY], CLIP_NORM, NOT_CLIPPED),
    "one rank did not mark its clipping": (UNMARKED, None, {}),
    "after, a stage below": (
        [replace(s, norm=LOCAL[s.rank]) for s in clipped_by(LOCAL, clip_norm=15.0)],
        15.0,
        said(LOCALLY),
    ),
    "after, below": ([replace(s, norm=RIGHT) for s in EVERY], 100.0, {}),
}


@pytest.mark.parametrize(("seen", "clip_norm", "expected"), SEEN.values(), ids=SEEN)
def test_gradients_before_clipping_are_known_and_a_wrong_norm_is_found(
    seen: Sequence[Seen], clip_norm: float | None, expected: dict[int, str]
) -> None:
    before, findings, _ = unclipped(seen, NAMES, clip_norm)
    assert is_unclipped(before)
    assert causes_of(findings) == expected


RANK_2, RANK_3 = (said(f"is that of rank {r}'s parameters alone") for r in (2, 3))
AFTER: dict[str, tuple[Mapping[int, float], dict[int, str]]] = {
    "right": (same(RIGHT), {}),
    "local": (LOCAL, said(LOCALLY)),
    "copies": (same(COPIES), said(COPIED)),
    "other": (same(50.0), said("is not that of all parameters")),
    # All ranks that use the norm of one rank have one cause.
    "another": (same(LAST_STAGE), {**RANK_2, 1: RANK_3[1], 3: RANK_3[3]}),
}


@pytest.mark.parametrize(("norms", "expected"), AFTER.values(), ids=AFTER)
@pytest.mark.parametrize("sees_before", [False, True])
def test_a_norm_that_is_returned_or_follows_from_gradients_before_clipping_is_compared(
    norms: Mapping[int, float], expected: dict[int, str], sees_before: bool
) -> None:
    returned = [replace(one, norm=norms[one.rank]) for one in clipped_by(norms)]
    seen = watched_by(norms) if sees_before else returned
    before, findings, _ = unclipped(seen, NAMES, CLIP_NORM)
    assert is_unclipped(before)
    assert causes_of(findings) == expected


def test_a_norm_of_which_nothing_is_known_is_refused() -> None:
    with pytest.raises(PlanError, match=r"the norm of rank 0 was not seen: call .*before_clipping"):
        unclipped(clipped_by(same(RIGHT)), NAMES, CLIP_NORM)


def test_a_wrong_norm_is_found_beside_a_wrong_gradient() -> None:
    """A wrong gradient that is clipped rightly is no wrong norm."""
    norm = math.hypot(6, 80, 2, 24, 7)
    wrong = [
        replace(one, norm=norm, gradients={**one.gradients, "first": GRADIENTS["first"] * 10})
        if one.rank < 2
        else replace(one, norm=norm)
        for one in EVERY
    ]
    seen = clipped_by(same(norm), wrong)
    assert unclipped(seen, NAMES, CLIP_NORM)[1] == []

    norm = math.hypot(18, 18, 8, 2, 24, 7)
    wrong = [
        replace(one, norm=norm, gradients={**one.gradients, "tie": GRADIENTS["tie"] * 3})
        for one in EVERY
    ]
    seen = clipped_by(same(norm), wrong)
    before, findings, _ = unclipped(seen, NAMES, CLIP_NORM)
    assert causes_of(findings) == said(COPIED)
    for entry in before:
        assert entry.gradient is not None
        right = GRADIENTS[entry.name].double() * (3 if entry.name == "tie" else 1)
        torch.testing.assert_close(entry.gradient.double(), right, rtol=1e-5, atol=1e-5)


def test_a_missing_gradient_stays_missing() -> None:
    seen = [replace(one, norm=RIGHT) for one in clipped_by(same(RIGHT))]
    seen[2] = replace(seen[2], gradients={**seen[2].gradients, "last": None})
    before, _, _ = unclipped(seen, NAMES, CLIP_NORM)
    assert [e.ranks for e in before if e.gradient is None] == [(2,)]


@pytest.mark.parametrize(("norm", "expected"), [(4.0, 0.5), (1.0, 1.0), (0.0, 1.0)])
def test_gradients_are_never_made_larger(norm: float, expected: float) -> None:
    assert factor(norm, CLIP_NORM) == expected
