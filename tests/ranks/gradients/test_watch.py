"""Optimizers that would make another model of the copies or shards that they step are refused."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import pipegrad
from pipegrad import GradientSync, Topology
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
from tests.support.gradients.placements import OWNER, SHARD, By, alone, compute

TWO: list[Case] = []

two = replies(2, TWO)


def scaled(sync: GradientSync, module: nn.Module, gradient: float, scaler: Any = None) -> str:
    """A step by torch's GradScaler."""
    scaler = scaler or torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    optimizer = torch.optim.SGD(sync.optimizer_parameters(), lr=1.0)
    compute(sync, lambda: give(module, w=gradient))
    return outcome(lambda: scaler.step(optimizer))


@on(TWO)
def torch_scaler() -> Any:
    pieces, fused = stage(w=(4096,)), stage(w=(4096,))  # so that each rank has a row
    stages = tied(own := stage(w=(4,)))
    sync = alone(fused, By("dp", SHARD))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    optimizer = torch.optim.SGD(sync.optimizer_parameters(), lr=1.0, fused=True)
    torch.optim.lr_scheduler.ConstantLR(optimizer)  # which wraps step
    compute(sync, lambda: give(fused, w=1.0))
    return {
        "rows": scaled(alone(pieces, By("dp", SHARD)), pieces, 1.0),
        "stages": scaled(stages, own, 1.0),
        "fused": outcome(lambda: scaler.step(optimizer)),
    }


def test_torchs_scaler_is_refused_where_ranks_have_other_gradients(
    two: list[dict[str, Any]],
) -> None:
    """Issue 16, point 5. One rank skipped a step that others made; nobody said so."""
    words = "PlanError: torch's GradScaler looks for overflows in the gradients of this rank alone"
    for reply in two:
        assert [said[: len(words)] for said in reply["torch_scaler"].values()] == [words] * 3


@on(TWO)
def torch_scaler_is_right() -> Any:
    """Replicas all see the same overflow; a scaler that is off decides nothing."""
    module, pieces = stage(w=(4,)), stage(w=(4,))
    off = torch.amp.GradScaler("cpu", enabled=False)
    return [
        scaled(replicated(module), module, 1.0),
        module.get_parameter("w").tolist(),
        scaled(alone(pieces, By("dp", SHARD)), pieces, 1.0, off),
    ]


def test_torchs_scaler_is_taken_where_all_ranks_have_the_same(two: list[dict[str, Any]]) -> None:
    """Issue 16, point 5."""
    assert [reply["torch_scaler_is_right"] for reply in two] == [["None", [-0.5] * 4, "None"]] * 2


@on(TWO)
def overflow_on_one_stage() -> Any:
    """Rank 0 skips its step, and so does not come to the optimizer's hook.

    Rank 1 has given up the next step. Then both go on.
    """
    module = stage(w=(4,), own=(4,))
    sync = tied(module, "w")
    compute(sync, lambda: give(module, w=1.0))
    optimizer = torch.optim.SGD(sync.optimizer_parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    if rank() == 0:
        module.get_parameter("w").grad[0] = float("inf")  # type: ignore[index]
    first = outcome(lambda: scaler.step(optimizer))
    optimizer.zero_grad()
    once_more = lambda: compute(sync, lambda: give(module, w=1.0))  # noqa: E731
    told = outcome(once_more) if rank() == 0 else ""
    return first, told, outcome(once_more)


def test_a_rank_that_skips_is_told_in_its_next_step(two: list[dict[str, Any]]) -> None:
    """Issue 16, point 5. The rank that steps is refused; the other one learns why."""
    (skipped, told, end), (refused, _, other) = (reply["overflow_on_one_stage"] for reply in two)
    assert (end, other) == ("None", "None")
    assert skipped == "None"
    assert refused.startswith("PlanError: torch's GradScaler looks for overflows")
    assert told.startswith("ReduceError: a step failed on another rank")
    assert "rank 1: PlanError: torch's GradScaler" in told


@on(TWO)
def of_module() -> Any:
    """Somebody has asked for what to step, to count it, and steps the module's parameters."""
    found = {}
    for name, options in {"rows": {}, "copies": {"master_dtype": torch.float64}}.items():
        module = stage(w=(4,))
        by = (
            By("dp", SHARD) if name == "rows" else pipegrad.handlers.resolve("data-parallel").plugin
        )
        sync = alone(module, by, **options)
        assert len(sync.optimizer_parameters()) == 1
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        compute(sync, lambda module=module: give(module, w=1.0))  # type: ignore[misc]
        refused = outcome(optimizer.step)
        optimizer = torch.optim.SGD(sync.optimizer_parameters(), lr=1.0)
        compute(sync, lambda module=module: give(module, w=1.0))  # type: ignore[misc]
        optimizer.step()  # that step was lost; what was meant is possible in the next
        sync.publish()
        sync.wait_parameters()
        found[name] = refused, module.get_parameter("w").tolist()
    return found


def test_an_optimizer_of_what_is_not_stepped_is_refused(two: list[dict[str, Any]]) -> None:
    """Issue 16, point 10 (1.14). Nothing moved, without a word."""
    words = (
        "StepError: an optimizer steps '0.w' itself, but its gradient is in a shard or in a copy"
    )
    for reply in two:
        for name, value in {"rows": -2.0, "copies": -1.0}.items():
            said, values = reply["of_module"][name]
            assert said.startswith(words)
            assert values == [value] * 4


@on(TWO)
def owner() -> Any:
    """The module's parameters are right for an owner: others have no gradient to step."""
    module = stage(w=(4,))
    sync = alone(module, By("dp", OWNER))
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    assert sync.optimizer_parameters()
    compute(sync, lambda: give(module, w=1.0))
    optimizer.step()
    sync.publish()
    sync.wait_parameters()
    return module.get_parameter("w").tolist()


def test_an_owner_may_step_the_modules_parameters(two: list[dict[str, Any]]) -> None:
    """Issue 16, point 10 (1.14)."""
    assert [reply["owner"] for reply in two] == [[-2.0] * 4] * 2


@on(TWO)
def lbfgs() -> Any:
    module, copy = stage(w=(4,), own=(4,)), stage(w=(4,))
    on_stages, on_replicas = tied(module, "w"), replicated(copy)
    found = []
    for sync, its in ((on_stages, module), (on_replicas, copy)):
        optimizer = torch.optim.LBFGS(its.parameters(), lr=1.0)
        compute(sync, lambda its=its: give(its, w=1.0))  # type: ignore[misc]
        found.append(outcome(lambda optimizer=optimizer: optimizer.step(lambda: 1.0)))  # type: ignore[misc]
    return found


def test_an_optimizer_that_looks_at_the_whole_model_is_refused_on_stages(
    two: list[dict[str, Any]],
) -> None:
    """Issue 16, point 10 (1.11). Copies of a tie got other steps, and went apart."""
    for reply in two:
        refused, taken = reply["lbfgs"]
        assert refused.startswith("PlanError: LBFGS computes one step from all gradients")
        assert taken == "1.0"


def test_a_sync_may_go_while_torch_runs_its_hooks() -> None:
    """Its hook left torch's table in the middle of a loop: "OrderedDict mutated"."""
    other, topology = nn.Linear(2, 2), Topology.build(axes=(("pp", 1), ("dp", 1)))
    syncs = [GradientSync({0: stage(w=(4,))}, topology, handlers=[])]
    optimizer = torch.optim.SGD(other.parameters(), lr=1.0)
    hook = register_optimizer_step_pre_hook(lambda *_: syncs.clear())
    behind = register_optimizer_step_pre_hook(lambda *_: None)
    try:
        optimizer.step()
    finally:
        hook.remove()
        behind.remove()
    assert syncs == []


def test_a_sync_that_was_not_completed_leaves_other_optimizers_alone() -> None:
    """Its watch looked at main shards that had no tensor yet: AttributeError in any `step`."""
    topology = Topology.build(axes=(("pp", 1), ("dp", 1)))
    module, other = stage(w=(4,)), nn.Linear(2, 2)
    with mock.patch("pipegrad.gradients.sync.make_equal", side_effect=MemoryError("x")):
        with pytest.raises(MemoryError) as kept:  # keeps the frames, and so the sync
            GradientSync({0: module}, topology, handlers=[], master_dtype=torch.float64)
        torch.optim.SGD(other.parameters(), lr=1.0).step()
    assert str(kept.value) == "x"
