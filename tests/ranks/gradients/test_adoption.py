"""Gradients enter their bucket where they arise: how often they are written, and what is alive."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from pipegrad import GradientSync, Placement, Topology
from pipegrad.errors import ReduceError, StepError
from pipegrad.gradients import bucket, bucket_buffer, reducer
from pipegrad.gradients.bucket_buffer import FlatBuffer
from pipegrad.plugins.handler import HandlerSpec
from tests.support.gradients.cases import Operators, give, rank, replicated, stage
from tests.support.gradients.placements import By, compute

pytestmark = pytest.mark.ranks(2)
NAMES = tuple("abcdefgh")
NUMEL = 64
# Operators that overwrite a whole gradient.
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
    ("handler", "large", "microbatches", "early", "passes"),
    [
        # Small gradients are copied by one operator, and divided on the comm stream by another.
        ("data-parallel", False, 1, True, {"_foreach_copy_": 1}),
        ("data-parallel", False, 3, True, {"_foreach_copy_": 1, "add_": 16}),
        ("sharded", False, 3, False, {"_foreach_copy_": 1, "add_": 16}),
        # A large one is copied by its hook, and divided in the same pass.
        ("data-parallel", True, 1, True, {"div.out": 8}),
        # Final only behind its backward: the bucket is divided on the comm stream.
        ("data-parallel", True, 1, False, {"copy_": 8}),
        ("data-parallel", True, 3, True, {"copy_": 8, "add_": 16}),
        # The mean is taken of the shard, on the comm stream.
        ("sharded", True, 1, True, {"copy_": 8}),
        ("sharded", True, 1, False, {"copy_": 8}),
        ("sharded", True, 3, True, {"copy_": 8, "add_": 16}),
    ],
)
def test_no_gradient_is_zeroed_and_each_is_written_once(  # noqa: PLR0917
    handler: str,
    large: bool,
    microbatches: int,
    early: bool,
    passes: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if large:
        monkeypatch.setattr(bucket, "LARGE_NUMEL", NUMEL)
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
    assert {name: n for name, n in counter.counts.items() if name in PASSES} == passes
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
    flat = torch.zeros(16)  # the user's own memory stays
    module.a.grad, module.b.grad = flat[:8].view(2, 4), flat[8:].view(4, 2)
    compute(sync, lambda: module().backward(), divisor=2)
    assert (flat == 0.5).all()
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
def test_a_small_gradient_has_one_call_in_the_last_backward_and_none_before(
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
            hooks = {name: calls.counts[name] for name in ("watch", "count")}
            # Two witnesses look once; after that they count, too.
            last = reduced and number == microbatches - 1
            assert hooks == {"watch": 2 * (reduced and not number), "count": len(NAMES) * last}
        sync.stage_final(here)
        sync.finish()
    assert all(p.grad is not None and (p.grad == 2.0).all() for p in module.parameters())
    sync.close()


def test_gradients_that_are_gone_are_missed_whichever_parameters_are_used() -> None:
    """A witness is a parameter that the step before has used."""
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


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize(
    ("handler", "numel"),  # of a bucket
    [("sharded", NUMEL), (By("dp", Placement.WHOLE, "mean"), 2 * NUMEL)],
    ids=["shard", "whole"],
)
def test_memory_goes_as_it_is_reduced_and_read(
    handler: HandlerSpec, numel: int, set_to_none: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffers: list[tuple[StorageWeakRef, int]] = []

    class Watched(FlatBuffer):
        def __init__(self, buffer: torch.Tensor) -> None:
            super().__init__(buffer)
            buffers.append((StorageWeakRef(buffer.untyped_storage()), buffer.numel()))

    def in_memory() -> list[int]:
        return [size for storage, size in buffers if not storage.expired()]

    def see(_: torch.Tensor) -> None:
        seen.append(sum(size >= numel for size in in_memory()))  # this rank's part has half

    monkeypatch.setattr(bucket_buffer, "FlatBuffer", Watched)
    monkeypatch.setattr(reducer, "_PATIENCE_SECONDS", 60.0)
    module = model()
    topology = Topology.create(pipeline=1)
    sync = GradientSync({0: module}, topology, handlers=[handler], bucket_bytes=4 * NUMEL)
    optimizer = sync.optimizer(torch.optim.SGD, lr=1.0)
    for step in range(3):
        seen: list[int] = []
        hooks = [p.register_post_accumulate_grad_hook(see) for p in module.parameters()]
        backward(sync, module, 1, early=True)
        sync.finish()
        # In the first step all buckets live: nobody knows which accumulation is the last.
        assert max(seen) <= (2 if step else len(NAMES) * NUMEL // numel)
        for hook in hooks:
            hook.remove()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        assert not (set_to_none and in_memory())
    sync.wait_parameters()
    sync.prepare()
    assert sum(in_memory()) == 0
    # Three steps, each with the mean of 2 and 4.
    assert all((p == -9.0).all() for p in module.parameters())
    sync.close()
