"""A pipeline of torch with `attach` trains as one process does on the uncut model.

Each world is spawned once and runs the selected cases one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial

import pytest
import torch

from pipegrad.testing import run_ranks
from tests.support.distributions import declared
from tests.support.pipeline.models import TOKENS
from tests.support.pipeline.pipelines import Case
from tests.support.pipeline.training import Measured, merged, run_cases
from tests.support.rounding import rounding
from tests.support.versions import marks_of, needs_2_13, runnable
from tests.support.worlds import World

SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble")
OTHER_SCHEDULES = ("LoopedBFS", "InterleavedZeroBubble", "CSV runtime", "CSV multi")
FILES = tuple(f"file {name}" for name in declared("pipegrad.schedules"))
OPTIMIZERS = ("SGD", "AdamW")

Short = partial(Case, optimizer="AdamW", steps=6)
Buckets = partial(Short, "1F1B", model="crossed")

PIPELINE_4 = [
    *(Case(schedule, optimizer=name) for schedule in SCHEDULES for name in OPTIMIZERS),
    *(
        Case(schedule, model=model, optimizer="AdamW")
        for schedule in ("1F1B", "ZBVZeroBubble")
        for model in ("three-way", "crossed", "mixed-dtypes", "half-used")
    ),
    Case("1F1B", model="within", optimizer="AdamW"),
    Short("DualPipeV", num_microbatches=8),
    *(Short(schedule, num_microbatches=8) for schedule in FILES),
    Short("GPipe", model="half-used"),
    Short("Interleaved1F1B", model="half-used"),
    Short("ZBVZeroBubble", model="half-used", accumulate=2),
    Short("1F1B", model="half-used", set_to_none=False),
    Short("1F1B", model="three-way", cut="split-point", tied="pipe"),
    Short("1F1B", model="reentrant"),
    Short("1F1B", model="non-reentrant"),
    Short("1F1B", clip=(0.1, 2.0)),
]

PIPELINE_2_DATA_2 = [
    *(Case(schedule, "crossed", optimizer=o) for schedule in SCHEDULES for o in OPTIMIZERS),
    *(Short(schedule) for schedule in (*OTHER_SCHEDULES, "DualPipeV")),
    Short("1F1B", model="mixed-dtypes"),
    Short("ZBVZeroBubble", model="three-way"),
]

# The tracer copies ties apart: also those within a rank or a stage.
TRACED = [
    Short("1F1B", cut="split-point"),
    Short("1F1B", cut="split-point", tied="pipe"),
    Short("1F1B", cut="pipe-split", tied="pipe"),
    Short("1F1B", model="three-way", cut="split-point", tied="pipe"),
    Short("1F1B", model="three-way", cut="split-point"),
    Short("1F1B", model="within", cut="split-point", tied="pipe"),
    Short("ZBVZeroBubble", cut="split-point"),
    Short("ZBVZeroBubble", cut="split-point", tied="pipe"),
    Short("DualPipeV", cut="pipe-split", tied="pipe", optimizer_first=True),
    Short("ZBVZeroBubble", cut="apart", optimizer_first=True),
    Short("ZBVZeroBubble", model="crossed", cut="apart", tied="places"),
    Short("1F1B", model="crossed", tied="places"),
]

BEHAVIOUR = [
    # Accumulation over two steps, and evaluation in between.
    Short("1F1B", accumulate=2),
    Short("1F1B", model="half-used", accumulate=2, options=(("reduce_dtype", torch.float64),)),
    Short("ZBVZeroBubble", set_to_none=False, options=(("reduce_dtype", torch.float64),)),
    Short("ZBVZeroBubble", accumulate=2),
    Short("GPipe", accumulate=2, evaluate=True),
    Short("1F1B", accumulate=2, evaluate=True, set_to_none=False),
    Short("GPipe", evaluate=True),
    Short("Interleaved1F1B", evaluate=True),
    Short("CSV multi", evaluate=True),
    # Scaling and clipping.
    Short("1F1B", scale_grads=False),
    Short("ZBVZeroBubble", scale_grads=False),
    Short("1F1B", model="crossed", clip=(0.1, 2.0)),
    Short("ZBVZeroBubble", model="three-way", clip=(0.1, 2.0)),
    Short("1F1B", model="half-used", clip=(0.01, math.inf)),
    Short("ZBVZeroBubble", clip=(0.01, math.inf)),
    # Hooks that fire several times, wrappers, zero_grad that keeps the tensors.
    Short("GPipe", model="reentrant"),
    *(
        Case(schedule, model=model, optimizer="standstill", steps=3)
        for schedule in ("GPipe", "1F1B", "Interleaved1F1B")
        for model in ("reentrant", "non-reentrant", "half-used")
    ),
    Case("ZBVZeroBubble", model="half-used", optimizer="standstill", steps=3),
    Short("Interleaved1F1B", model="non-reentrant"),
    Short("1F1B", wrapper="compile"),
    Short("1F1B", wrapper="ddp", options=(("handlers", ("pipeline-shared",)),)),
    Short("1F1B", set_to_none=False),
]

PIPELINE_2_DATA_3 = [
    *(
        Case(schedule, model="three-way", optimizer=name, num_microbatches=6)
        for schedule in SCHEDULES
        for name in OPTIMIZERS
    ),
    Buckets(options=(("bucket_bytes", 0), ("comm_streams", 1))),
    Buckets(options=(("bucket_bytes", 0), ("comm_streams", 3))),
    Buckets(options=(("bucket_bytes", 1024), ("comm_streams", 2))),
    Buckets(options=(("bucket_bytes", 1024), ("comm_streams", 3))),
]

WORLDS = {
    "pipeline 4": (4, 4, PIPELINE_4),
    "pipeline 2, data 2": (4, 2, PIPELINE_2_DATA_2),
    "traced": (4, 2, TRACED),
    "behaviour": (4, 2, BEHAVIOUR),
    "pipeline 2, data 3": (6, 2, PIPELINE_2_DATA_3),
}


def spawn(num_ranks: int, pipeline: int, cases: Sequence[Case]) -> list[Measured]:
    measured = merged(run_ranks(run_cases, num_ranks, pipeline, cases))
    return [measured[case] for case in cases]


worlds = {
    name: World(runnable(cases), partial(spawn, num_ranks, pipeline))
    for name, (num_ranks, pipeline, cases) in WORLDS.items()
}


def cases(chosen: Iterable[tuple[str, Case]]) -> pytest.MarkDecorator:
    table = [
        pytest.param(
            name,
            case,
            id=f"{name}: {case}",
            marks=(*marks_of(case), *([pytest.mark.smoke] if (name, case) == SMOKE else ())),
        )
        for name, case in chosen
    ]
    return pytest.mark.parametrize(("name", "case"), table)


def most(name: str, case: Case, *, steps: int = 1) -> float:
    """Returns how far rounding may bring a case away from one process, after some steps."""
    num_ranks, pipeline, _ = WORLDS[name]
    rows = case.num_microbatches * num_ranks // pipeline
    return rounding(rows * TOKENS * case.accumulate * steps)


SMOKE = ("behaviour", Short("1F1B", accumulate=2))
EVERY = [(name, case) for name, (_, _, told) in WORLDS.items() for case in told]


@cases(EVERY)
def test_trains_as_one_process_does(name: str, case: Case) -> None:
    measured = worlds[name][case]

    learned = measured.true_losses[-1] < 0.9 * measured.true_losses[0]
    assert learned != (case.optimizer == "standstill"), "the case shows nothing"
    assert measured.loss_error <= most(name, case, steps=case.steps)
    assert measured.gradient_error <= most(name, case)
    assert measured.mismatched_none == []
    assert measured.drifted == []


@cases((name, case) for name, case in EVERY if case.evaluate)
def test_evaluation_leaves_every_bit_and_launches_nothing(name: str, case: Case) -> None:
    assert worlds[name][case].inert


@cases((name, case) for name, case in EVERY if case.clip)
def test_clips_as_torch_does_with_the_same_bits_on_all_ranks(name: str, case: Case) -> None:
    measured = worlds[name][case]

    assert case.clip is not None
    assert min(measured.true_norms) > case.clip[0], "nothing is clipped"
    assert len(measured.norms) == 1
    assert measured.norm_error <= most(name, case, steps=case.steps)


def test_full_backward_sends_gradients_one_by_one_before_the_stage_ends() -> None:
    finest = PIPELINE_2_DATA_3[-4]
    measured = worlds["pipeline 2, data 3"][finest]

    assert dict(finest.options)["bucket_bytes"] == 0
    assert measured.num_buckets == measured.early == 6 * 14  # on six ranks fourteen parameters


CONTROLS = [
    Case("1F1B", attached=False, steps=2),
    Case("ZBVZeroBubble", attached=False, steps=2),
    Case("ZBVZeroBubble", attached=False, steps=2, scale_grads=False),
]


@pytest.fixture(scope="module")
def unattached() -> list[Measured]:
    return spawn(4, 4, CONTROLS)


def test_without_attach_ties_across_ranks_are_wrong(unattached: list[Measured]) -> None:
    one_stage_each = unattached[0]
    ties = {"0.weight", "7.weight"}

    assert one_stage_each.drifted == ["0.weight"]
    for name, error in one_stage_each.gradient_errors.items():
        assert error > 0.1 if name in ties else error <= most("pipeline 4", CONTROLS[0])


@needs_2_13
def test_without_attach_a_tie_within_a_rank_is_divided_twice(unattached: list[Measured]) -> None:
    """torch divides at the end of each stage. Without that division it needs no help."""
    _, divided, sums = unattached

    for name in ("0.weight", "7.weight"):
        assert divided.gradient_errors[name] > 0.1
    assert sums.gradient_error <= most("pipeline 4", CONTROLS[0])
