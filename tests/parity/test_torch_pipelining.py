"""A pipeline of torch with `attach` trains as one process does on the uncut model."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch

from tests.support.distributions import declared
from tests.support.pipeline.models import TOKENS
from tests.support.pipeline.pipelines import Case
from tests.support.pipeline.schedulers import topology
from tests.support.pipeline.trained import Seen, bits, differences, digests_of
from tests.support.pipeline.training import Run, alone, truth
from tests.support.ranked import gathered
from tests.support.rounding import rounding
from tests.support.versions import marks_of, needs_2_13

FILES = tuple(f"file {name}" for name in declared("pipegrad.schedules"))

Long = partial(Case, optimizer="AdamW")
Short = partial(Case, optimizer="AdamW", steps=4)
Standing = partial(Case, optimizer="standstill", steps=3)
Buckets = partial(Short, "1F1B", model="crossed")
DOUBLE = (("reduce_dtype", torch.float64),)

# By mesh: pipeline x data. Over each of 4x1 and 2x2 every schedule of torch is there.
CASES: dict[str, list[Case]] = {
    "4x1": [
        Case("GPipe"),
        Long("1F1B"),
        Case("Interleaved1F1B"),
        Long("ZBVZeroBubble"),
        Short("1F1B", model="three-way"),
        Short("ZBVZeroBubble", model="crossed"),
        Short("1F1B", model="mixed-dtypes"),
        Long("ZBVZeroBubble", model="half-used"),
        Short("1F1B", model="within"),
        Short("DualPipeV", num_microbatches=8),
        *(Short(schedule, num_microbatches=8, steps=3) for schedule in FILES),
        Short("Interleaved1F1B", model="half-used"),
        Short("ZBVZeroBubble", model="half-used", accumulate=2),
        Short("1F1B", model="half-used", set_to_none=False),
        Short("1F1B", model="three-way", cut="split-point", tied="pipe"),
        Short("1F1B", model="reentrant"),
        Short("1F1B", clip=(0.1, 2.0)),
    ],
    "2x1": [
        # The tracer copies ties apart: also those within a rank or a stage.
        Short("1F1B", cut="split-point"),
        Short("1F1B", cut="pipe-split", tied="pipe"),
        Short("1F1B", model="within", cut="split-point", tied="pipe"),
        Short("ZBVZeroBubble", cut="split-point", tied="pipe"),
        Short("DualPipeV", cut="pipe-split", tied="pipe", optimizer_first=True),
        Short("ZBVZeroBubble", cut="apart", optimizer_first=True),
        Short("ZBVZeroBubble", model="crossed", cut="apart", tied="places"),
        Short("1F1B", model="crossed", tied="places"),
        Short("1F1B", wrapper="compile"),
    ],
    "2x2": [
        Long("GPipe", model="crossed"),
        Case("1F1B", model="crossed"),
        Long("Interleaved1F1B", model="crossed"),
        Case("ZBVZeroBubble", model="crossed"),
        Short("LoopedBFS"),
        Short("InterleavedZeroBubble"),
        Short("CSV runtime"),
        Short("DualPipeV"),
        Short("1F1B", model="mixed-dtypes"),
        Short("ZBVZeroBubble", model="three-way"),
        Short("1F1B", model="three-way", cut="split-point"),
        # Accumulation over two steps, and evaluation in between.
        Short("1F1B", accumulate=2),
        Short("1F1B", model="half-used", accumulate=2, options=DOUBLE),
        Short("ZBVZeroBubble", set_to_none=False, options=DOUBLE),
        Short("GPipe", accumulate=2, evaluate=True),
        Short("1F1B", accumulate=2, evaluate=True, set_to_none=False),
        Short("Interleaved1F1B", evaluate=True),
        Short("CSV multi", evaluate=True),
        # Scaling and clipping.
        Short("1F1B", scale_grads=False),
        Short("ZBVZeroBubble", scale_grads=False),
        Short("ZBVZeroBubble", model="three-way", clip=(0.1, 2.0)),
        Short("1F1B", model="half-used", clip=(0.01, math.inf)),
        # Hooks that fire several times, and wrappers.
        Standing("GPipe", model="reentrant"),
        Standing("1F1B", model="non-reentrant"),
        Standing("Interleaved1F1B", model="half-used"),
        Standing("ZBVZeroBubble", model="half-used"),
        Short("Interleaved1F1B", model="non-reentrant"),
        Short("1F1B", wrapper="ddp", options=(("handlers", ("pipeline-shared",)),)),
    ],
    "2x3": [
        Case("1F1B", model="three-way", num_microbatches=6),
        Long("ZBVZeroBubble", model="three-way", num_microbatches=6),
        Buckets(options=(("bucket_bytes", 0), ("comm_streams", 1))),
        Buckets(options=(("bucket_bytes", 1024), ("comm_streams", 3))),
    ],
}
EVERY = [(mesh, case) for mesh, cases in CASES.items() for case in cases]
SMOKE = Short("1F1B", accumulate=2)


def params(chosen: Iterable[tuple[str, Case]]) -> list[Any]:
    return [
        pytest.param(
            mesh,
            case,
            id=f"{mesh}: {case}",
            marks=[
                pytest.mark.ranks(int(mesh[0]) * int(mesh[2])),
                *marks_of(case),
                *([pytest.mark.smoke] if case == SMOKE else []),
            ],
        )
        for mesh, case in chosen
    ]


def most(mesh: str, case: Case, *, steps: int = 1) -> float:
    """Returns how far rounding may bring a case away from one process, after some steps."""
    rows = case.num_microbatches * int(mesh[2])
    return rounding(rows * TOKENS * case.accumulate * steps)


def trained(mesh: str, case: Case) -> tuple[Run, Seen, Seen]:
    """Trains on every rank, and in one process."""
    at = topology(int(mesh[0]))
    run, true = Run(case, at), truth(alone(case), at.size("dp"))
    seen = run.train()
    told = [losses for losses in gathered(seen.losses) if losses]  # of the last stages
    seen.losses = [torch.stack(step).mean() for step in zip(*told, strict=True)]
    return run, seen, true


@pytest.mark.parametrize(("mesh", "case"), params(EVERY))
def test_trains_as_one_process_does(mesh: str, case: Case) -> None:
    run, seen, true = trained(mesh, case)

    learned = true.losses[-1] < 0.9 * true.losses[0]
    assert learned != (case.optimizer == "standstill"), "the case shows nothing"
    later = most(mesh, case, steps=case.steps)
    assert differences(seen, true, most(mesh, case), later=later) == {}
    bits(seen.parameters, run.cut.ties)
    assert run.inert, "evaluation changed or launched something"
    if case.clip is not None:
        assert min(true.norms) > case.clip[0], "nothing is clipped"
        assert len({tuple(map(float, norms)) for norms in gathered(seen.norms)}) == 1
    if dict(case.options).get("bucket_bytes") == 0:
        # One by one, before the stage ends: on six ranks fourteen parameters.
        counts = gathered((run.num_buckets, run.early))
        assert [sum(column) for column in zip(*counts, strict=True)] == [6 * 14, 6 * 14]


@pytest.mark.ranks(4)
def test_without_attach_ties_across_ranks_are_wrong() -> None:
    run, seen, true = trained("4x1", Case("1F1B", attached=False, steps=2))

    wrong = {*differences(seen, true, most("4x1", run.case), later=math.inf)}
    assert set().union(*gathered(wrong)) == {"step 0 0.weight", "step 0 7.weight"}
    assert {*differences(seen, true, 0.1, later=math.inf)} == wrong
    one, other = digests_of(seen.parameters, run.cut.ties)["0.weight"]
    assert len(one) == len(other) == 1
    assert one != other


@needs_2_13
@pytest.mark.ranks(4)
@pytest.mark.parametrize("scale_grads", [True, False])
def test_without_attach_a_tie_within_a_rank_is_divided_twice(scale_grads: bool) -> None:
    """torch divides at the end of each stage. Without that division it needs no help."""
    case = Case("ZBVZeroBubble", attached=False, steps=2, scale_grads=scale_grads)
    _, seen, true = trained("4x1", case)

    for limit in (0.1, most("4x1", case)):
        wrong = {*differences(seen, true, limit, later=math.inf)}
        ties = {"step 0 0.weight", "step 0 7.weight"} if scale_grads else set()
        if limit == 0.1 or not scale_grads:
            assert set().union(*gathered(wrong)) == ties
