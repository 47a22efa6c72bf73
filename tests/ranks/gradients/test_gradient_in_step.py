"""Whose writes to a gradient count inside a step, in which order, and what they are divided by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pipegrad import GradientSync, MainGrad, Topology
from tests.support.gradients.cases import give, grads, outcome, rank, stage, step, tied
from tests.support.gradients.kernels import kernel

STEPS = 20


def taken(sync: GradientSync) -> dict[str, Any]:
    """Returns the gradients that an optimizer would step, and sets them to None."""
    gradients = {}
    for one in sync.main_parameters():
        gradient, one.tensor.grad = one.tensor.grad, None
        gradients[one.record.name] = None if gradient is None else gradient.tolist()
    return gradients


@pytest.mark.ranks(2)
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    ("change", "right"),
    [
        (lambda gradient: gradient.mul_(2), [2 * (2 * n + 3.0) for n in range(STEPS)]),
        (
            lambda gradient: gradient.clamp_(-3.5, 3.5),
            [min(n + 1.0, 3.5) + min(n + 2.0, 3.5) for n in range(STEPS)],
        ),
    ],
    ids=["doubled", "clamped"],
)
def test_a_hook_registered_after_the_first_step_changes_what_leaves(
    change: Callable[[Tensor], object], right: list[float], inside: bool
) -> None:
    module = stage(a=(64,), b=(64,))
    a = module.get_parameter("a")
    sync = tied(module, "a", "b", bucket_bytes=0)
    step(sync, module, a=1.0, b=1.0)
    launched: list[int] = []

    def hook(parameter: Tensor) -> None:
        launched.append(sync._parts.reducer.num_launched)
        assert parameter.grad is not None
        change(parameter.grad)

    if not inside:
        a.register_post_accumulate_grad_hook(hook)
    for number in range(STEPS):
        module.zero_grad()
        sync.prepare()
        handle = a.register_post_accumulate_grad_hook(hook) if inside else None
        sync.stage_last_backward(rank())
        give(module, a=1.0 + number + rank())
        give(module, b=1.0)
        sync.stage_final(rank())
        sync.finish()
        if handle is not None:
            handle.remove()
        assert grads(module) == {"a": [right[number]] * 64, "b": [2.0] * 64}
    assert launched == [0] * STEPS
    assert sync.statistics().early == 2
    sync.close()


@pytest.mark.ranks(2)
def test_what_a_kernel_adds_by_address_is_reduced() -> None:
    # On both ranks, on one beside autograd on the other, on one alone, in accumulated steps.
    module = stage(a=(2,))
    a = module.get_parameter("a")
    sync = tied(module, "a", accessor=MainGrad())
    sync.optimizer_parameters()

    def compute(case: str) -> None:
        sync.prepare(divisor=2.0)
        if case == "both" or rank() == 0:
            for x in (4.0, 8.0):
                kernel(torch.full_like(a, x), a, by_address=True).sum().backward()
        elif case == "beside autograd":
            give(module, a=2.0)
        sync.stage_final(rank())
        sync.finish()

    for case, right in (("both", 12.0), ("beside autograd", 7.0), ("alone", 6.0)):
        compute(case)
        assert taken(sync) == {"a": [right] * 2}
        sync.publish()
    with sync.accumulate():
        compute("alone")
    compute("nobody" if rank() else "both")
    assert taken(sync) == {"a": [12.0] * 2}
    sync.close()


@pytest.mark.ranks(2)
def test_what_is_written_behind_autograd_is_divided_and_reduced() -> None:
    # Rank 0 writes behind autograd, and no hook fires; rank 1 by autograd, or not at all.
    module = stage(a=(2,), b=(2,), c=(2,))
    sync = tied(module, "a", "b", "c", accessor=MainGrad())
    sync.optimizer_parameters()
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
        one = 4.0 / divisor
        assert taken(sync) == {"a": [one, 2 * one], "b": [0.0, one], "c": None}
        sync.publish()
    sync.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["own", "a"])
def test_a_gradient_that_a_hook_has_dropped_is_an_error_where_it_is_reduced(name: str) -> None:
    # Rank 0's hook steps and drops the gradient, of a tie or of a parameter of its own.
    module = stage(a=(2,), own=(2,))
    sync = tied(module, "a")

    def drop(parameter: Tensor) -> None:
        if rank() == 0 and parameter is module.get_parameter(name):
            assert parameter.grad is not None
            with torch.no_grad():
                parameter.sub_(parameter.grad)
            parameter.grad = None

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(drop)
    words = outcome(lambda: step(sync, module, a=1.0, own=1.0))
    gone = "the gradient of '0.a' is gone: autograd added to it in this step"
    if name == "own":
        own = [1.0, 1.0] if rank() else None
        assert words == str({"a": [2.0, 2.0], "own": own})
        assert module.get_parameter("own").tolist() == [rank() - 1.0] * 2
    elif rank() == 0:
        assert words.startswith(f"StepError: {gone}")
        assert "optimizer.step() after finish()" in words
    else:
        assert words.startswith("ReduceError: a step failed on another rank")
        assert f"rank 0: StepError: {gone}" in words


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "options", [{}, {"reduce_dtype": torch.float64}, {"accessor": MainGrad()}], ids=" ".join
)
def test_each_accumulated_step_is_divided_by_its_own_divisor(options: dict[str, Any]) -> None:
    # 4 + 4 + 2 microbatches with means of 1: of a tie, of one that nobody reduces.
    module = stage(a=(2,), own=(2,), once=(2,), idle=(2,))
    sync = tied(module, "a", "once", "idle", **options)
    sync.optimizer_parameters()

    def compute(number: int, *names: str) -> None:
        sync.prepare(divisor=number)
        for _ in range(number):
            give(module, **dict.fromkeys(names, 1.0))
        sync.stage_final(rank())
        sync.finish()

    with sync.accumulate():
        compute(4, "a", "own")
        compute(4, "a", "own", "once")
    compute(2, "a", "own")
    right = {"a": [6.0] * 2, "own": [3.0] * 2, "once": [2.0] * 2, "idle": None}
    assert taken(sync) == right
    sync.close()


def test_a_gradient_of_the_users_own_is_not_divided() -> None:
    # It is no sum of microbatches: one process would add to it.
    module = stage(a=(1,))
    sync = GradientSync({0: module}, Topology.build(axes=(("pp", 1), ("dp", 1))), handlers=[])
    module.get_parameter("a").grad = torch.tensor([5.0])
    sync.prepare(divisor=4.0)
    give(module, a=8.0)
    sync.stage_final(0)
    sync.finish()
    assert grads(module) == {"a": [7.0]}
    sync.close()
