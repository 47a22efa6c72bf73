"""Pipelines of stages that differ by number, with skips or without; and a step of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

from pipegrad import Scheduler, Stage, Topology, schedules
from pipegrad.pipeline import steps
from pipegrad.pipeline.cells import Method

Tensor = torch.Tensor
WIDTH = 4
INTERLEAVED = "interleaved-1f1b"
SCHEDULES = ("gpipe", "1f1b", "eager-1f1b", "hop-aware-1f1b", INTERLEAVED)
SPLIT = ("zb-h1", "hop-aware-zb-h1", "zbv")
HEAD_FIRST = tuple(f"{name} head_w_first" for name in SPLIT)


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


class Matrices(Scale):
    """Weights at both ends: one is multiplied with what was received, and of the other's product
    the gradient is received."""

    def __init__(self, stage: int) -> None:
        super().__init__(stage)
        self.weight = nn.Parameter(torch.eye(WIDTH) + stage / 8)
        self.last = nn.Parameter(torch.eye(WIDTH) - stage / 16)

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        out = F.linear(torch.sin(F.linear(x, self.weight, self.bias)), self.last)
        return out if skip is None else out + skip


class ForkedMatrices(Matrices):
    def forward(self, x: Tensor, skip: Tensor | None = None) -> Any:
        return super().forward(x), F.linear(x, self.last)


def plain(stage: int) -> Stage:
    return Stage(Scale(stage), stage)


def matrices(stage: int) -> Stage:
    return Stage(Matrices(stage), stage)


def skips(stage: int) -> Stage:
    """All stages take the first one's skip: its gradients come from all ranks, and are summed."""
    if stage == 0:
        return Stage(Forks(stage), stage, ["x"], ["x", "skip"])
    return Stage(Scale(stage), stage, ["x", "skip"], ["x"])


def far_skips(stage: int) -> Stage:
    """All stages but the next one take the first one's skip."""
    return Stage(Scale(stage), stage) if stage == 1 else skips(stage)


def matrices_and_skips(stage: int) -> Stage:
    if stage == 0:
        return Stage(ForkedMatrices(stage), stage, ["x"], ["x", "skip"])
    return Stage(Matrices(stage), stage, ["x", "skip"], ["x"])


def make(
    pipeline: int,
    schedule: str,
    make_stage: Callable[[int], Stage] = plain,
    *,
    microbatches: int = 4,
    **options: Any,
) -> Scheduler:
    """Returns a Scheduler, with this rank's stages where the schedule wants them.

    Args:
        pipeline: How many ranks a pipeline has.
        schedule: A name, and behind it the options that are on.
        make_stage: Makes a stage, by number.
        microbatches: Of a step.
        **options: Of the Scheduler.
    """
    name, *flags = schedule.split()
    settings = dict[str, Any](dict.fromkeys(flags, True))
    if name.startswith("hop-aware"):
        settings |= {"hop_seconds": [0.2] * (pipeline - 1), "compute_seconds": 1.0}
    topology = Topology.create(pipeline=pipeline)
    built = schedules.build(name, num_ranks=pipeline, num_microbatches=microbatches, **settings)
    tied = {name for tie in options.get("tied", ()) for name in tie.values()}

    def start(number: int) -> Stage:
        """Copies of a tie start with the same bits."""
        stage = make_stage(number)
        for name, parameter in stage.module.named_parameters():
            if name in tied:
                nn.init.constant_(parameter, 0.5)
        return stage

    return Scheduler(
        [start(s) for s in topology.with_stages(built.stage_to_rank).local_stages],
        topology,
        schedule={"name": name, **settings},
        num_microbatches=microbatches,
        **{"loss_fn": lambda out, _: out.sum(), **options},
    )


def step(scheduler: Scheduler) -> float:
    """Takes a step; there are no gradients before."""
    x = torch.ones(scheduler.schedule.num_microbatches, WIDTH)
    for stage in scheduler.steps.pipeline.stages:
        stage.module.zero_grad()
    return float(scheduler.step(x, target=x).loss)


@contextmanager
def watched(note: Callable[[str, str], object]) -> Iterator[None]:
    """Tells when a compute of a step inside starts and ends: "start" or "end", "0F1"."""

    def in_range(name: str, compute: Method, *arguments: int) -> None:
        action = name.removeprefix("pipegrad ")
        note("start", action)
        compute(*arguments)
        note("end", action)

    with (
        mock.patch.object(steps, "is_profiled", return_value=True),
        mock.patch.object(steps, "record_function", lambda name: partial(partial, in_range, name)),
    ):
        yield
