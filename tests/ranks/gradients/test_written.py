"""What is written where no other rank hears of it: parameters in forward, gradients later."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipegrad
from pipegrad import GradientSync
from tests.support.gradients.cases import (
    give,
    outcome,
    rank,
    replicated,
    scheduled,
    stage,
    step,
    tied,
)
from tests.support.gradients.placements import compute
from tests.support.ranked import gathered

OWNER = {"name": "pipeline-shared", "placement": "owner"}
FROM_RANK_0 = "a step failed on another rank: rank 0: StepError: "
Tune = Callable[[Tensor], object]


class Tuned(nn.Module):
    """A table whose forward may change its own weight."""

    def __init__(self, tune: Tune, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(float(rows * 2)).view(rows, 2) / 7)
        self.tune, self.num_forwards = tune, 0

    def forward(self, rows: Tensor) -> Tensor:
        self.num_forwards += 1
        self.tune(self.weight)
        return nn.functional.embedding(rows, self.weight)


def renorm(weight: Tensor) -> None:
    nn.functional.embedding(torch.tensor([3]), weight.detach(), max_norm=1.0)


def clamp(weight: Tensor) -> None:
    with torch.no_grad():
        weight.clamp_(-1.0, 1.0)


def leave(_weight: Tensor) -> None:
    pass


def late(weight: Tensor) -> None:
    def write(_gradient: Tensor) -> None:
        weight.detach().mul_(0.5)
        hook.remove()

    hook = weight.register_hook(write)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("tune", [renorm, clamp, late], ids=lambda tune: tune.__name__)
@pytest.mark.parametrize("way", ["tied", "owner", "data-parallel", "sharded", "owned", "master"])
def test_a_parameter_that_a_stage_writes_is_refused_on_all_ranks(way: str, tune: Tune) -> None:
    """One process writes it once for all; here one copy, or what nobody steps, was written."""
    is_tied = way in ("tied", "owner")
    options: Any = {"master_dtype": torch.float64} if way == "master" else {}
    # Rank 1 writes nothing.
    module = Tuned(tune if rank() == 0 else leave, 4)
    last = nn.Linear(2, 4, bias=False)
    last.weight = module.weight if is_tied else last.weight
    handler: Any = {"tied": "pipeline-shared", "owner": OWNER, "master": "data-parallel"}
    scheduler = scheduled(
        last if is_tied and rank() else module,
        pipeline=2 if is_tied else 1,
        tied=[{0: "weight", 1: "weight"}] if is_tied else (),
        handlers=[handler.get(way, way)],
        **options,
    )
    batch, target = torch.tensor([0, 1, 2, 3]), torch.ones(4, 4 if is_tied else 2)
    train = partial(scheduler.step, batch, target=target)
    told = gathered(
        outcome(train).replace("a step failed on another rank: rank 0: StepError: ", "")
    )
    assert told[0] == told[1]
    assert told[0].startswith("StepError: stage 0 has written '")
    # Nothing was lost: without the write, the next step is as ever.
    module.tune = leave
    scheduler.sync.optimizer_parameters()
    scheduler.sync.wait_parameters()
    scheduler.sync.synchronize_parameters()
    assert train().loss.isfinite()
    scheduler.close()


@pytest.mark.ranks(2)
def test_accumulated_steps_remember_what_was_written() -> None:
    module = stage(w=(4,))
    sync = replicated(module)
    for accumulates in (True, False):
        with sync.accumulate() if accumulates else nullcontext():
            sync.prepare()
            give(module, w=1.0)
            if accumulates and rank() == 1:
                clamp(module.get_parameter("w"))
            sync.stage_final(0)
            if accumulates:
                sync.finish()
    assert "stage 0 has written '0.w'" in outcome(sync.finish)
    assert step(sync, module, w=1.0) == {"w": [1.0] * 4}


@pytest.mark.ranks(2)
def test_a_parameter_of_one_rank_alone_may_be_written() -> None:
    """As in one process: nobody else holds it, and it is what is stepped."""
    first, last = Tuned(clamp, 4), nn.Linear(2, 2)
    scheduler = scheduled([first, last][rank()], pipeline=2)
    scheduler.step(torch.tensor([0, 1, 2, 3]), target=torch.ones(4, 2))
    assert rank() or float(first.weight.max()) == 1.0
    scheduler.close()


def torch_clips(_sync: GradientSync, module: nn.Module) -> None:
    nn.utils.clip_grad_norm_(module.parameters(), 0.1)


def sync_clips(sync: GradientSync, _module: nn.Module) -> None:
    sync.clip_grad_norm_(0.1)


def replaces(_sync: GradientSync, module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad = None if parameter.grad is None else parameter.grad * 0.5


def drops(_sync: GradientSync, module: nn.Module) -> None:
    module.zero_grad()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("change", "warns"),
    [(torch_clips, True), (replaces, True), (sync_clips, False), (drops, False)],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("own", [False, True], ids=["torch's optimizer", "sync's optimizer"])
def test_gradients_that_one_rank_changes_are_told_once(
    change: Callable[[GradientSync, nn.Module], None], own: bool, *, warns: bool
) -> None:
    """torch's clip_grad_norm_ knows this rank's norm alone. It trained so without a word."""
    module, other = stage(w=(4,), v=(3,), own=(2,)), nn.Linear(2, 2)
    sync = tied(module, "v", "w")
    kind = torch.optim.SGD
    optimizer: Any = sync.optimizer(kind, lr=0.0) if own else kind(module.parameters(), lr=0.0)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for _ in range(2):
            step(sync, module, w=1.0, v=1.0, own=1.0)
            change(sync, module)
            kind(other.parameters(), lr=0.0).step()  # knows nothing of it
            optimizer.step()
            optimizer.zero_grad()
            sync.wait_parameters()
    texts = [str(w.message) for w in heard]
    assert sum(gathered(len(texts))) == warns  # of all ranks, one
    begin = "the gradient of '0.w' was changed between finish() and optimizer.step()"
    assert all(text.startswith(begin) for text in texts), texts
    assert all(w.filename == __file__ for w in heard)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("own", [False, True], ids=["torch's optimizer", "sync's optimizer"])
def test_two_syncs_of_one_model_take_turns_and_do_not_add_up(own: bool) -> None:
    """As in a GAN. Warned of changed gradients; a tied one was counted twice if they added up."""
    module = stage(w=(4,), own=(2,))
    syncs = [tied(module, "w") for _ in range(2)]
    kind = torch.optim.SGD
    optimizer: Any = syncs[0].optimizer(kind, lr=0.5) if own else kind(module.parameters(), lr=0.5)
    for turn in range(4):
        step(syncs[turn % 2], module, w=1.0, own=1.0)
        refused = outcome(syncs[1 - turn % 2].prepare)
        begin = "StepError: the gradient of '0.w' is already reduced or divided"
        assert refused.startswith(begin), refused
        optimizer.step()  # a warning would be an error here
        module.zero_grad()
    with syncs[0].accumulate():
        syncs[0].prepare()
    assert "is inside accumulate(): end its step" in outcome(syncs[1].prepare)


@pytest.mark.ranks(2)
def test_the_same_gradients_on_all_ranks_may_be_clipped_by_torch() -> None:
    module = stage(w=(4,))
    sync, optimizer = replicated(module), torch.optim.SGD(module.parameters(), lr=0.0)
    step(sync, module, w=1.0)
    torch_clips(sync, module)
    optimizer.step()  # a warning would be an error here


@pytest.mark.ranks(2)
def test_a_scaler_that_unscales_has_changed_nothing() -> None:
    module = stage(w=(4,))
    sync = tied(module, "w")
    scaler, optimizer = pipegrad.GradScaler(sync), torch.optim.SGD(module.parameters(), lr=1.0)
    compute(sync, lambda: scaler.scale(module.get_parameter("w").sum()).backward())
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert module.get_parameter("w").tolist() == [-2.0] * 4
