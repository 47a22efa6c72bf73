"""Copies that are stepped differently, or flip a bit: told on all ranks, or set right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from pipegrad import GradientSync
from tests.support.gradients.cases import (
    Case,
    give,
    on,
    outcome,
    rank,
    replicated,
    replies,
    stage,
    tied,
)
from tests.support.gradients.placements import SHARD, By, alone, compute

TWO: list[Case] = []

two = replies(2, TWO)


def nothing() -> None:
    pass


def steps(
    sync: GradientSync,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    num: int = 2,
    before: Callable[[], object] = nothing,
    behind: Callable[[], object] = nothing,
    accumulate: int = 1,
) -> list[str]:
    """Trains; returns what each step said."""
    said = []
    for _ in range(num):
        for _ in range(accumulate - 1):
            with sync.accumulate():
                sync.prepare()
                backward(module)
                sync.finish()
        said.append(outcome(lambda: compute(sync, lambda: backward(module))))
        before()
        optimizer.step()
        sync.publish()
        behind()
        optimizer.zero_grad()
    return said


def backward(module: nn.Module) -> None:
    give(module, **{name: 1.0 for name, _ in module.named_parameters()})


def tie() -> nn.Module:
    """A copy of one parameter on each rank, and one of its own that is larger on the second."""
    torch.manual_seed(0)
    return stage(w=torch.randn(64), **{"ab"[rank()]: torch.ones(4 + 1000 * rank())})


@on(TWO)
def drifting() -> Any:
    found = {}
    module = tie()
    groups = [{"params": [p], "weight_decay": 0.1 * rank()} for p in module.parameters()]
    found["weight decay"] = steps(tied(module, "w"), module, torch.optim.AdamW(groups, lr=1e-3))
    module = tie()
    sgd = torch.optim.SGD(module.parameters(), lr=1e-3)
    clip = lambda module=module: nn.utils.clip_grad_norm_(module.parameters(), 0.5)  # noqa: E731
    found["clipped by torch"] = steps(tied(module, "w"), module, sgd, before=clip)
    same = stage(w=(4,))
    rate = torch.optim.SGD(same.parameters(), lr=1e-3 * (1 + rank()))
    found["learning rate of replicas"] = steps(replicated(same), same, rate)
    rows = stage(w=(4096,))
    sync = alone(rows, By("dp", SHARD))
    sgd = torch.optim.SGD(sync.optimizer_parameters(), lr=1e-3)

    def clamp() -> None:
        sync.wait_parameters()
        if rank() == 1:
            rows.get_parameter("w").data.clamp_(min=0.0)

    found["written behind publish"] = steps(sync, rows, sgd, behind=clamp)
    return found


@pytest.mark.parametrize(
    "cause",
    ["weight decay", "clipped by torch", "learning rate of replicas", "written behind publish"],
)
def test_copies_that_are_changed_differently_are_told(
    two: list[dict[str, Any]], cause: str
) -> None:
    """Issue 16, point 10 (1.11, 1.14). They drifted apart, and nobody looked."""
    words = "DriftError: copies of one parameter have drifted apart: "
    said = [reply["drifting"][cause] for reply in two]
    assert said[0] == said[1]
    first, second = said[0]
    assert first == "None"
    assert second.startswith(words)
    assert "over ranks [0, 1]. They differ in step 2. Something changed them diff" in second


@on(TWO)
def equal() -> Any:
    """Copies a rounding apart, as from two kinds of machines; 8 steps; then none the less."""
    module = tie()
    kind = f"kind {rank()}"
    kinds = mock.patch("pipegrad.gradients.negotiate.kind_of_machine", return_value=kind)
    with kinds:
        sync = tied(module, "w")
    adam = torch.optim.AdamW(module.parameters(), lr=1e-3, weight_decay=0.1)

    def round_up() -> None:
        with torch.no_grad():
            w = module.get_parameter("w")
            w.copy_(torch.nextafter(w, torch.full_like(w, float("inf") * (2 * rank() - 1))))

    said = steps(sync, module, adam, num=8, behind=round_up)
    checked = outcome(sync.check_replicas)
    sync.synchronize_parameters()
    return said, checked, outcome(sync.check_replicas)


def test_roundings_are_no_drift(two: list[dict[str, Any]]) -> None:
    """Issue 16, point 10 (1.11). A check of every bit is `check_replicas`, as before."""
    for reply in two:
        said, checked, again = reply["equal"]
        assert said == ["None"] * 8
        assert checked.startswith("DriftError: ")
        assert again == "None"


@on(TWO)
def looked() -> Any:
    """In which steps copies are compared, of 13."""
    module = stage(w=(4,))
    sync = replicated(module, check_every=6)
    found: list[int] = []
    drift = sync._parts.drift
    look = drift.look

    def note() -> None:
        found.append(sync.statistics().steps)
        look()

    drift.look = note  # type: ignore[method-assign]
    steps(sync, module, torch.optim.SGD(module.parameters(), lr=1.0), num=13, accumulate=2)
    return found


def test_copies_are_compared_seldom(two: list[dict[str, Any]]) -> None:
    """Issue 16, point 10 (1.11). Steps that only accumulate do not count."""
    assert [reply["looked"] for reply in two] == [[2, 4, 6, 12]] * 2
