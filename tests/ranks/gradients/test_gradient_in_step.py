"""Whose writes to a gradient count inside a step, in which order, and what they are divided by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pipegrad import GradientSync, MainGrad, Topology
from tests.support.gradients.cases import (
    Case,
    Replies,
    give,
    grads,
    on,
    outcome,
    rank,
    replies,
    stage,
    step,
    tied,
)

TWO: list[Case] = []
STEPS = 20


two = replies(2, TWO)


# Hooks of users.


def hooked(change: Callable[[Tensor], object], *, inside: bool) -> Any:
    """Registers a hook behind the first step; returns the gradients, and what had left before."""
    module = stage(a=(64,), b=(64,))
    sync = tied(module, "a", "b", bucket_bytes=0)
    step(sync, module, a=1.0, b=1.0)
    found: list[Any] = []
    launched: list[int] = []
    handles: list[Any] = []

    def register() -> None:
        def hook(parameter: Tensor) -> None:
            launched.append(sync._parts.reducer.num_launched)
            assert parameter.grad is not None
            change(parameter.grad)

        handles.append(module.get_parameter("a").register_post_accumulate_grad_hook(hook))

    if not inside:
        register()
    for number in range(STEPS):
        module.zero_grad()
        sync.prepare()
        if inside:
            register()
        sync.stage_last_backward(rank())
        give(module, a=1.0 + number + rank())
        give(module, b=1.0)
        sync.stage_final(rank())
        sync.finish()
        if inside:
            handles.pop().remove()
        a, b = (module.get_parameter(name).grad for name in ("a", "b"))
        assert a is not None
        assert b is not None
        found.append((set(a.tolist()), set(b.tolist())))
    early = sync.statistics().early
    sync.close()
    return found, launched, early


@on(TWO)
def doubled() -> Any:
    return [hooked(lambda gradient: gradient.mul_(2), inside=inside) for inside in (False, True)]


@on(TWO)
def clamped() -> Any:
    return [hooked(lambda g: g.clamp_(-3.5, 3.5), inside=inside) for inside in (False, True)]


def test_a_hook_registered_after_the_first_step_changes_what_leaves(two: Replies) -> None:
    """Issue 16, point 10 (1.4). The all-reduce left before a user's hook had its turn."""
    doubled = [({2 * (2 * n + 3.0)}, {2.0}) for n in range(STEPS)]
    clamped = [({min(n + 1.0, 3.5) + min(n + 2.0, 3.5)}, {2.0}) for n in range(STEPS)]
    for reply in two:
        for name, right in (("doubled", doubled), ("clamped", clamped)):
            for found, launched, early in reply[name]:
                assert found == right, name
                assert launched == [0] * STEPS
                assert early == 2


# Writes that autograd does not count.


class RawKernel(torch.autograd.Function):
    """Adds to main_grad as a kernel does that is given an address: no version counter moves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        made: Tensor = x * weight.detach()
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = ctx.saved_tensors
        weight = ctx.weight
        weight.main_grad.data.add_(gradient * x)
        weight.grad_added_to_main_grad = True
        return gradient * weight.detach(), torch.full_like(weight, torch.nan)


def by_kernel(x: float, weight: Tensor) -> None:
    made = RawKernel.apply(torch.full_like(weight, x), weight)  # type: ignore[no-untyped-call]
    made.sum().backward()


@on(TWO)
def kernels() -> Any:
    """On both ranks, on one beside autograd on the other, on one alone, in accumulated steps."""
    module = stage(a=(2,))
    a = module.get_parameter("a")
    sync = tied(module, "a", accessor=MainGrad())
    sync.optimizer_parameters()
    (one,) = sync.main_parameters()
    found: list[Any] = []

    def compute(case: str) -> None:
        sync.prepare(divisor=2.0)
        if case == "both" or rank() == 0:
            by_kernel(4.0, a)
            by_kernel(8.0, a)
        elif case == "beside autograd":
            give(module, a=2.0)
        sync.stage_final(rank())
        sync.finish()

    for case in ("both", "beside autograd", "alone"):
        compute(case)
        found.append(None if one.tensor.grad is None else one.tensor.grad.tolist())
        one.tensor.grad = None
        sync.publish()
    with sync.accumulate():
        compute("alone")
    compute("nobody" if rank() else "both")
    found.append(None if one.tensor.grad is None else one.tensor.grad.tolist())
    one.tensor.grad = None
    sync.close()
    return found


def test_what_a_kernel_adds_by_address_is_reduced(two: Replies) -> None:
    """Issue 16, point 10 (1.5). Whether a gradient was written was told by its version alone."""
    right = [[12.0, 12.0], [7.0, 7.0], [6.0, 6.0], [12.0, 12.0]]
    assert [reply["kernels"] for reply in two] == [right, right]


@on(TWO)
def unseen() -> Any:
    """Rank 0 writes behind autograd, and no hook fires; rank 1 by autograd, or not at all."""
    module = stage(a=(2,), b=(2,), c=(2,))
    sync = tied(module, "a", "b", "c", accessor=MainGrad())
    sync.optimizer_parameters()
    found = []
    for divisor in (4.0, 1.0):
        sync.prepare(divisor=divisor)
        if rank() == 0:
            for name in ("a", "b"):
                parameter: Any = module.get_parameter(name)
                parameter.main_grad.data[1] += 4.0
        else:
            give(module, a=4.0)
        sync.stage_final(rank())
        sync.finish()
        values = {s.record.name: s.tensor.grad for s in sync.main_parameters()}
        found.append({n: None if g is None else g.tolist() for n, g in values.items()})
        for one in sync.main_parameters():
            one.tensor.grad = None
        sync.publish()
    sync.close()
    return found


def test_what_is_written_behind_autograd_is_divided_and_reduced(two: Replies) -> None:
    """Issue 16, point 10 (1.5). It was dropped, or summed undivided: [1.0, 5.0] for [1.0, 2.0]."""
    right = [
        {"a": [1.0, 2.0], "b": [0.0, 1.0], "c": None},
        {"a": [4.0, 8.0], "b": [0.0, 4.0], "c": None},
    ]
    assert [reply["unseen"] for reply in two] == [right, right]


@on(TWO)
def stepped_in_backward() -> Any:
    """Rank 0's hook steps and drops the gradient, of a tie and of a parameter of its own."""
    found: list[Any] = []
    for name in ("own", "a"):
        module = stage(a=(2,), own=(2,))
        sync = tied(module, "a")

        def drop(parameter: Tensor, name: str = name) -> None:
            if rank() == 0 and parameter is module.get_parameter(name):  # noqa: B023
                assert parameter.grad is not None
                with torch.no_grad():
                    parameter.sub_(parameter.grad)
                parameter.grad = None

        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(drop)
        found.append(outcome(lambda: step(sync, module, a=1.0, own=1.0)))  # noqa: B023
        found.append(module.get_parameter("own").tolist())
    return found


def test_a_gradient_that_a_hook_has_dropped_is_an_error_where_it_is_reduced(two: Replies) -> None:
    """Issue 16, point 10 (1.12). An optimizer in the backward: nothing was reduced, no word."""
    first, second = (reply["stepped_in_backward"] for reply in two)
    assert first[:2] == ["{'a': [2.0, 2.0], 'own': None}", [-1.0, -1.0]]
    assert second[:2] == ["{'a': [2.0, 2.0], 'own': [1.0, 1.0]}", [0.0, 0.0]]
    said = "the gradient of '0.a' is gone: autograd added to it in this step"
    assert first[2].startswith(f"StepError: {said}")
    assert "optimizer.step() after finish()" in first[2]
    assert second[2].startswith("ReduceError: a step failed on another rank")
    assert f"rank 0: StepError: {said}" in second[2]


# What each step is divided by.


@on(TWO)
def unequal() -> Any:
    """4 + 4 + 2 microbatches with means of 1: autograd's, of a tie, of one that is not reduced."""
    found: list[Any] = []
    for options in ({}, {"reduce_dtype": torch.float64}, {"accessor": MainGrad()}):
        module = stage(a=(2,), own=(2,), once=(2,), idle=(2,))
        sync = tied(module, "a", "once", "idle", **options)
        sync.optimizer_parameters()

        def compute(number: int, *names: str) -> None:
            sync.prepare(divisor=number)  # noqa: B023
            for _ in range(number):
                give(module, **dict.fromkeys(names, 1.0))  # noqa: B023
            sync.stage_final(rank())  # noqa: B023
            sync.finish()  # noqa: B023

        with sync.accumulate():
            compute(4, "a", "own")
            compute(4, "a", "own", "once")
        compute(2, "a", "own")
        values = {s.record.name: s.tensor.grad for s in sync.main_parameters()}
        found.append({n: None if g is None else g.tolist() for n, g in values.items()})
        sync.close()
    return found


def test_each_accumulated_step_is_divided_by_its_own_divisor(two: Replies) -> None:
    """Issue 16, point 10 (1.7). All were divided by the last one's: 5.0 for 3.0."""
    right = {"a": [6.0] * 2, "own": [3.0] * 2, "once": [2.0] * 2, "idle": None}
    assert [reply["unequal"] for reply in two] == [[right] * 3] * 2


def test_a_gradient_of_the_users_own_is_not_divided() -> None:
    """Issue 16, point 10 (1.7). It is no sum of microbatches: one process would add to it."""
    module = stage(a=(1,))
    sync = GradientSync({0: module}, Topology.build(axes=(("pp", 1), ("dp", 1))), handlers=[])
    module.get_parameter("a").grad = torch.tensor([5.0])
    sync.prepare(divisor=4.0)
    give(module, a=8.0)
    sync.stage_final(0)
    sync.finish()
    assert grads(module) == {"a": [7.0]}
    sync.close()
