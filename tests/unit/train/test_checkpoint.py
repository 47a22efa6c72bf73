"""What a checkpoint has of a run: places along the mesh, and what all ranks share."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from pipegrad import Topology
from pipegrad.comm import plain
from pipegrad.gradients.main_params import Locations
from pipegrad.gradients.sync import GradientSync
from pipegrad.plan.options import GradientOptions
from pipegrad.plan.plan import make_plans
from pipegrad.train.config import Config
from pipegrad.train.optimizer import Update, make_learning_rate
from pipegrad.train.schema import Model, Optimizer
from pipegrad_handlers.data_parallel import DataParallel
from pipegrad_handlers.expert_parallel import ExpertParallel
from pipegrad_handlers.sequence_parallel import SequenceParallel
from tests.support.gradients.plans import Handlers, manifest

MODEL = manifest(["whole", "cut", "experts", "experts.whole"])
WHOLE = ("sequence-parallel", SequenceParallel(parameters=["*whole"]))


def places(
    axes: tuple[tuple[str, int], ...], rank: int, handlers: Handlers, data: tuple[str, ...]
) -> list[str]:
    """Returns the place of each parameter, and of buffers."""
    view = Topology.build(axes=axes, rank=rank, data=data)
    plan = make_plans(MODEL, view, handlers, GradientOptions(bucket_bytes=0), ranks=[rank])[rank]
    found = Locations(view, plan)
    return [found.of(record.key) for record in MODEL.records(view)] + [found.of()]


def test_a_place_names_the_dimensions_along_which_copies_differ() -> None:
    axes = (("pp", 1), ("dp", 2), ("ep", 2), ("tp", 2))
    handlers = [("expert-parallel", ExpertParallel()), WHOLE]
    for rank, (ep, tp) in {1: (0, 1), 6: (1, 0)}.items():
        assert places(axes, rank, handlers, ("dp", "ep")) == [
            "", f"[tp={tp}]", f"[ep={ep},tp={tp}]", f"[ep={ep}]", f"[ep={ep},tp={tp}]"
        ]  # fmt: skip
    ones = tuple((name, 1) for name, _ in axes)
    assert places(ones, 0, handlers, ("dp", "ep")) == [""] * 5
    # Replicas have no place, though nobody reduces them, but experts have.
    two = (("pp", 1), ("dp", 2))
    assert places(two, 1, [], ("dp",)) == [""] * 5
    assert places(two, 1, [("data-parallel", DataParallel())], ("dp",)) == [""] * 5
    along = [("expert-parallel", ExpertParallel(axis="dp"))]
    assert places(two, 1, along, ("dp",)) == ["", "", "[dp=1]", "[dp=1]", "[dp=1]"]


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
    second, state = Run(SCHEDULES[name]), plain.loads(plain.dumps(first.update.state_dict()))
    second.update.load_state_dict(state)
    second.update.follow(5)
    assert second.options(7) == whole[5:]


def test_another_schedule_makes_the_steps_that_were_not_skipped() -> None:
    first = Run(SCHEDULES["StepLR"])
    first.options(3)
    first.update.skipped = 2
    other = Run(SCHEDULES["restarts"], lr=0.2)
    whole = Run(SCHEDULES["restarts"], lr=0.2).options(6)
    other.update.load_state_dict(first.update.state_dict())
    other.update.follow(5)
    assert other.update.skipped == 2
    assert other.options(3) == whole[3:]
