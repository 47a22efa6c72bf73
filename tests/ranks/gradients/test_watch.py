"""Optimizers of torch: those that would make another model of copies or shards are refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import pipegrad
from pipegrad import GradientSync
from tests.support.gradients.cases import ALONE, give, outcome, replicated, stage, tied
from tests.support.gradients.placements import OWNER, SHARD, By, Job, alone, compute
from tests.support.ranked import gathered


def heard(run: Callable[[], object]) -> str:
    """Returns the warning of a call, or its outcome if it does not warn."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        what = outcome(run)
    return str(told[0].message) if told else what


def scaled(
    sync: GradientSync,
    module: nn.Module,
    *,
    enabled: bool = True,
    clips: bool = False,
    **options: Any,
) -> str:
    """A step by torch's GradScaler."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, enabled=enabled)
    scaler.scale(torch.ones(()))
    optimizer = torch.optim.SGD(sync.optimizer_parameters(), lr=1.0, **options)
    compute(sync, partial(give, module, w=1.0))
    if clips:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
    return heard(lambda: scaler.step(optimizer))


@pytest.mark.ranks(2)
def test_torchs_scaler_of_a_fused_optimizer_is_refused_where_gradients_differ() -> None:
    """Issue 16, point 5. One rank skipped a step that others made; nobody said so."""
    rows, own = stage(w=(4096,)), stage(w=(4,))  # so that each rank has a row
    refused = (
        "PlanError: torch's GradScaler looks for overflows in the gradients of this rank alone"
    )
    assert scaled(alone(rows, By("dp", SHARD)), rows, fused=True).startswith(refused)
    assert scaled(tied(own), own, fused=True).startswith(refused)
    # An optimizer that is not fused does not know of the scaler. torch's clipping gives it away.
    warned = gathered(scaled(tied(own), own, clips=True))  # one rank warns for the job
    words = "torch's clip_grad_norm_ and its GradScaler know only the gradients of this"
    assert sum(words in each for each in warned) == 1
    # Replicas all see the same overflow; a scaler that is off decides nothing.
    module, rows = stage(w=(4,)), stage(w=(4096,))
    assert scaled(replicated(module), module, fused=True) == "None"
    assert module.get_parameter("w").tolist() == [-0.5] * 4
    assert scaled(alone(rows, By("dp", SHARD)), rows, fused=True, enabled=False) == "None"


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("placed", "options", "value"),
    [(SHARD, {}, -2.0), ("data-parallel", {"master_dtype": torch.float64}, -1.0)],
    ids=["rows", "copies"],
)
def test_an_optimizer_of_what_is_not_stepped_is_refused(
    placed: Any, options: dict[str, Any], value: float
) -> None:
    """Issue 16, point 10 (1.14). Nothing moved, without a word, if somebody had asked for rows."""
    job = Job(placed, **options)
    job.compute()
    assert outcome(torch.optim.SGD(job.module.parameters(), lr=1.0).step).startswith(
        "StepError: an optimizer steps '0.w' itself, but its gradient is in a shard or in a copy"
    )
    job.step()  # that step was lost; what was meant is possible in the next
    assert job.arrived == [value]


@pytest.mark.ranks(2)
def test_an_owner_may_step_its_parameters_but_none_the_whole_model_on_stages() -> None:
    """Issue 16, point 10 (1.14). Others have no gradient to step."""
    job = Job(OWNER)  # which has asked for what to step
    job.optimizer = torch.optim.SGD(job.module.parameters(), lr=1.0)
    job.step()
    assert job.arrived == [-2.0]
    # An optimizer that looks at the whole model is refused on stages. Issue 16, point 10 (1.11).
    # Copies of a tie got other steps, and went apart.
    module, copy = stage(w=(4,), own=(4,)), stage(w=(4,))
    for sync, its, said in (
        (tied(module, "w"), module, "PlanError: LBFGS computes one step from all gradients"),
        (replicated(copy), copy, "1.0"),
    ):
        optimizer = torch.optim.LBFGS(its.parameters(), lr=1.0)
        compute(sync, partial(give, its, w=1.0))
        assert outcome(partial(optimizer.step, lambda: 1.0)).startswith(said)


def test_a_sync_that_goes_or_fails_leaves_other_optimizers_alone() -> None:
    """Its hook left torch's table in the middle of a loop: "OrderedDict mutated"."""
    other = nn.Linear(2, 2)
    syncs = [GradientSync({0: stage(w=(4,))}, ALONE, handlers=[])]
    optimizer = torch.optim.SGD(other.parameters(), lr=1.0)
    hook = register_optimizer_step_pre_hook(lambda *_: syncs.clear())
    behind = register_optimizer_step_pre_hook(lambda *_: None)
    try:
        optimizer.step()
    finally:
        hook.remove()
        behind.remove()
    assert syncs == []
    # A sync that was not completed leaves other optimizers alone. Its watch looked at main shards
    # that had no tensor yet: AttributeError in any `step`.
    module, other = stage(w=(4,)), nn.Linear(2, 2)
    with mock.patch("pipegrad.gradients.sync.make_equal", side_effect=MemoryError("x")):
        with pytest.raises(MemoryError) as kept:  # keeps the frames, and so the sync
            GradientSync({0: module}, ALONE, handlers=[], master_dtype=torch.float64)
        torch.optim.SGD(other.parameters(), lr=1.0).step()
    assert str(kept.value) == "x"


# An optimizer of torch that a loop made before the cut: right, or refused.

X = torch.arange(32.0).reshape(8, 4) / 32


def trained(*, early: bool) -> list[Tensor]:
    """Returns this rank's parameters after three steps."""
    torch.manual_seed(0)
    model, topology = (
        nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))),
        pipegrad.Topology.create(pipeline=2),
    )
    plain = torch.optim.AdamW(model.parameters(), lr=0.1)
    cut = pipegrad.cut(model, 2)
    options: Any = {"schedule": "1f1b", "num_microbatches": 2, "loss_fn": nn.MSELoss()}
    with closing(pipegrad.Scheduler(cut, topology, **options)) as scheduler:
        optimizer = plain if early else scheduler.optimizer(torch.optim.AdamW, lr=0.1)
        for number in range(3):
            x = X * (1 + number + topology.coordinate("dp"))
            scheduler.step(x, target=x.flip(0))
            optimizer.step()
            optimizer.zero_grad()
        return [x.detach() for x in cut.modules[topology.coordinate("pp")].parameters()]


@pytest.mark.ranks(4)
def test_it_trains_as_the_schedulers_own_does_with_the_default_handlers() -> None:
    assert all(map(torch.equal, trained(early=True), trained(early=False)))
