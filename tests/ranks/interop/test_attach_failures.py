"""Under `attach` too, what fails on one rank is every rank's error, soon; then steps are right."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

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
from tests.support.gradients.cases import rank
from tests.support.pipeline.pipelines import CPU
from tests.support.pipeline.scales import fails_in_backward, fails_in_forward
from tests.support.versions import SPLIT_BY_TORCH, needs_2_13

pytestmark = pytest.mark.ranks(2)
MICROBATCHES, WIDTH = 4, 3
PLACES = {
    "GPipe": (0, 1),
    "1F1B": (0, 1),
    "Interleaved1F1B": (0, 1, 0, 1),
    "InterleavedZeroBubble": (0, 1, 0, 1),
    "ZBVZeroBubble": (0, 1, 1, 0),
}
ELSEWHERE = "ReduceError: a step failed on another rank: "


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


FAILURES = {
    "forward": fails_in_forward,
    "backward": fails_in_backward,
    "loss": fails_in_forward,
    "interrupt": mock.Mock(side_effect=KeyboardInterrupt),
    "exit": mock.Mock(side_effect=SystemExit(0)),
}


def fail(run: Attached, kind: str, stage: int, left: int) -> str:
    """Has one stage fail after some microbatches; returns what the step says."""
    trick: Any = FAILURES[kind]
    if kind == "loss":
        run.loss_trick = trick if run.is_last else None
    elif stage in run.modules:
        run.modules[stage].trick, run.modules[stage].left = trick, left
    said = raised(run.run)
    run.loss_trick = None
    for module in run.modules.values():
        module.trick = None
    return said


def raised(function: Callable[[], object]) -> str:
    """Returns what a step says: of what torch wraps, what was wrapped."""
    try:
        return f"fine: {function()}"
    except BaseException as error:  # noqa: BLE001 - an interrupt is raised as it is
        root = error if isinstance(error, PipegradError) else root_of(error)
        return f"{type(root).__name__}: {root}"


def same(found: list[Tensor], right: list[Tensor]) -> bool:
    return len(found) == len(right) and all(map(torch.equal, found, right))


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=(needs_2_13,) if n in SPLIT_BY_TORCH else ()) for n in PLACES],
)
def test_what_a_stage_raises_all_ranks_raise_and_go_on(name: str) -> None:
    """Issue 16, point 3: the others waited in torch's receive until their time-out.

    They raise what the first rank says, and the next step has the bits of one that never failed,
    also without zero_grad.
    """
    run, last = Attached(name), len(PLACES[name]) - 1
    gradients = run.gradients()
    for kind, stage, left, words in (
        ("forward", 0, 2, "no space left"),
        ("forward", last, 0, "no space left"),
        ("backward", 1, 1, "no space left"),
        ("loss", last, 0, "no space left"),
        ("interrupt", 1, 0, "KeyboardInterrupt"),
        ("exit", 0, 1, "SystemExit: 0"),
    ):
        said = fail(run, kind, stage, left)
        assert words in said, (kind, stage)
        place = PLACES[name][stage]
        if rank() != place:
            assert said.startswith(f"{ELSEWHERE}rank {place}: "), (kind, stage)
        else:
            assert ELSEWHERE not in said, (kind, stage)
        assert same(run.gradients(), gradients), (kind, stage)
    run.sync.close()


def test_what_fails_elsewhere_in_a_step_is_told_too() -> None:
    """Issue 16, point 3: another batch, a loss that does not fit, an evaluation."""
    run = Attached("1F1B")
    gradients = run.gradients()

    def fails(place: int, words: str, **options: Any) -> None:
        said = raised(lambda: run.run(**options))
        assert said.startswith(ELSEWHERE) == (rank() != place), said
        assert f"rank {place}: " in said or rank() == place
        assert not said.startswith("fine")
        assert re.search(words, said), said

    for x, words in (
        (run.x[:, :2], "must be multiplied|cannot be multiplied|shape"),
        (run.x[:3], "Expecting 4 arg_mbs but got 3"),
        # torch 2.11 looks itself.
        (run.x[:4], r"an output is torch.float32 \[1, 3\], and was .* \[2, 3\] |shape mismatch"),
    ):
        fails(0, words, x=x)
        assert same(run.gradients(), gradients), words
    run.y, y = run.y[:, :1].expand(-1, 7), run.y
    fails(1, "size")
    run.y = y
    assert same(run.gradients(), gradients)
    here = run.modules[rank()]
    here.trick, here.left = (fails_in_forward, 2) if rank() == 0 else (None, 0)
    fails(0, "no space left", evaluate=True)
    here.trick = None
    run.run(evaluate=True)
    assert same(run.gradients(), gradients)
    here.trick, here.left = (fails_in_forward, 3) if rank() == 1 else (None, 0)
    with run.sync.accumulate():
        fails(1, "no space left")
    here.trick = None
    assert same(run.gradients(), gradients)
    run.sync.close()


class NoReduceGrad(ScheduleInterleaved1F1B):
    """Its order of actions is written by hand, without REDUCE_GRAD: as torch's tests have it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        order: Any = self.pipeline_order_with_comms
        self.pipeline_order_with_comms = {
            rank: [a for a in actions if a.computation_type.name != "REDUCE_GRAD"]
            for rank, actions in order.items()
        }


def test_a_schedule_without_reduce_grad_ends_its_stages_with_the_step() -> None:
    """Issue 16, point 12: it ended after the whole step, in "finish() before stage_final()"."""
    right = Attached("Interleaved1F1B")
    gradients = [right.gradients() for _ in range(2)]
    right.sync.close()
    run = Attached("Interleaved1F1B", kind=NoReduceGrad)
    for expected in gradients:
        assert same(run.gradients(), expected)
    assert "no space left" in fail(run, "backward", 2, 1)
    assert same(run.gradients(), gradients[0])
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
