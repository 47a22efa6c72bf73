"""Several optimizers as one do what each of them does alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, StepLR

from pipegrad.errors import PlanError
from pipegrad.gradients.named_optimizer import JoinedOptimizer, parts_in


def parameters() -> list[nn.Parameter]:
    made = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=made)) for shape in [(3, 4), (4, 2), (5,)]]


def optimizers(of: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    groups: list[dict[str, Any]] = [{"params": of[:1], "lr": 0.3}, {"params": of[1:2]}]
    return [torch.optim.Muon(groups, lr=0.1), torch.optim.Adagrad(of[2:], lr=0.2)]


def step(of: list[nn.Parameter], *made: torch.optim.Optimizer) -> None:
    for parameter in of:
        parameter.grad = parameter.detach().sin()
    for optimizer in made:
        optimizer.step()


def equal(one: list[nn.Parameter], other: list[nn.Parameter]) -> bool:
    return all(map(torch.equal, one, other))


def test_it_steps_and_schedules_as_its_parts_do_alone() -> None:
    apart, together = parameters(), parameters()
    alone, joined = optimizers(apart), JoinedOptimizer(optimizers(together))
    schedules = [StepLR(one, 1, 0.5) for one in alone]
    schedule = StepLR(joined, 1, 0.5)
    for _ in range(3):
        step(apart, *alone)
        step(together, joined)
        schedule.step()
        for one in schedules:
            one.step()
    assert equal(apart, together)
    assert [group["lr"] for group in joined.param_groups] == [0.0375, 0.0125, 0.025]
    joined.zero_grad()
    assert all(parameter.grad is None for parameter in together)


def test_its_defaults_are_those_that_all_parts_have() -> None:
    """OneCycleLR refused two AdamW as one: it looks for their momentum among the defaults."""
    of = parameters()
    adams = [torch.optim.AdamW(of[:1], lr=0.3), torch.optim.AdamW(of[1:], lr=0.2)]
    joined = JoinedOptimizer(adams)
    assert joined.defaults == adams[0].defaults
    schedule = OneCycleLR(joined, [0.3, 0.2], total_steps=4)
    step(of, joined)
    schedule.step()
    assert "betas" not in JoinedOptimizer(optimizers(parameters())).defaults
    with pytest.raises(ValueError, match="must support momentum"):
        OneCycleLR(JoinedOptimizer(optimizers(parameters())), 0.3, total_steps=4)


def test_its_state_is_loaded_by_each_part() -> None:
    expected, found = parameters(), parameters()
    first = JoinedOptimizer(optimizers(expected))
    step(expected, first)
    saved = copy.deepcopy(first.state_dict())
    assert [len(saved["state"][number]) for number in range(3)] == [1, 1, 2]
    second = JoinedOptimizer(optimizers(found))
    for old, new in zip(expected, found, strict=True):
        new.data.copy_(old.data)
    second.load_state_dict(saved)
    for made, of in ((first, expected), (second, found)):
        made.param_groups[0]["lr"] = 0.7
        step(of, made)
    assert equal(expected, found)
    assert [type(part) for part in parts_in(second)] == [torch.optim.Muon, torch.optim.Adagrad]


def test_a_copy_steps_its_own_parameters() -> None:
    given = parameters()
    joined = JoinedOptimizer(optimizers(given))
    step(given, joined)
    twin = copy.deepcopy(joined)
    of_twin = [p for group in twin.param_groups for p in group["params"]]
    before = [p.detach().clone() for p in given]
    step(of_twin, twin)
    assert all(map(torch.equal, given, before))
    step(given, joined)
    assert equal(given, of_twin)


def test_it_runs_a_closure_once_and_takes_no_groups_later() -> None:
    given, losses = parameters(), [2.0, 3.0]
    joined = JoinedOptimizer(optimizers(given))
    assert joined.step(lambda: losses.pop(0)) == 2.0
    assert losses == [3.0]
    assert joined.step() is None
    with pytest.raises(PlanError, match="of Muon and Adagrad as one optimizer: make another"):
        joined.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert len(joined.param_groups) == 3
    alone = torch.optim.SGD(parameters(), lr=0.1)
    assert parts_in(alone) == (alone,)
