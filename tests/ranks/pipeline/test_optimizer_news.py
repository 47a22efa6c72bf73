"""An optimizer, or a schedule of its rate, that is stepped on some ranks alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, StepLR

import pipegrad
from pipegrad import Scheduler
from pipegrad.errors import StepError
from tests.support.gradients.cases import rank
from tests.support.pipeline.layers import one_stage_each
from tests.support.ranked import gathered

pytestmark = pytest.mark.ranks(4)  # 0 and 1 are replicas of stage 0, 2 and 3 of stage 1
RATE = "has changed on ranks {}, and not on ranks {}, whose stages go on as they were: call lr_sche"
STEP = "an optimizer has stepped on ranks {}, and not on ranks {}, whose stages go on as they were"
Made = tuple[Scheduler, torch.optim.Optimizer, nn.Module]


def made(how: str) -> Made:
    torch.manual_seed(0)
    modules = [nn.Linear(4, 4) for _ in range(2)]
    modules[0].requires_grad_(how != "frozen")
    # Copies would drift apart, which is an error of its own.
    scheduler = one_stage_each(*modules, num_microbatches=2, check_every=0)
    module = modules[scheduler.topology.coordinate("pp")]
    rate: Any = torch.tensor(0.1) if how == "tensor" else 0.1
    if how == "part":  # of the last stage alone, made on all ranks
        return scheduler, torch.optim.AdamW(modules[1].parameters(), lr=rate), module
    if how in ("plain", "frozen"):
        return scheduler, torch.optim.AdamW(module.parameters(), lr=rate), module
    return scheduler, scheduler.optimizer(torch.optim.AdamW, lr=rate), module


def trained(how: str, schedules: bool, steps: bool, make: Callable[..., LRScheduler]) -> list[str]:
    """Returns what six steps warn of on this rank, and how often."""
    scheduler, optimizer, module = made(how)
    if how == "by hand":
        optimizer.param_groups[0]["lr"] = 0.1 * (1 + rank())  # another one for each stage
    rates, x = make(optimizer), torch.ones(4, 4)
    with closing(scheduler), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(6):
            failing = how == "failed" and number == 2 and rank() == 3
            with suppress(StepError):
                _ = scheduler.step(x[:, :3] if failing else x, target=x).loss
                scheduler.evaluate(x, target=x)
                if steps:
                    optimizer.step()
            module.zero_grad()
            optimizer.zero_grad()
            if schedules:
                rates.step()
    warned = [w for w in caught if "on all ranks" in str(w.message)]
    assert all(w.filename == __file__ for w in warned)  # not that of functools
    return [str(w.message) for w in warned]


def constant(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return StepLR(optimizer, 100)


def cosine(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return CosineAnnealingLR(optimizer, 6)


# Where a schedule steps, where the optimizer does, and what is warned of.
CASES: dict[str, tuple[str, set[int], set[int], str]] = {
    "one rank": ("named", {2}, {0, 1, 2, 3}, RATE.format([2], [0, 1, 3])),
    "one stage": ("named", {0, 1}, {0, 1, 2, 3}, RATE.format([0, 1], [2, 3])),
    "plain": ("plain", {0}, {0, 1, 2, 3}, RATE.format([0], [1, 2, 3])),
    "a rate that is a tensor": ("tensor", {3}, {0, 1, 2, 3}, RATE.format([3], [0, 1, 2])),
    "the optimizer": ("named", set(), {0, 1}, STEP.format([0, 1], [2, 3])),
    "everywhere": ("named", {0, 1, 2, 3}, {0, 1, 2, 3}, ""),
    "nowhere": ("named", set(), {0, 1, 2, 3}, ""),
    "a rate for each stage": ("by hand", {0, 1, 2, 3}, {0, 1, 2, 3}, ""),
    "a part, everywhere": ("part", {0, 1, 2, 3}, {0, 1, 2, 3}, ""),
    "a part, where it is": ("part", set(), {2, 3}, STEP.format([2, 3], [0, 1])),
    "a part's rate, where it is": ("part", {2, 3}, {0, 1, 2, 3}, RATE.format([2, 3], [0, 1])),
    "a frozen stage": ("frozen", {2, 3}, {2, 3}, ""),
    "a step that fails on one rank": ("failed", {0, 1, 2, 3}, {0, 1, 2, 3}, ""),
}


@pytest.mark.parametrize("name", CASES)
def test_what_optimizers_do_on_some_ranks_alone_is_warned_of_once(name: str) -> None:
    how, schedules, steps, words = CASES[name]
    make = cosine if schedules else constant
    said = gathered(trained(how, rank() in schedules, rank() in steps, make))
    assert [len(each) for each in said] == [bool(words), 0, 0, 0], said
    assert words in "".join(said[0])


def test_steps_that_accumulate_or_are_skipped_for_an_overflow_are_no_news() -> None:
    scheduler, optimizer, module = made("named")
    scaler = pipegrad.GradScaler(scheduler.sync, init_scale=2.0)
    x = torch.full((4, 4), 1.0 + rank() % 2)
    with closing(scheduler), warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(5):
            with scheduler.sync.accumulate():
                scheduler.step(x, target=x)
            result = scheduler.step(x, target=x)
            if number == 2 and rank() == 0:
                next(module.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert result.loss > 0
