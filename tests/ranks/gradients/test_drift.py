"""Copies that are stepped differently: an error on all ranks; roundings are none."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import nn

from pipegrad import GradientSync
from tests.support.gradients.cases import give, outcome, rank, replicated, stage, tied
from tests.support.gradients.placements import SHARD, By, alone, compute

pytestmark = pytest.mark.ranks(2)


def steps(
    sync: GradientSync,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    num: int = 2,
    before: Callable[[], object] = lambda: None,
    behind: Callable[[], object] = lambda: None,
    accumulate: int = 1,
) -> list[str]:
    """Trains; returns the outcome of each step."""

    def backward() -> None:
        give(module, **{name: 1.0 for name, _ in module.named_parameters()})

    outcomes = []
    for _ in range(num):
        for _ in range(accumulate - 1):
            with sync.accumulate():
                sync.prepare()
                backward()
                sync.finish()
        outcomes.append(outcome(lambda: compute(sync, backward)))
        before()
        optimizer.step()
        sync.publish()
        behind()
        optimizer.zero_grad()
    return outcomes


def tie() -> nn.Module:
    """A copy of one parameter on each rank, and one of its own that is larger on the second."""
    return stage(w=torch.randn(64), **{"ab"[rank()]: torch.ones(4 + 1000 * rank())})


def weight_decay() -> list[str]:
    module = tie()
    groups = [{"params": [p], "weight_decay": 0.1 * rank()} for p in module.parameters()]
    return steps(tied(module, "w"), module, torch.optim.AdamW(groups, lr=1e-3))


def clipped_by_torch() -> list[str]:
    module = tie()
    sgd = torch.optim.SGD(module.parameters(), lr=1e-3)
    clip = lambda: nn.utils.clip_grad_norm_(module.parameters(), 0.5)  # noqa: E731
    return steps(tied(module, "w"), module, sgd, before=clip)


def learning_rate_of_replicas() -> list[str]:
    module = stage(w=(4,))
    sgd = torch.optim.SGD(module.parameters(), lr=1e-3 * (1 + rank()))
    return steps(replicated(module), module, sgd)


def written_behind_publish() -> list[str]:
    module = stage(w=(4096,))
    sync = alone(module, By("dp", SHARD))

    def clamp() -> None:
        sync.wait_parameters()
        if rank() == 1:
            module.get_parameter("w").data.clamp_(min=0.0)

    sgd = torch.optim.SGD(sync.optimizer_parameters(), lr=1e-3)
    return steps(sync, module, sgd, behind=clamp)


@pytest.mark.parametrize(
    "train", [weight_decay, clipped_by_torch, learning_rate_of_replicas, written_behind_publish]
)
def test_copies_that_are_changed_differently_are_an_error(train: Callable[[], list[str]]) -> None:
    first, second = train()
    assert first == "None"
    assert second.startswith("DriftError: copies of one parameter have drifted apart: ")
    assert "over ranks [0, 1]. They differ in step 2. Something changed them diff" in second


def test_roundings_are_no_drift_but_check_replicas_compares_every_bit() -> None:
    module, kind = tie(), f"kind {rank()}"  # of machine
    with mock.patch("pipegrad.gradients.negotiate.kind_of_machine", return_value=kind):
        sync = tied(module, "w")
    adam = torch.optim.AdamW(module.parameters(), lr=1e-3, weight_decay=0.1)

    def round_up() -> None:
        with torch.no_grad():
            w = module.get_parameter("w")
            w.copy_(torch.nextafter(w, torch.full_like(w, float("inf") * (2 * rank() - 1))))

    assert steps(sync, module, adam, num=8, behind=round_up) == ["None"] * 8
    assert outcome(sync.check_replicas).startswith("DriftError: ")
    sync.synchronize_parameters()
    assert outcome(sync.check_replicas) == "None"


def test_copies_are_compared_seldom() -> None:
    module = stage(w=(4,))
    sync = replicated(module, check_every=6)
    drift = sync._parts.drift
    look, compared = drift.look, list[int]()

    def count() -> None:
        compared.append(sync.statistics().steps)
        look()

    drift.look = count  # type: ignore[method-assign]
    steps(sync, module, torch.optim.SGD(module.parameters(), lr=1.0), num=13, accumulate=2)
    assert compared == [2, 4, 6, 12]  # steps that only accumulate do not count
