"""What a Scheduler holds of a step's microbatches: as much as its proof says, on each rank.

A stage is sin between two matrices. Autograd keeps what sin is taken of for the inputs' gradients;
what the second matrix is multiplied with is kept for that matrix' gradient.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from pipegrad import Scheduler, Stage
from pipegrad.pipeline.transfers import Receive
from tests.support.gradients.cases import rank
from tests.support.pairwise import pairwise
from tests.support.pipeline.chains import INTERLEAVED, WIDTH, make, watched

pytestmark = pytest.mark.ranks(2)
SCHEDULES = ("gpipe", "1f1b", "eager-1f1b", INTERLEAVED, "zb-h1", "zbv", "v-half", "v-min")
MICROBATCHES = {2: (1, 2, 4, 7), 4: (1, 4, 8, 11)}


@dataclass
class Held:
    """Storages of a rank: what each forward saves and multiplies with, and what is received."""

    saved: list[StorageWeakRef] = field(default_factory=list)
    operands: list[StorageWeakRef] = field(default_factory=list)
    received: list[StorageWeakRef] = field(default_factory=list)
    peaks: Counter[str] = field(default_factory=Counter)

    @property
    def alive(self) -> dict[str, int]:
        kinds = {"saved": self.saved, "operands": self.operands, "received": self.received}
        return {name: sum(not ref.expired() for ref in refs) for name, refs in kinds.items()}


held = Held()  # by this process


def note(_when: str, _action: str) -> None:
    for name, number in held.alive.items():
        held.peaks[name] = max(held.peaks[name], number)


class Sine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found = self.first(x)
        out = torch.sin(found)
        if torch.is_grad_enabled():
            held.saved.append(StorageWeakRef(found.untyped_storage()))
            held.operands.append(StorageWeakRef(out.untyped_storage()))
        made: Tensor = self.second(out)
        return made


def step(scheduler: Scheduler) -> None:
    x = torch.ones(scheduler.schedule.num_microbatches, WIDTH)
    scheduler.step(x, target=x)
    for stage in scheduler.steps.pipeline.stages:
        stage.module.zero_grad()


def measured(
    schedule: str, microbatches: int, module: type[nn.Module] = Sine, **of_stage: Any
) -> tuple[Counter[str], Scheduler]:
    """Takes three steps; returns the peaks of the last, behind which nothing is held."""
    global held  # noqa: PLW0603 - modules of this process note what they make
    options: dict[str, Any] = {"microbatches": microbatches, "handlers": ["noop"]}
    begin = Receive.__init__

    def noted(receive: Receive, key: Any, memory: Tensor, like: Any) -> None:
        held.received.append(StorageWeakRef(memory.untyped_storage()))
        begin(receive, key, memory, like)

    with watched(note), mock.patch.object(Receive, "__init__", noted):
        scheduler = make(
            dist.get_world_size(), schedule, lambda s: Stage(module(), s, **of_stage), **options
        )
        for _ in range(3):
            held = Held()
            step(scheduler)
    scheduler.close()
    assert held.alive == {"saved": 0, "operands": 0, "received": 0}
    return held.peaks, scheduler


@pytest.mark.parametrize(
    ("schedule", "microbatches"),
    [
        pytest.param(schedule, MICROBATCHES[ranks][which], marks=pytest.mark.ranks(ranks))
        for schedule, which, ranks in pairwise(
            SCHEDULES,
            range(4),
            MICROBATCHES,
            allowed=lambda schedule, which, ranks: (
                schedule != INTERLEAVED or MICROBATCHES[ranks][which] % ranks == 0
            ),
        )
    ],
)
def test_as_much_is_held_as_is_proven_and_then_nothing(schedule: str, microbatches: int) -> None:
    peaks, scheduler = measured(schedule, microbatches)
    proof = scheduler.proof
    assert peaks["saved"] == proof.live_graphs[rank()]
    assert peaks["operands"] == proof.live_activations[rank()]
    assert 0 < peaks["received"] <= proof.receive_buffers[rank()]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_a_stage_that_recomputes_holds_nothing_between_forward_and_backward(schedule: str) -> None:
    peaks, _ = measured(schedule, 7, recompute=True)
    waiting = 1 + rank() if schedule == "zb-h1" else 0  # its weights' gradients are `rank` late
    assert (peaks["saved"], peaks["operands"]) == (0, waiting)
    assert len(held.saved) == 2 * 7  # each forward ran again once
