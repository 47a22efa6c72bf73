"""`GradientSync.non_finite`: the same names on all ranks, whatever the placement."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pipegrad
from pipegrad import GradientSync, Topology
from tests.support.gradients.cases import (
    DATA,
    SHARED,
    Case,
    give,
    on,
    outcome,
    rank,
    replies,
    stage,
)
from tests.support.gradients.placements import REPLICATE, SHARD, By, compute

FOUR: list[Case] = []

four = replies(4, FOUR)

INF = float("inf")


def stages(**options: Any) -> tuple[GradientSync, Any]:
    """Two stages on ranks (0, 1) and (2, 3), with a tied weight and one of their own."""
    topology = Topology.create(pipeline=2)
    at = topology.coordinate("pp")
    module = stage(w=torch.ones(6, 4), **{"ab"[at]: (64 + at,)})
    options = {"handlers": [SHARED, DATA], **options}
    sync = GradientSync({at: module}, topology, tied=[["w"]], **options)
    sync.optimizer_parameters()
    return sync, module


def spoiled(sync: GradientSync, module: Any, at: int, names: str, *, accumulate: int = 1) -> Any:
    """A step in which one rank adds infinities to some gradients, in its first backward."""
    own = [name for name, _ in module.named_parameters()]

    def backward(*, spoils: bool) -> None:
        bad = names if spoils and rank() == at else ""
        give(module, **{name: INF if name in bad else 1.0 for name in own})

    for number in range(accumulate - 1):
        with sync.accumulate():
            sync.prepare()
            backward(spoils=not number)
            sync.finish()
    compute(sync, lambda: backward(spoils=accumulate == 1))
    norm = sync.clip_grad_norm_(1.0).item()
    found = [str(each) for each in sync.non_finite()]
    sync.drop_gradients()
    # The next step has no trace of it.
    compute(sync, lambda: backward(spoils=False))
    fine = sync.clip_grad_norm_(INF).isfinite().item()
    return norm, found, [str(each) for each in sync.non_finite()], fine


@on(FOUR)
def named() -> Any:
    found = {
        "own": spoiled(*stages(), 3, "b"),
        "tied": spoiled(*stages(), 1, "w"),
        "both": spoiled(*stages(), 0, "aw"),
        "accumulated": spoiled(*stages(), 3, "b", accumulate=3),
        "master": spoiled(*stages(master_dtype=torch.float64), 3, "b"),
    }
    sharded = [By("pp", REPLICATE), By("dp", SHARD, "mean")]
    found["sharded"] = spoiled(*stages(handlers=sharded), 3, "b")
    return found


TIED = "'w' (stages [0, 1], ranks [0, 1, 2, 3])"
OWN = "'b' (stage 1, ranks [2, 3])"


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("own", [OWN]),
        ("tied", [TIED]),
        ("both", [TIED, "'a' (stage 0, ranks [0, 1])"]),
        ("accumulated", [OWN]),
        ("master", [OWN]),
        ("sharded", [OWN]),
    ],
)
def test_all_ranks_have_the_names_of_the_gradients_that_are_not_finite(
    four: list[dict[str, Any]], case: str, expected: list[str]
) -> None:
    for reply in four:
        assert reply["named"][case] == (INF, expected, [], True)


@on(FOUR)
def overflowing() -> Any:
    """Finite gradients whose squares overflow; and the verb in the middle of a step."""
    sync, module = stages()
    compute(sync, lambda: give(module, w=1e30))
    norm = sync.clip_grad_norm_(INF).item()
    found = sync.non_finite()
    sync.drop_gradients()
    sync.prepare()
    return norm, found, outcome(sync.non_finite)


def test_a_norm_may_overflow_by_itself(four: list[dict[str, Any]]) -> None:
    refused = "StepError: non_finite() inside a step: call finish() first"
    assert [reply["overflowing"] for reply in four] == [(INF, (), refused)] * 4


@on(FOUR)
def compared() -> Any:
    """A copy that becomes infinite: the gradients are not finite, and the next step says why."""
    sync, module = stages()
    weight = module.get_parameter("w")
    said = []
    for number in range(1, 8):
        if number == 5 and rank() == 2:
            weight.data[0, 0] = INF

        def backward() -> None:
            (weight * weight).sum().backward()

        said.append(outcome(lambda backward=backward: compute(sync, backward)))  # type: ignore[misc]
        if not said[-1].startswith("None"):
            break
        if not sync.clip_grad_norm_(1.0).isfinite():
            sync.non_finite()
        sync.drop_gradients()
    return said


def test_the_step_after_one_that_is_not_finite_compares_copies(four: list[dict[str, Any]]) -> None:
    """Otherwise it would be the eighth."""
    for reply in four:
        *before, last = reply["compared"]
        assert before == ["None"] * 5
        assert (
            ": '0.w' on ranks [2], of the copies on ranks [0, 1, 2, 3]. They differ in step 6, "
            in last
        )


@on(FOUR)
def with_scaler() -> Any:
    sync, module = stages()
    optimizer = sync.optimizer(torch.optim.SGD, lr=1.0)
    scaler = pipegrad.GradScaler(sync, init_scale=4.0)
    backward = lambda: give(module, w=scaler.get_scale() * (INF if rank() == 1 else 1.0))  # noqa: E731
    compute(sync, backward)
    norm = sync.clip_grad_norm_(1.0).item()
    found = [str(each) for each in sync.non_finite()]
    scaler.step(optimizer)
    scaler.update()
    return norm, found, scaler.get_scale(), module.get_parameter("w").tolist() == [[1.0] * 4] * 6


def test_with_a_scaler_they_are_named_too(four: list[dict[str, Any]]) -> None:
    assert [reply["with_scaler"] for reply in four] == [(INF, [TIED], 2.0, True)] * 4
