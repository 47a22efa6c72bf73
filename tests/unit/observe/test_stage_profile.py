"""profile_stages: stages of one process, which stay as they were."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipegrad import Stage
from pipegrad.errors import ScheduleError
from pipegrad.observe.stage_profile import profile_stages

ROWS, WIDTH, FLOAT = 8, 16, 4
VALUE = FLOAT * ROWS * WIDTH
SLOW_SECONDS = 0.02


class Forks(nn.Module):
    """Makes two values of one, and counts batches."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.seen += 1
        return self.linear(x), (x > 0).long()


class Joins(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        time.sleep(SLOW_SECONDS)
        out: Tensor = self.linear(x) * mask
        return out


def stages(**options: Any) -> list[Stage]:
    return [
        Stage(Forks(), 0, ["x"], ["x", "mask"]),
        Stage(Joins(), 1, ["x", "mask"], ["x"], **options),
    ]


def profiled(own: list[Stage], **options: Any) -> Any:
    x = torch.randn(ROWS, WIDTH)
    given = {"target": x, "loss_fn": nn.MSELoss(), "repeats": 2, **options}
    return profile_stages(own, {"x": x}, **given)


def test_times_and_bytes_are_those_of_each_stage() -> None:
    fast, slow = profiled(stages())
    assert slow.forward_seconds > SLOW_SECONDS > fast.forward_seconds > 0
    assert fast.outputs == {"x": VALUE, "mask": 2 * VALUE}
    assert slow.outputs == {}
    assert fast.parameter_bytes == fast.gradient_bytes == FLOAT * (WIDTH + 1) * WIDTH
    # It holds its outputs; its input is the caller's.
    assert fast.activation_bytes == 3 * VALUE
    # What the loss saved of its own. What it received is in receive buffers.
    assert slow.activation_bytes == VALUE


def test_nothing_of_a_stage_changes() -> None:
    own = stages()
    before = [t.clone() for stage in own for t in stage.module.state_dict().values()]
    random = torch.get_rng_state()
    profiled(own)
    after = [t for stage in own for t in stage.module.state_dict().values()]
    assert all(map(torch.equal, before, after))
    assert all(p.grad is None for stage in own for p in stage.module.parameters())
    assert not torch.equal(random, torch.get_rng_state())  # `profiled` drew its batch
    random = torch.get_rng_state()
    profile_stages(own[:1], {"x": torch.ones(ROWS, WIDTH)}, repeats=1)
    assert torch.equal(random, torch.get_rng_state())


def test_a_split_backward_has_a_part_that_waits() -> None:
    for stage in profiled(stages(), splits=True):
        assert stage.backward_seconds > stage.weight_seconds > 0
        assert stage.factor_bytes > 0
    assert all(stage.factor_bytes == stage.weight_seconds == 0 for stage in profiled(stages()))


def test_a_stage_that_recomputes_holds_nothing_of_its_own() -> None:
    _, slow = profiled(stages(recompute=True))
    assert slow.activation_bytes == 0
    assert slow.backward_seconds > SLOW_SECONDS
    frozen = stages()
    for stage in frozen:
        stage.module.requires_grad_(False)
    assert all(costs.gradient_bytes == 0 for costs in profiled(frozen))  # they have no backward


def test_what_is_missing_is_named() -> None:
    own = stages()
    with pytest.raises(ScheduleError, match=r"stage 0 takes \['x'\].*microbatch has \['y'\]"):
        profile_stages(own, {"y": 1})
    with pytest.raises(ScheduleError, match=r"stages \[1\]: expected all"):
        profile_stages(own[1:], {})
    with pytest.raises(ScheduleError, match=r"stages \[\]"):
        profile_stages([], {})
