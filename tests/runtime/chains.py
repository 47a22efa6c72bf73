"""Pipelines of stages that differ by number, with skips or without; and a step of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from pipegrad import Scheduler, Stage, Topology

Tensor = torch.Tensor
WIDTH = 4
INTERLEAVED = "interleaved-1f1b"
SCHEDULES = ("gpipe", "1f1b", "eager-1f1b", "hop-aware-1f1b", INTERLEAVED)


class Scale(nn.Module):
    """Two parameters, different in each stage; takes a skip too, if there is one."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.stage = stage
        self.weight = nn.Parameter(torch.full((WIDTH,), 1.0 + stage / 8))
        self.bias = nn.Parameter(torch.full((WIDTH,), 1.0 + stage / 16))

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        out = x * self.weight + self.bias
        return out if skip is None else out + skip * self.bias


class Forks(Scale):
    """A stage that makes a value and a skip."""

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Any:
        return super().forward(x), 2 * x * self.bias


def plain(stage: int) -> Stage:
    return Stage(Scale(stage), stage)


def skips(stage: int) -> Stage:
    """All stages take the first one's skip: its gradients come from all ranks, and are summed."""
    if stage == 0:
        return Stage(Forks(stage), stage, ["x"], ["x", "skip"])
    return Stage(Scale(stage), stage, ["x", "skip"], ["x"])


def make(
    pipeline: int,
    schedule: str,
    make_stage: Callable[[int], Stage] = plain,
    *,
    microbatches: int = 4,
    **options: Any,
) -> Scheduler:
    """Returns a Scheduler, with as many stages a rank as the schedule wants."""
    topology = Topology.create(pipeline=pipeline)
    num_stages = pipeline * (1 + (schedule == INTERLEAVED))
    places = range(topology.coordinate("pp"), num_stages, pipeline)
    spec: Mapping[str, Any] = {"name": schedule}
    if schedule == "hop-aware-1f1b":
        spec = {**spec, "hop_seconds": [0.2] * (pipeline - 1), "compute_seconds": 1.0}
    return Scheduler(
        [make_stage(stage) for stage in places],
        topology,
        schedule=spec,
        num_microbatches=microbatches,
        loss_fn=lambda out, _: out.sum(),
        **options,
    )


def step(scheduler: Scheduler) -> float:
    """Takes a step; there are no gradients before."""
    x = torch.ones(scheduler.schedule.num_microbatches, WIDTH)
    for stage in scheduler._stages.values():
        stage.module.zero_grad()
    return float(scheduler.step(x, target=x).loss)
