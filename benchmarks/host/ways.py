"""Ways to run a step of a module with many parameters: plain autograd, DDP, pipegrad and others."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from sixty_lines import buckets_of
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import pipegrad

PLAIN, DDP, PLAIN_PYTHON = "plain autograd", "DDP", "sixty lines of Python"


class Case(NamedTuple):
    """A module of products, and in how many microbatches it runs.

    Attributes:
        number: Of parameters.
        shape: Of each.
        microbatches: Of a step.
        device: Where the module is.
    """

    number: int
    shape: tuple[int, int]
    microbatches: int = 1
    device: str = "cpu"

    def parts(self) -> tuple[Tensor, ...]:
        """Returns this rank's microbatches, of one row each."""
        generator = torch.Generator().manual_seed(dist.get_rank())
        whole = torch.randn(self.microbatches, self.shape[0], generator=generator)
        return whole.to(self.device).split(1)

    def module(self) -> nn.Module:
        """Returns the module; all have the same values."""
        return Products(self).to(self.device)

    def __str__(self) -> str:
        return f"{self.number:,} of {self.shape[0] * self.shape[1]:,}"


class Products(nn.Module):
    """Multiplies its input with each parameter, and adds the products."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.zeros(case.shape) for _ in range(case.number)])

    def forward(self, x: Tensor) -> Tensor:
        """Returns one row."""
        out = x @ self.weights[0]
        for weight in self.weights[1:]:
            out = out + x @ weight
        return out


def loss(output: Tensor, _: Tensor | None = None) -> Tensor:
    """Returns the loss of a microbatch."""
    return output.sum()


class Way(NamedTuple):
    """One way to run a step, with a module of its own."""

    module: nn.Module
    step: Callable[[], object]


Make = Callable[[Case], Way]


def plain(case: Case) -> Way:
    """Returns autograd alone, one microbatch after the other."""
    module, parts = case.module(), case.parts()
    return Way(module, lambda: backwards(module, parts))


def backwards(module: nn.Module, parts: tuple[Tensor, ...]) -> None:
    """Runs forwards and backwards of the mean."""
    for x in parts:
        (loss(module(x)) / len(parts)).backward()


def ddp(case: Case) -> Way:
    """Returns torch's reducer, which reduces in the last backward alone."""
    module, parts = case.module(), case.parts()
    wrapped = DistributedDataParallel(module, gradient_as_bucket_view=True)

    def step() -> None:
        with wrapped.no_sync():
            for x in parts[:-1]:
                (loss(wrapped(x)) / len(parts)).backward()
        (loss(wrapped(parts[-1])) / len(parts)).backward()

    return Way(module, step)


def sixty_lines(case: Case) -> Way:
    """Returns plain Python, for one microbatch."""
    module, parts = case.module(), case.parts()
    buckets = buckets_of(module.parameters())

    def step() -> None:
        for bucket in buckets:
            bucket.begin()
        backwards(module, parts)
        for bucket in buckets:
            bucket.wait()

    return Way(module, step)


def sync(case: Case, *, early: bool) -> Way:
    """Returns pipegrad's GradientSync; `early` lets gradients leave in the last backward."""
    module, parts = case.module(), case.parts()
    topology = pipegrad.Topology.create(pipeline=1)
    own = pipegrad.GradientSync({0: module}, topology, handlers=["data-parallel"])

    def step() -> None:
        own.prepare()
        own.stage_first_use(0)
        if early:
            own.stage_last_backward(0)
        backwards(module, parts)
        own.stage_final(0)
        own.finish()

    return Way(module, step)


def scheduler(case: Case, *, schedule: str) -> Way:
    """Returns pipegrad's Scheduler, with one stage and its replicas."""
    module, whole = case.module(), torch.cat(case.parts())
    own = pipegrad.Scheduler(
        [pipegrad.Stage(module, 0)],
        pipegrad.Topology.create(pipeline=1),
        schedule=schedule,
        num_microbatches=case.microbatches,
        loss_fn=loss,
    )
    return Way(module, lambda: own.step(whole, target=whole))


ONE: dict[str, Make] = {
    PLAIN: plain,
    DDP: ddp,
    PLAIN_PYTHON: sixty_lines,
    "pipegrad, `GradientSync`": partial(sync, early=False),
    "pipegrad, with `stage_last_backward`": partial(sync, early=True),
}
FOUR: dict[str, Make] = {
    PLAIN: plain,
    DDP: ddp,
    "pipegrad, `1f1b`": partial(scheduler, schedule="1f1b"),
    "pipegrad, `zb-h1`": partial(scheduler, schedule="zb-h1"),
}
