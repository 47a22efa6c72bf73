"""Gradients are adopted when they are made: how often they are passed over, and what is alive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from pipegrad import GradientSync, Placement, Topology
from pipegrad.gradients.parameter import LiveParameter
from pipegrad.gradients.step import Step
from pipegrad.interop.private import TorchDispatchMode
from pipegrad.plugins.handler import HandlerSpec
from pipegrad.reduce import bucket_buffer, room
from pipegrad.reduce.bucket_buffer import FlatBuffer
from pipegrad.testing import run_ranks
from tests.support.gradients.cases import give, grads, rank, replicated, stage
from tests.support.gradients.placements import By

NAMES = tuple("abcdefgh")
NUMEL = 64
PASSES = ("zero_", "copy_", "add_", "div_", "div.out", "mul_")


class Passes(TorchDispatchMode):
    """Counts the operators that overwrite a whole gradient, in this thread."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.counts = Counter[str]()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        name = str(func).removeprefix("aten.").removesuffix(".Tensor").removesuffix(".default")
        if name in PASSES and max(t.numel() for t in args if isinstance(t, torch.Tensor)) >= NUMEL:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


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


def passes() -> dict[str, Any]:
    """Counts operators of second steps, and returns the gradients. Runs on every rank."""
    found: dict[str, Any] = {}
    for handler in ("data-parallel", "sharded"):
        for microbatches, early in ((1, True), (1, False), (3, True)):
            module = model()
            sync = replicated(module, handlers=[handler])
            counted = Passes()
            sync.optimizer_parameters()
            for _ in range(2):
                module.zero_grad()
                counted.counts.clear()
                with counted:
                    backward(sync, module, microbatches, early=early)
                sync.finish()
                if handler == "sharded":
                    for main in sync.main_parameters():
                        assert main.tensor.grad is not None
                        main.tensor.data.sub_(main.tensor.grad)
                        main.tensor.grad = None
                    sync.publish()
                    sync.wait_parameters()
            values = (
                grads(module) if handler == "data-parallel" else dict(module.named_parameters())
            )
            found[f"{handler} {microbatches} {early}"] = (
                dict(counted.counts),
                {name: torch.as_tensor(value).unique().tolist() for name, value in values.items()},
            )
            sync.close()
    return found


@pytest.fixture(scope="module")
def counted() -> list[dict[str, Any]]:
    return run_ranks(passes, 2)


@pytest.mark.parametrize(
    ("case", "expected", "value"),
    [
        # One pass a gradient: it is divided while it is written to its slot.
        ("data-parallel 1 True", {"div.out": 8}, 3.0),
        # Final only behind its backward: the bucket is divided on the comm stream.
        ("data-parallel 1 False", {"copy_": 8}, 3.0),
        ("data-parallel 3 True", {"copy_": 8, "add_": 16}, 3.0),
        # The mean is taken of the shard, on the comm stream; parameters after two steps.
        ("sharded 1 True", {"copy_": 8}, -6.0),
        ("sharded 1 False", {"copy_": 8}, -6.0),
        ("sharded 3 True", {"copy_": 8, "add_": 16}, -6.0),
    ],
)
def test_no_gradient_is_zeroed_and_each_is_written_once(
    counted: list[dict[str, Any]], case: str, expected: dict[str, int], value: float
) -> None:
    for reply in counted:
        counts, values = reply[case]
        assert counts == expected
        assert values == {name: [value] for name in NAMES}


ON_ACCUMULATED = Step._on_accumulated


class Sum(nn.Module):
    """The gradients of its parameters are views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(2, 4)), nn.Parameter(torch.ones(4, 2))
        self.ones = torch.ones(8)

    def forward(self) -> torch.Tensor:
        return ((self.a.view(-1) + self.b.view(-1)) * self.ones).sum()


def views() -> list[list[float]]:
    """Divides gradients that nobody reduces, when the step begins and when it ends."""
    module, found = Sum(), list[list[float]]()
    sync = GradientSync({rank(): module}, Topology.create(pipeline=2), handlers=[])
    flat = torch.zeros(16)
    for at_end in (False, True):
        module.zero_grad()
        sync.prepare(divisor=None if at_end else 2)
        module().backward()
        sync.stage_final(rank())
        sync.finish(divisor=torch.tensor(2.0) if at_end else None)
        found.append([g.unique().item() for g in (module.a.grad, module.b.grad) if g is not None])
    # The user's own memory stays.
    flat.zero_()
    module.a.grad, module.b.grad = flat[:8].view(2, 4), flat[8:].view(4, 2)
    sync.prepare(divisor=2)
    module().backward()
    sync.stage_final(rank())
    sync.finish()
    found.append(flat.unique().tolist())
    sync.close()
    return found


def test_views_of_one_gradient_are_divided_once() -> None:
    for found in run_ranks(views, 2):
        assert found == [[0.5, 0.5], [0.5, 0.5], [0.5]]


def calls() -> dict[str, Any]:
    """Returns calls of hooks in a step of four backwards, and gradients; on every rank."""
    found: dict[str, Any] = {}
    for name, size in (("reduced", 1), ("alone", 2)):
        module, calls = model(), list[str]()
        for parameter in module.parameters():  # stages that look alike may be tied
            nn.init.constant_(parameter, rank() + 1.0)
        topology = Topology.create(pipeline=size)

        def noted(step: Step, parameter: LiveParameter, calls: list[str] = calls) -> None:
            calls.append(parameter.record.key)
            ON_ACCUMULATED(step, parameter)

        with mock.patch.object(Step, "_on_accumulated", noted):
            (stage_number,) = topology.local_stages
            sync = GradientSync({stage_number: module}, topology, handlers=["data-parallel"])
            sync.prepare(divisor=4)
            for number in range(4):
                if number == 3:
                    sync.stage_last_backward(stage_number)
                give(module, **dict.fromkeys(NAMES, 2.0))
            sync.stage_final(stage_number)
            sync.finish()
        found[name] = (
            sorted(Counter(calls).values()),
            {float(p.grad.sum()) for p in module.parameters() if p.grad is not None},
        )
        sync.close()
    return found


def alive(
    handler: HandlerSpec, numel: int, set_to_none: bool
) -> tuple[list[int], list[int], list[list[float]]]:
    """Trains three steps. Runs on every rank.

    Args:
        handler: It scatters.
        numel: Of a bucket.
        set_to_none: As in `zero_grad`.

    Returns:
        The most buckets in memory in each step; the elements of buckets and parts in memory when
        the next step has begun; the values of all parameters at the end.
    """
    made: list[tuple[StorageWeakRef, int]] = []

    class Watched(FlatBuffer):
        def __init__(self, buffer: torch.Tensor) -> None:
            super().__init__(buffer)
            made.append((StorageWeakRef(buffer.untyped_storage()), buffer.numel()))

    def in_memory() -> list[int]:
        return [size for storage, size in made if not storage.expired()]

    def whole() -> int:
        return sum(size >= numel for size in in_memory())  # this rank's part has half

    most, left = [], []
    with (
        mock.patch.object(bucket_buffer, "FlatBuffer", Watched),
        mock.patch.object(room, "_PATIENCE_SECONDS", 60.0),
    ):
        module = model()
        topology = Topology.create(pipeline=1)
        sync = GradientSync({0: module}, topology, handlers=[handler], bucket_bytes=4 * NUMEL)
        optimizer = sync.optimizer(torch.optim.SGD, lr=1.0)
        for _ in range(3):
            seen = list[int]()
            hooks = [
                p.register_post_accumulate_grad_hook(lambda _, seen=seen: seen.append(whole()))
                for p in module.parameters()
            ]
            backward(sync, module, 1, early=True)
            sync.finish()
            most.append(max(seen))
            for hook in hooks:
                hook.remove()
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
            if set_to_none:
                left.append(sum(in_memory()))
        sync.wait_parameters()
        sync.prepare()
        left.append(sum(in_memory()))
        values = [p.unique().tolist() for p in module.parameters()]
        sync.close()
    return most, left, values


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize(
    ("handler", "numel"),
    [("sharded", NUMEL), (By("dp", Placement.WHOLE, "mean"), 2 * NUMEL)],
    ids=["shard", "whole"],
)
def test_memory_goes_as_it_is_reduced_and_read(
    handler: HandlerSpec, numel: int, *, set_to_none: bool
) -> None:
    """In the first step all buckets live, as nobody knows which accumulation is the last."""
    for (first, *later), left, values in run_ranks(alive, 2, handler, numel, set_to_none):
        assert first <= len(NAMES) * NUMEL // numel
        assert max(later) <= 2
        assert set(left) == {0}
        assert values == [[-9.0]] * len(NAMES)  # three steps, each with the mean of 2 and 4


def test_hooks_rest_between_the_first_and_the_last_backward() -> None:
    for reply in run_ranks(calls, 2):
        assert reply["reduced"] == ([2] * len(NAMES), {2.0 * NUMEL})
        assert reply["alone"] == ([], {2.0 * NUMEL})
