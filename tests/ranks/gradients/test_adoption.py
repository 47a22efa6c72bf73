"""Gradients accumulate in their bucket: how often they are written."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType

import pytest
import torch
from torch import nn

from pipegrad import GradientSync, Topology
from pipegrad.errors import ReduceError, StepError
from pipegrad.gradients import bucket
from tests.support.gradients.cases import Operators, give, rank, replicated, stage
from tests.support.gradients.placements import compute

pytestmark = pytest.mark.ranks(2)
NAMES = tuple("abcdefgh")
NUMEL = 64
# Operators that overwrite a whole gradient, or all of a bucket.
PASSES = ("zero_", "copy_", "_foreach_copy_", "add_", "div_", "div.out", "mul_")


def model() -> nn.Module:
    return stage(**dict.fromkeys(NAMES, (NUMEL,)))


def backward(sync: GradientSync, module: nn.Module, microbatches: int, *, early: bool) -> None:
    sync.prepare(divisor=microbatches)
    sync.stage_first_use(0)
    for number in range(microbatches):
        if early and number == microbatches - 1:
            sync.stage_last_backward(0)
        give(module, **{name: 2.0 * (rank() + 1) for name in reversed(NAMES)})
    sync.stage_final(0)


@pytest.mark.parametrize(
    ("handler", "microbatches", "early"),
    [
        ("data-parallel", 1, True),
        ("data-parallel", 1, False),
        ("data-parallel", 3, True),
        ("sharded", 1, True),
        ("sharded", 3, False),
    ],
)
def test_a_bucket_is_zeroed_once_and_autograd_adds_to_it(
    handler: str, microbatches: int, early: bool
) -> None:
    """And nothing is copied. It is divided and reduced on the comm stream, in another thread."""
    module = model()
    sync = replicated(module, handlers=[handler])
    sync.optimizer_parameters()
    counter = Operators(least_numel=NUMEL)
    for _ in range(2):
        module.zero_grad()
        counter.counts.clear()
        with counter:
            backward(sync, module, microbatches, early=early)
        sync.finish()
        if handler == "sharded":
            for main in sync.main_parameters():
                assert main.tensor.grad is not None
                main.tensor.data.sub_(main.tensor.grad)
                main.tensor.grad = None
            sync.publish()
            sync.wait_parameters()
    passes = {name: n for name, n in counter.counts.items() if name in PASSES}
    assert passes == {"add_": len(NAMES) * microbatches, "zero_": 1}
    for parameter in module.parameters():
        # Two steps with the mean of 2 and 4.
        value, right = (parameter, -6.0) if handler == "sharded" else (parameter.grad, 3.0)
        assert value is not None
        assert value.unique().tolist() == [right]
    sync.close()


class Sum(nn.Module):
    """The gradients of its parameters are views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(2, 4)), nn.Parameter(torch.ones(4, 2))
        self.ones = torch.ones(8)

    def forward(self) -> torch.Tensor:
        return ((self.a.view(-1) + self.b.view(-1)) * self.ones).sum()


def test_views_of_one_gradient_are_divided_once() -> None:
    module = Sum()
    sync = GradientSync({rank(): module}, Topology.create(pipeline=2), handlers=[])

    for early, late in ((2, None), (None, torch.tensor(2.0))):
        module.zero_grad()
        compute(sync, lambda: module().backward(), divisor=early, late=late)
        assert all(p.grad is not None and (p.grad == 0.5).all() for p in module.parameters())
    sync.close()


class Calls:
    """Counts the calls of pipegrad's hooks: those that Python makes for each parameter."""

    def __init__(self) -> None:
        self.counts = Counter[str]()

    def __enter__(self) -> Calls:
        sys.setprofile(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _count(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename == bucket.__file__:
            self.counts[frame.f_code.co_name] += 1


@pytest.mark.parametrize(("pipeline", "reduced"), [(1, True), (2, False)])
def test_a_gradient_has_one_call_in_the_last_backward_and_none_before(
    pipeline: int, reduced: bool
) -> None:
    module, microbatches = model(), 4
    for parameter in module.parameters():  # stages that look alike may be tied
        nn.init.constant_(parameter, rank() + 1.0)
    topology = Topology.create(pipeline=pipeline)
    (here,) = topology.local_stages
    sync = GradientSync({here: module}, topology, handlers=["data-parallel"])
    for _ in range(2):
        module.zero_grad()
        sync.prepare(divisor=microbatches)
        for number in range(microbatches):
            if number == microbatches - 1:
                sync.stage_last_backward(here)
            with Calls() as calls:
                give(module, **dict.fromkeys(NAMES, 2.0))
            last = reduced and number == microbatches - 1
            assert calls.counts["count"] == len(NAMES) * last
        sync.stage_final(here)
        sync.finish()
    assert all(p.grad is not None and (p.grad == 2.0).all() for p in module.parameters())
    sync.close()


def test_gradients_that_are_gone_are_missed_whichever_parameters_are_used() -> None:
    module = model()
    sync = replicated(module)
    for drops in (False, True):
        sync.prepare()
        give(module, b=1.0, c=1.0)  # neither the first nor the last of its bucket
        if drops:
            module.zero_grad()
        sync.stage_final(0)
        if drops:
            with pytest.raises((StepError, ReduceError), match="is gone: autograd added to it"):
                sync.finish()
        else:
            sync.finish()
        module.zero_grad()
    sync.close()
