"""Recorded steps on a card: spans of the device, and no wait of the host inside of a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import pipegrad
from pipegrad import Scheduler, Stage, Topology
from pipegrad.simulation.timeline import COMPUTE
from pipegrad.testing import run_ranks
from tests.support.gpu.card import GPU, SLEEP_MS, sleep

pytestmark = GPU
MICROBATCHES = 4


class Sleeps(nn.Linear):
    """The device sleeps in each forward; the host does not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sleep(1)
        return super().forward(x)


def recorded() -> Any:
    device = torch.device("cuda", 0)
    stage = Stage(Sleeps(8, 8, device=device), 0)
    scheduler = Scheduler(
        [stage],
        Topology.create(pipeline=1, device_type="cuda"),
        schedule="1f1b",
        num_microbatches=MICROBATCHES,
        loss_fn=lambda out, _: out.sum(),
    )
    optimizer = scheduler.optimizer(torch.optim.SGD, lr=0.1)
    x = torch.ones(MICROBATCHES, 8, device=device)

    def step() -> None:
        scheduler.step(x, target=x)
        optimizer.step()
        optimizer.zero_grad()

    step()
    with pipegrad.record(scheduler, steps=2) as recording:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(3):
            step()
        torch.cuda.set_sync_debug_mode("default")
    timeline = recording.timeline()
    costs = pipegrad.measure_costs(scheduler, x, target=x, optimizer=optimizer)
    scheduler.close()
    return timeline, costs


@pytest.fixture(scope="module")
def found() -> Any:
    return run_ranks(recorded, 1)[0]


def test_spans_are_those_of_the_device(found: Any) -> None:
    timeline, _ = found
    for number in range(2):
        part = timeline.of_step(number)
        spans = [s for s in part.on_rank(0) if s.kind in COMPUTE]
        assert len(spans) == 2 * MICROBATCHES
        forwards = [s.seconds for s in spans if s.kind == "F"]
        # The host enqueued them all in no time.
        assert min(forwards) > 0.5 * SLEEP_MS / 1e3
        total = sum(s.seconds for s in part.on_rank(0))
        assert total == pytest.approx(part.seconds, rel=0.01)
        assert sum(s.kind == "optimizer" for s in part.on_rank(0)) == 1


def test_costs_are_those_of_the_device(found: Any) -> None:
    _, costs = found
    (stage,) = costs.stages
    assert stage.forward_seconds > 0.5 * SLEEP_MS / 1e3 > stage.backward_seconds > 0
