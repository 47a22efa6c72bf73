"""Under `attach`, what fails on one rank ends the job on all ranks, soon, and is named."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    get_schedule_class,
)

import pipegrad
from pipegrad import GradientSync, Scheduler, Stage, Topology
from pipegrad.errors import PipegradError, PlanError, root_of
from pipegrad.testing import run_ranks
from tests.support.gradients.cases import rank
from tests.support.pipeline.pipelines import CPU
from tests.support.pipeline.scales import fails_in_backward, fails_in_forward
from tests.support.versions import needs_2_13

MICROBATCHES, WIDTH = 4, 3
PLACES = {
    "GPipe": (0, 1),
    "1F1B": (0, 1),
    "Interleaved1F1B": (0, 1, 0, 1),
    "InterleavedZeroBubble": (0, 1, 0, 1),
    "ZBVZeroBubble": (0, 1, 1, 0),
}


class Piece(nn.Module):
    """A layer that raises in a microbatch of its choice."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        torch.manual_seed(stage)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.trick: Callable[[Tensor], Tensor] | None = None
        self.left = 0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x).tanh()
        self.left -= 1
        return self.trick(out) if self.trick is not None and self.left < 0 else out


class Attached:
    """An attached schedule of torch, on two ranks."""

    def __init__(self, name: str, *, kind: Any = None) -> None:
        places = PLACES[name]
        at = Topology.create(pipeline=2, stage_to_rank=places)
        mine = [stage for stage, place in enumerate(places) if place == rank()]
        self.modules = {stage: Piece(stage) for stage in mine}
        stages = [PipelineStage(self.modules[s], s, len(places), CPU) for s in mine]
        self.loss_trick: Callable[[Tensor], Tensor] | None = None
        kind = kind or get_schedule_class(name)
        mine_of = stages[0] if len(places) == 2 else stages
        self.schedule = kind(mine_of, MICROBATCHES, loss_fn=self.loss)
        self.is_first, self.is_last = 0 in mine, len(places) - 1 in mine
        self.sync: GradientSync = pipegrad.attach(self.schedule, topology=at)
        torch.manual_seed(9)
        self.x, self.y = torch.randn(2, 2 * MICROBATCHES, WIDTH).unbind()

    def loss(self, out: Tensor, target: Tensor) -> Tensor:
        loss = (out - target).square().mean()
        return loss if self.loss_trick is None else self.loss_trick(loss)

    def run(self, *, evaluate: bool = False, x: Tensor | None = None) -> None:
        """Runs a step, without zeroing gradients."""
        args = ((self.x if x is None else x),) if self.is_first else ()
        target = {"target": self.y} if self.is_last else {}
        run = self.schedule.eval if evaluate else self.schedule.step
        run(*args, **target)

    def gradients(self) -> list[Tensor]:
        """Runs a step; returns its gradients and forgets them."""
        self.run()
        parameters = [p for m in self.modules.values() for p in m.parameters()]
        found = [p.grad.clone() for p in parameters if p.grad is not None]
        for parameter in parameters:
            parameter.grad = None
        return found


def raised(function: Callable[[], object]) -> str:
    """Returns what a step says: of what torch wraps, what was wrapped."""
    try:
        return f"fine: {function()}"
    except BaseException as error:  # noqa: BLE001 - an interrupt is raised as it is
        root = error if isinstance(error, PipegradError) else root_of(error)
        return f"{type(root).__name__}: {root}"


def same(found: list[Tensor], right: list[Tensor]) -> bool:
    return len(found) == len(right) and all(map(torch.equal, found, right))


@dataclass(frozen=True)
class Failure:
    """What one rank of an attached schedule does wrong, and what all ranks say then."""

    name: str = "1F1B"
    stage: int | None = None  # that raises; without one it is the loss
    left: int = 0  # microbatches before that
    trick: Callable[[Tensor], Tensor] | None = None
    rows: int | None = None  # of a batch, if others
    columns: int | None = None
    classes: int = 1  # of the targets, if other ones
    place: int = 0
    words: str = "no space left"
    evaluates: bool = False
    accumulates: bool = False
    is_first: bool = False  # in the first step, before stages know each other's shapes


def interrupts(_: Tensor) -> Tensor:
    raise KeyboardInterrupt


def exits(_: Tensor) -> Tensor:
    raise SystemExit(0)


def two_steps(case: Failure) -> tuple[list[str], float]:
    """Returns what a step says that fails on one rank, and the next one; and the seconds."""
    run = Attached(case.name)
    if not case.is_first:
        run.gradients()
    if run.is_first and case.place == 0:
        run.x = run.x[: case.rows, : case.columns]
    if run.is_last and case.classes > 1:
        run.y = run.y[:, :1].expand(-1, case.classes)
    if case.stage is None:
        run.loss_trick = case.trick
    elif case.stage in run.modules:
        run.modules[case.stage].trick, run.modules[case.stage].left = case.trick, case.left
    began, said = time.monotonic(), list[str]()
    with run.sync.accumulate() if case.accumulates else nullcontext():
        said.append(raised(partial(run.run, evaluate=case.evaluates)))
    said.append(raised(run.run))
    return said, time.monotonic() - began


@pytest.mark.parametrize(
    "case",
    [
        Failure("GPipe", 0, 2, fails_in_forward),
        Failure("1F1B", 1, 0, fails_in_forward, place=1),
        Failure("Interleaved1F1B", 1, 1, fails_in_backward, place=1),
        pytest.param(
            Failure("InterleavedZeroBubble", trick=fails_in_forward, place=1), marks=needs_2_13
        ),
        pytest.param(Failure("ZBVZeroBubble", 3, 1, fails_in_backward), marks=needs_2_13),
        Failure("1F1B", 1, 0, interrupts, place=1, words="KeyboardInterrupt"),
        Failure("GPipe", 0, 1, exits, words=r"SystemExit(: 0|\(0\))"),
        Failure(columns=2, words="must be multiplied|cannot be multiplied|shape"),
        # torch 2.11 looks itself.
        Failure(rows=4, words=r"an output is torch.float32 \[1, 3\], and was .* \[2, 3\] |mism"),
        Failure(classes=7, place=1, words="size"),
        Failure("1F1B", 0, 2, fails_in_forward, evaluates=True),
        Failure("1F1B", 1, 3, fails_in_forward, place=1, accumulates=True),
        Failure(rows=3, words="Expecting 4 arg_mbs but got 3", is_first=True),
        Failure("Interleaved1F1B", 1, 0, fails_in_forward, place=1, is_first=True),
    ],
    ids=lambda case: f"{case.name} {case.words.partition('|')[0]}",
)
def test_what_fails_on_one_rank_ends_the_job_on_all(case: Failure) -> None:
    """Issue 16, point 3: the others waited in torch's receive until their time-out."""
    for at, (said, seconds) in enumerate(run_ranks(two_steps, 2, case)):
        assert seconds < 60
        is_interrupt = at == case.place and re.match("KeyboardInterrupt|SystemExit", said[0])
        for words in said[bool(is_interrupt) :]:
            assert words.startswith("StallError: "), said
            assert f"rank {case.place}" in words
            assert re.search(case.words, words), said


class NoReduceGrad(ScheduleInterleaved1F1B):
    """Its order of actions is written by hand, without REDUCE_GRAD: as torch's tests have it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        order: Any = self.pipeline_order_with_comms
        self.pipeline_order_with_comms = {
            rank: [a for a in actions if a.computation_type.name != "REDUCE_GRAD"]
            for rank, actions in order.items()
        }


@pytest.mark.ranks(2)
def test_a_schedule_without_reduce_grad_ends_its_stages_with_the_step() -> None:
    """Issue 16, point 12: it ended after the whole step, in "finish() before stage_final()"."""
    right = Attached("Interleaved1F1B")
    gradients = [right.gradients() for _ in range(2)]
    right.sync.close()
    run = Attached("Interleaved1F1B", kind=NoReduceGrad)
    for expected in gradients:
        assert same(run.gradients(), expected)
    run.sync.close()


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        return ((out - target) * self.temperature).square().mean()

    def of(self, out: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = self(out, target)
        return loss


@pytest.mark.ranks(2)
@pytest.mark.parametrize("who", ["module", "method", "module of a Scheduler"])
def test_a_loss_with_parameters_is_refused_over_replicas(who: str) -> None:
    """Issue 16, point 10 (1.17): its gradients differed between replicas, without a word."""
    at, loss = Topology.create(pipeline=1), Weighted().of if who == "method" else Weighted()
    made: Callable[[], object]
    if who == "module of a Scheduler":
        options: Any = {"schedule": "gpipe", "num_microbatches": 2, "loss_fn": loss}
        made = partial(Scheduler, [Stage(Piece(0), 0)], at, **options)
    else:
        stage = PipelineStage(Piece(0), 0, 1, CPU, group=at.group_along("pp"))
        made = partial(pipegrad.attach, ScheduleGPipe(stage, 2, loss_fn=loss), topology=at)
    words = r"^the loss has parameters \['temperature'\] that no stage.*a part of the last stage's"
    with pytest.raises(PlanError, match=words):
        made()
