"""Under `attach` too, what fails on one rank is every rank's error, soon; then steps are right."""

from __future__ import annotations

import re
from collections.abc import Callable
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
from pipegrad.errors import PipegradError, root_of
from tests.support.gradients.cases import Case, Replies, on, outcome, rank, replies

TWO: list[Case] = []
two = replies(2, TWO)

CPU = torch.device("cpu")
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


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise OSError("no space left")


def fails_in_forward(_out: Tensor) -> Tensor:
    raise OSError("no space left")


def exits(_out: Tensor) -> Tensor:
    raise SystemExit(0)


def is_interrupted(_out: Tensor) -> Tensor:
    raise KeyboardInterrupt


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
    "backward": FailsInBackward.apply,
    "loss": fails_in_forward,
    "interrupt": is_interrupted,
    "exit": exits,
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


@on(TWO)
def failures() -> Any:
    """Fails in the first step and in later ones, and goes on without zero_grad."""
    found = {}
    for name, places in PLACES.items():
        right = Attached(name)
        gradients = right.gradients()
        right.sync.close()
        for when in ("first", "later"):
            run = Attached(name)
            if when == "later":
                run.gradients()
            last = len(places) - 1
            for kind, stage, left in (
                ("forward", 0, 0 if when == "first" else 2),
                ("forward", last, 0),
                ("backward", 1, 0 if when == "first" else 1),
                ("loss", last, 0),
                ("interrupt", 1, 0),
                ("exit", 0, 1),
            ):
                said = fail(run, kind, stage, left)
                found[name, when, kind, stage] = said, same(run.gradients(), gradients)
                if when == "first":
                    run.sync.close()
                    run = Attached(name)
            run.sync.close()
    return found


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("when", ["first", "later"])
def test_what_a_stage_raises_all_ranks_raise_and_go_on(name: str, when: str, two: Replies) -> None:
    """Issue 16, point 3: the others waited in torch's receive until their time-out.

    They raise what the first rank says, and the next step has the bits of one that never failed.
    """
    words = {"interrupt": "KeyboardInterrupt", "exit": "SystemExit: 0"}
    for here, reply in enumerate(two):
        for (schedule, then, kind, stage), (said, is_right) in reply["failures"].items():
            if (schedule, then) != (name, when):
                continue
            why = words.get(kind, "no space left")
            assert why in said, (kind, stage, said)
            place = PLACES[name][stage]
            if here != place:
                assert said.startswith(f"{ELSEWHERE}rank {place}: "), (kind, stage, said)
            else:
                assert ELSEWHERE not in said, (kind, stage, said)
            assert is_right, (kind, stage)


@on(TWO)
def others() -> Any:
    """What fails outside of any stage, and in evaluations."""
    run = Attached("1F1B")
    gradients = run.gradients()
    found: dict[str, Any] = {}
    bad = run.x[:, :2] if rank() == 0 else None
    found["another shape"] = raised(lambda: run.run(x=bad)), same(run.gradients(), gradients)
    few = run.x[:3] if rank() == 0 else None
    found["few rows"] = raised(lambda: run.run(x=few)), same(run.gradients(), gradients)
    half = run.x[:4] if rank() == 0 else None
    found["half"] = raised(lambda: run.run(x=half)), same(run.gradients(), gradients)
    run.y, y = run.y[:, :1].expand(-1, 7), run.y
    found["target"] = raised(run.run), True
    run.y = y
    found["target"] = found["target"][0], same(run.gradients(), gradients)
    if rank() == 0:
        run.modules[0].trick, run.modules[0].left = fails_in_forward, 2
    found["evaluation"] = raised(lambda: run.run(evaluate=True)), True
    run.modules[rank()].trick = None
    fine = raised(lambda: run.run(evaluate=True))
    found["evaluation"] = found["evaluation"][0], fine == "fine: None"
    found["evaluation"] = found["evaluation"][0], same(run.gradients(), gradients)
    with run.sync.accumulate():
        if rank() == 1:
            run.modules[1].trick, run.modules[1].left = fails_in_forward, 3
        found["accumulated"] = raised(run.run), True
    run.modules[rank()].trick = None
    found["accumulated"] = found["accumulated"][0], same(run.gradients(), gradients)
    run.sync.close()
    return found


@pytest.mark.parametrize(
    ("case", "place", "why"),
    [
        ("another shape", 0, "must be multiplied|cannot be multiplied|shape"),
        ("few rows", 0, "Expecting 4 arg_mbs but got 3"),
        ("half", 0, r"an output is torch.float32 \[1, 3\], and was torch.float32 \[2, 3\] "),
        ("target", 1, "size"),
        ("evaluation", 0, "no space left"),
        ("accumulated", 1, "no space left"),
    ],
)
def test_what_fails_elsewhere_in_a_step_is_told_too(
    case: str, place: int, why: str, two: Replies
) -> None:
    """Issue 16, point 3: another batch, a loss that does not fit, an evaluation."""
    for here, reply in enumerate(two):
        said, is_right = reply["others"][case]
        assert said.startswith(ELSEWHERE) == (here != place), said
        assert f"rank {place}: " in said or here == place
        assert not said.startswith("fine")
        assert re.search(why, said)
        assert is_right


class NoReduceGrad(ScheduleInterleaved1F1B):
    """Its order of actions is written by hand, without REDUCE_GRAD: as torch's tests have it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        order: Any = self.pipeline_order_with_comms
        self.pipeline_order_with_comms = {
            rank: [a for a in actions if a.computation_type.name != "REDUCE_GRAD"]
            for rank, actions in order.items()
        }


@on(TWO)
def by_hand() -> Any:
    right = Attached("Interleaved1F1B")
    gradients = [right.gradients() for _ in range(2)]
    right.sync.close()
    run = Attached("Interleaved1F1B", kind=NoReduceGrad)
    found = [run.gradients() for _ in range(2)]
    said = fail(run, "backward", 2, 1), same(run.gradients(), gradients[0])
    run.sync.close()
    return all(map(same, found, gradients)), said


def test_a_schedule_without_reduce_grad_ends_its_stages_with_the_step(two: Replies) -> None:
    """Issue 16, point 12: it ended after the whole step, in "finish() before stage_final()"."""
    for reply in two:
        is_right, (said, is_right_afterwards) = reply["by_hand"]
        assert is_right
        assert "no space left" in said
        assert is_right_afterwards


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        return ((out - target) * self.temperature).square().mean()

    def of(self, out: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = self(out, target)
        return loss


@on(TWO)
def losses_with_parameters() -> Any:
    """The loss of two replicas of one stage; and one whose parameter is the stage's own."""
    at = Topology.create(pipeline=1)
    found = {}
    losses: dict[str, Callable[..., Tensor]] = {"module": Weighted(), "method": Weighted().of}
    for name, loss in losses.items():
        stage = PipelineStage(Piece(0), 0, 1, CPU, group=at.group_along("pp"))
        schedule = ScheduleGPipe(stage, 2, loss_fn=loss)
        found[name] = outcome(partial(pipegrad.attach, schedule, topology=at))
    make = partial(Scheduler, [Stage(Piece(0), 0)], at, schedule="gpipe", num_microbatches=2)
    found["module of a Scheduler"] = outcome(partial(make, loss_fn=losses["module"]))
    return found


@pytest.mark.parametrize("who", ["module", "method", "module of a Scheduler"])
def test_a_loss_with_parameters_is_refused_over_replicas(who: str, two: Replies) -> None:
    """Issue 16, point 10 (1.17): its gradients differed between replicas, without a word."""
    for reply in two:
        said = reply["losses_with_parameters"][who]
        assert said.startswith("PlanError: the loss has parameters ['temperature'] that no stage")
        assert "a part of the last stage's" in said
