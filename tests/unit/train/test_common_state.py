"""Learning-rate schedules and updates go on from a checkpoint as if they had never stopped."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from pipegrad.gradients.sync import GradientSync
from pipegrad.train.checkpoint.checksums import DamageError
from pipegrad.train.checkpoint.common_state import CommonState
from pipegrad.train.checkpoint.packed import pack
from pipegrad.train.config import Config
from pipegrad.train.optimizer import make_learning_rate
from pipegrad.train.run.update import Update
from pipegrad.train.schema import Model, Optimizer

SCHEDULES: dict[str, list[dict[str, Any]]] = {
    "StepLR": [{"name": "StepLR", "step_size": 2}],
    "MultiStepLR": [{"name": "MultiStepLR", "milestones": [2, 5]}],
    "OneCycleLR": [{"name": "OneCycleLR", "max_lr": 0.5, "total_steps": 20}],
    "CyclicLR": [{"name": "CyclicLR", "base_lr": 0.1, "max_lr": 0.5, "step_size_up": 3}],
    "restarts": [{"name": "CosineAnnealingWarmRestarts", "T_0": 3}],
    "a row": [
        {"name": "LinearLR", "start_factor": 0.1, "total_iters": 4, "steps": 4},
        {"name": "CosineAnnealingLR", "T_max": 9},
    ],
}


class Run:
    """The parts of a run that have a state which all ranks share."""

    def __init__(self, schedule: list[dict[str, Any]], lr: float = 0.1) -> None:
        optimizer = Optimizer.model_validate(
            {"name": "SGD", "lr": lr, "momentum": 0.5, "schedule": schedule}
        )
        config = Config(model=Model(factory="a:b"), optimizer=optimizer)
        self.optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=lr, momentum=0.5)
        self.schedule = cast("LRScheduler", make_learning_rate(config, self.optimizer))
        self.update = Update(config, cast("GradientSync", None), self.optimizer, self.schedule)
        self.state = CommonState(config, self.optimizer, self.schedule, self.update)

    def options(self, number: int) -> list[tuple[float, float]]:
        """Returns learning rate and momentum of some steps."""
        found = []
        for _ in range(number):
            group = self.optimizer.param_groups[0]
            found.append((group["lr"], group["momentum"]))
            self.optimizer.step()
            self.schedule.step()
        return found


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_goes_on_to_the_bit(name: str) -> None:
    whole = Run(SCHEDULES[name]).options(12)
    first = Run(SCHEDULES[name])
    assert first.options(5) == whole[:5]
    second = Run(SCHEDULES[name])
    second.state.restore(first.state.packed(), 5)
    assert second.options(7) == whole[5:]


def test_another_schedule_makes_the_steps_that_were_not_skipped() -> None:
    first = Run(SCHEDULES["StepLR"])
    first.options(3)
    first.update.skipped = 2
    other = Run(SCHEDULES["restarts"], lr=0.2)
    whole = Run(SCHEDULES["restarts"], lr=0.2).options(6)
    other.state.restore(first.state.packed(), 5)
    assert other.update.skipped == 2
    assert other.options(3) == whole[3:]


def test_without_an_entry_the_steps_are_made_again() -> None:
    run = Run(SCHEDULES["StepLR"])
    run.state.restore(None, 4)
    assert run.options(2) == Run(SCHEDULES["StepLR"]).options(6)[4:]


def test_an_entry_of_another_version_is_damage() -> None:
    run = Run(SCHEDULES["StepLR"])
    with pytest.raises(DamageError, match="its 'common' is of another version: KeyError"):
        run.state.restore(pack({"update": {}}), 4)
    with pytest.raises(DamageError, match="its 'common' cannot be read: "):
        run.state.restore(torch.zeros(9, dtype=torch.uint8), 4)
