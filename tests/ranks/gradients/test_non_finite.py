"""`GradientSync.non_finite`: the same names on all ranks, whatever the placement."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import pipegrad
from pipegrad import GradientSync
from tests.support.gradients.cases import DATA, SHARED, give, outcome, rank, stage, tied
from tests.support.gradients.placements import REPLICATE, SHARD, By, compute

INF = float("inf")
TIED = "'w' (stages [0, 1], ranks [0, 1, 2, 3])"
OWN = "'b' (stage 1, ranks [2, 3])"


def stages(**options: Any) -> tuple[GradientSync, nn.Module]:
    """Two stages on ranks (0, 1) and (2, 3), with a tied weight and one of their own."""
    at = rank() // 2
    module = stage(w=torch.ones(6, 4), **{"ab"[at]: (64 + at,)})
    sync = tied(module, "w", **{"handlers": [SHARED, DATA], **options})
    sync.optimizer_parameters()
    return sync, module


def names(sync: GradientSync) -> list[str]:
    return [str(each) for each in sync.non_finite()]


SHARDED = {"handlers": [By("pp", REPLICATE), By("dp", SHARD, "mean")]}


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("at", "bad", "steps", "options", "expected"),
    [
        (3, "b", 1, {}, [OWN]),
        (1, "w", 1, {}, [TIED]),
        (0, "aw", 1, {}, [TIED, "'a' (stage 0, ranks [0, 1])"]),
        (3, "b", 3, {}, [OWN]),
        (3, "b", 1, {"master_dtype": torch.float64}, [OWN]),
        (3, "b", 1, SHARDED, [OWN]),
    ],
    ids=["own", "tied", "both", "accumulated", "master", "sharded"],
)
def test_all_ranks_have_the_names_of_the_gradients_that_are_not_finite(
    at: int, bad: str, steps: int, options: dict[str, Any], expected: list[str]
) -> None:
    """One rank adds infinities to some gradients, in its first backward."""
    sync, module = stages(**options)
    good = {name: 1.0 for name, _ in module.named_parameters()}
    spoiled = {name: INF if rank() == at and name in bad else 1.0 for name in good}
    for number in range(steps - 1):
        with sync.accumulate():
            sync.prepare()
            give(module, **(good if number else spoiled))
            sync.finish()
    compute(sync, partial(give, module, **(spoiled if steps == 1 else good)))
    assert sync.clip_grad_norm_(1.0).item() == INF
    assert names(sync) == expected
    sync.drop_gradients()
    # The next step has no trace of it.
    compute(sync, partial(give, module, **good))
    assert sync.clip_grad_norm_(INF).isfinite()
    assert names(sync) == []


@pytest.mark.ranks(4)
def test_norms_comparisons_and_scalers_name_them() -> None:
    """Squares of finite gradients overflow. The verb is refused in the middle of a step."""
    sync, module = stages()
    compute(sync, partial(give, module, w=1e30))
    assert sync.clip_grad_norm_(INF).item() == INF
    assert sync.non_finite() == ()
    sync.drop_gradients()
    sync.prepare()
    refused = "StepError: non_finite() inside a step: call finish() first"
    assert outcome(sync.non_finite) == refused
    # The step after one that is not finite compares copies. A copy becomes infinite. The sixth step
    # says why; otherwise it would be the eighth.
    sync, module = stages()
    weight = module.get_parameter("w")
    for number in range(1, 6):
        if number == 5 and rank() == 2:
            weight.data[0, 0] = INF
        compute(sync, lambda: (weight * weight).sum().backward())
        if not sync.clip_grad_norm_(1.0).isfinite():
            sync.non_finite()
        sync.drop_gradients()
    drift = outcome(lambda: compute(sync, lambda: (weight * weight).sum().backward()))
    where = ": '0.w' on ranks [2], of the copies on ranks [0, 1, 2, 3]. They differ in step 6, "
    assert where in drift
    # With a scaler they are named too.
    sync, module = stages()
    optimizer = sync.optimizer(torch.optim.SGD, lr=1.0)
    scaler = pipegrad.GradScaler(sync, init_scale=4.0)
    scale = scaler.scale(torch.ones(())).item()
    compute(sync, lambda: give(module, w=scale * (INF if rank() == 1 else 1.0)))
    assert sync.clip_grad_norm_(1.0).item() == INF
    assert names(sync) == [TIED]
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert module.get_parameter("w").tolist() == [[1.0] * 4] * 6
