"""A pipeline of stages that multiply, of which some fail; and what its ranks say of that."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pipegrad import Scheduler, Stage, Topology
from tests.support.gradients.cases import outcome

NUM_STAGES, NUM_MICROBATCHES, WIDTH = 4, 4, 2
SECONDS = 20.0  # nothing may take longer; each takes a fraction of one
ELSEWHERE, TOO_LATE = "StepError: a step failed on another rank: ", "loss: StepError: "

Trick = Callable[[Tensor], Tensor]


class Scale(nn.Module):
    """Multiplies by the number of its stage; may play a trick on the output of a microbatch."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), stage + 1.0))
        self.trick: tuple[int, Trick] | None = None
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        out = x * self.weight
        microbatch = self.calls % NUM_MICROBATCHES
        self.calls += 1
        if self.trick is not None and self.trick[0] == microbatch:
            return self.trick[1](out)
        return out


def fails_in_forward(_out: Tensor) -> Tensor:
    raise OSError("no space left")


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor) -> Tensor:
        return out.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise OSError("no space left")


def fails_in_backward(out: Tensor) -> Tensor:
    failing: Tensor = FailsInBackward.apply(out)  # type: ignore[no-untyped-call]
    return failing


class Training:
    """One rank of a pipeline of `Scale`s, and the steps it takes."""

    def __init__(self, topology: Topology, **options: Any) -> None:
        self.topology = topology
        self.stage = topology.coordinate("pp")
        self.module = Scale(self.stage)
        if "tied" in options:  # copies of a tie start with the same bits
            nn.init.ones_(self.module.weight)
        options = {"schedule": "1f1b", "handlers": ["noop"], "loss_fn": self.loss, **options}
        stages = [Stage(self.module, self.stage)]
        self.scheduler = Scheduler(stages, topology, num_microbatches=NUM_MICROBATCHES, **options)

    def loss(self, out: Tensor, _target: object) -> object:
        return out.sum()

    def step(self, *, rows: int = 8, loss_divisor: float = 1.0) -> str:
        """Takes a step; returns what it raised, with its notes, or its loss."""
        x = torch.arange(WIDTH * rows).float().reshape(rows, WIDTH)
        return self.said(lambda: self.scheduler.step(x, target=x, loss_divisor=loss_divisor))

    def said(self, step: Callable[[], Any]) -> str:
        """Returns what a step raised, with its notes, or its loss, in time."""
        self.module.calls = 0
        self.module.weight.grad = None
        began = time.monotonic()
        try:
            result = step()
        except Exception as error:  # noqa: BLE001 - whatever it is, is asserted
            text = " ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
        else:
            said = outcome(lambda: float(result.loss))
            text = f"loss: {said}"
        seconds = time.monotonic() - began
        return text if seconds < SECONDS else f"{seconds:.0f} s: {text}"

    def trick(self, stage: int, microbatch: int, trick: Trick) -> str:
        """Takes a step in which the output of a stage is not as ever."""
        self.module.trick = (microbatch, trick) if self.stage == stage else None
        said = self.step()
        self.module.trick = None
        return said

    def is_right(self, *, rows: int = 8) -> bool:
        """Takes a good step; returns whether loss and gradient are what one process computes."""
        said = self.step(rows=rows)
        x = torch.arange(WIDTH * rows).float().reshape(rows, WIDTH)
        product = float(torch.arange(1, self.topology.num_stages + 1).prod())
        wanted = x.sum(0) * product / (self.stage + 1)
        gradient = self.module.weight.grad
        loss = f"loss: {float(x.sum()) * product}"
        return said == loss and gradient is not None and torch.equal(gradient, wanted)


def chain(**options: Any) -> Training:
    return Training(Topology.create(pipeline=NUM_STAGES), **options)


def warm(training: Training) -> Training:
    """Takes two good steps: one in which shapes are learned, and one like all others."""
    assert [training.is_right(), training.is_right()] == [True, True]
    return training
