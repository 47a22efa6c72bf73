"""Stages that FSDP2 shards, against one process: its own schedules, torch's, and HSDP.

The selected cases run in one spawn of 2 stages x 2 data ranks, and are asserted one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest

from pipegrad.testing import run_ranks
from tests.support.pipeline.sharded import TIED, Case, Found, run_cases
from tests.support.rounding import rounding
from tests.support.versions import marks_of, runnable
from tests.support.worlds import World

OURS = [
    Case("gpipe"),
    Case("1f1b", steps=20),
    Case("1f1b", num_microbatches=1),
    Case("eager-1f1b", accumulate=2),
    Case("interleaved-1f1b"),
    Case("interleaved-1f1b", recompute=True, accumulate=2),
    Case("1f1b", recompute=True),
    Case("1f1b", evaluate=True),
    Case("1f1b", wrap="layers"),
    Case("1f1b", wrap="stage"),
    Case("1f1b", keep=True, accumulate=2),
    Case("1f1b", replicate=2),
    Case("1f1b", low=True),
    Case("1f1b", exchange="pairwise", accumulate=2),
    Case("eager-1f1b", exchange="asymmetric", steps=5),
]
TORCH = [
    Case("GPipe", attached=True, accumulate=2),
    Case("1F1B", attached=True, steps=20),
    Case("1F1B", attached=True, replicate=2),
    Case("1F1B", attached=True, evaluate=True),
    Case("1F1B", attached=True, wrap="layers"),
    Case("1F1B", attached=True, low=True),
    Case("1F1B", attached=True, exchange="asymmetric"),
    Case("Interleaved1F1B", attached=True),
    Case("LoopedBFS", attached=True),
    Case("InterleavedZeroBubble", attached=True, keep=True),
]
CASES = [*OURS, *TORCH]
HSDP = Case("1f1b", replicate=2)  # of 8 ranks: 2 stages x 2 replicas x 2 shards


def spawn(num_ranks: int, cases: Sequence[Case]) -> list[list[Found]]:
    ranks = run_ranks(run_cases, num_ranks, cases)
    return [[rank[case] for rank in ranks] for case in cases]


world = World(runnable(CASES), partial(spawn, 4))


def most(case: Case, name: str) -> float:
    """Returns how far rounding may bring a case away from one process."""
    steps = 1 if name.startswith("gradient ") else case.steps  # gradients are of the first step
    return rounding(case.num_terms * steps)


every = pytest.mark.parametrize(
    "case", [pytest.param(case, id=str(case), marks=marks_of(case)) for case in CASES]
)


@every
def test_gradients_losses_norms_and_parameters_are_those_of_one_process(case: Case) -> None:
    errors: dict[str, float] = {}
    for report in world[case]:
        errors |= {name: max(e, errors.get(name, 0.0)) for name, e in report.errors.items()}

    assert {name: e for name, e in errors.items() if not e <= most(case, name)} == {}
    for what in ("gradient", "parameter"):
        assert {name for name in errors if name.startswith(f"{what} ")} >= {
            f"{what} {name}" for name in (*TIED, "1.scale", "2.linear.weight", "3.norm.bias")
        }
    assert case.attached or f"{case.steps - 1} loss 0" in errors


@every
def test_what_nobody_uses_has_no_gradient(case: Case) -> None:
    assert set().union(*(r.missing for r in world[case])) == {"1.unused", "2.unused"}


@every
def test_tied_shards_have_the_same_bits_on_both_stages(case: Case) -> None:
    first, second, third, fourth = (list(r.bits.values()) for r in world[case])

    assert [first, second] == [third, fourth]  # ranks 0 and 2 have the first shard
    assert len(first) == 1
    assert (first == second) == (case.replicate == 2)


@every
def test_only_the_last_backward_of_a_step_reduces(case: Case) -> None:
    groups = 1 if case.wrap == "stage" else 2  # of a rank: two layers
    last = 2 * case.num_microbatches if case.attached and case.wrap == "layers" else groups
    step = [*[0] * (case.accumulate - 1), last]
    for report in world[case]:
        assert report.reduce_scatters == step * case.steps


@every
def test_from_the_second_step_on_what_is_reduced_leaves_before_its_stage_ends(case: Case) -> None:
    for report in world[case]:
        tied = 1  # FSDP2 sends the others
        split = case.schedule == "InterleavedZeroBubble"
        assert report.early == [0, *[0 if split else tied] * (case.steps - 1)]


@every
def test_everything_is_in_order(case: Case) -> None:
    assert [v for report in world[case] for v in report.violations] == []


def test_hsdp_on_eight_ranks_is_one_process() -> None:
    """Issue 16, point 16. On another processor a parameter was off by 1.2e-6, more than 1e-6."""
    (ranks,) = spawn(8, [HSDP])

    for rank in ranks:
        assert {n: e for n, e in rank.errors.items() if not e <= most(HSDP, n)} == {}
    bits = [next(iter(rank.bits.values())) for rank in ranks]
    assert bits == bits[:2] * 4
