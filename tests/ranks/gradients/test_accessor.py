"""Gradients in main_grad; and whose writes to a gradient count inside a step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble

from pipegrad import GradientSync, MainGrad, Scheduler, Stage, Topology, attach, find_tied
from pipegrad.errors import PlanError
from pipegrad.testing import OrderChecker
from tests.support.gradients.cases import (
    ALONE,
    give,
    grads,
    outcome,
    rank,
    replicated,
    stage,
    step,
    tied,
)
from tests.support.pipeline.pipelines import CPU, loss_of
from tests.support.pipeline.schedulers import error
from tests.support.pipeline.sharded import TOKENS, batch, build, low_step
from tests.support.pipeline.trained import differences, train
from tests.support.rounding import ADAM_EPS, rounding
from tests.support.versions import needs_2_13

MOST = rounding(3 * 2 * 8 * TOKENS)  # of three steps of two batches


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("schedule", "accumulate"), [("1f1b", 1), ("gpipe", 2), ("zb-h1", 1)])
def test_bf16_with_main_grad_and_master_copies_is_one_process_in_mixed_precision(
    schedule: str, accumulate: int
) -> None:
    topology, model = Topology.create(pipeline=2), build()
    true: Any = copy.deepcopy(model).bfloat16().float()
    number = topology.local_stages[0]
    module = copy.deepcopy(model).bfloat16()[2 * number : 2 * number + 2]
    options: dict[str, Any] = {"num_microbatches": 4, "loss_fn": loss_of, "tied": find_tied(model)}
    options |= {"accessor": MainGrad(), "master_dtype": torch.float32}
    scheduler = Scheduler([Stage(module, number)], topology, schedule=schedule, **options)
    sync = scheduler.sync
    optimizer = torch.optim.AdamW(sync.optimizer_parameters(), lr=1e-2, eps=ADAM_EPS)
    masters: Any = {one.record.name: one.tensor for one in sync.main_parameters()}
    assert {tensor.dtype for tensor in masters.values()} == {torch.float32}
    early = []

    def step(number: int, part: int) -> Tensor | None:
        tokens, target = batch(10 * number + part, 8)
        return scheduler.step(tokens, target=target).loss

    def look(_: int) -> None:
        early.append(sync.statistics().early)
        assert all(p.grad is None for p in module.parameters())
        for one in sync.main_parameters():
            main = getattr(sync.parameter(one.record), "main_grad", None)
            assert (main is None) == (one.tensor.grad is None)
        sync.publish()

    training: Any = {"steps": 3, "parts": accumulate, "clip": (0.5, 2.0)}
    expected = train(
        lambda number, part: low_step(true, *batch(10 * number + part, 8), 4),
        lambda: dict(true.named_parameters(remove_duplicate=False)),
        optimizer=torch.optim.AdamW(true.parameters(), lr=1e-2, eps=ADAM_EPS),
        **training,
    )
    with OrderChecker() as checker:
        seen = train(step, lambda: masters, sync=sync, optimizer=optimizer, look=look, **training)
    assert differences(seen, expected, MOST, parameters=MOST) == {}
    sync.check_replicas()
    scheduler.close()
    assert checker.violations == []
    assert early == [0, 1, 1] or schedule == "zb-h1"  # the tied one is the only one that is sent


@needs_2_13
@pytest.mark.ranks(2)
def test_what_torchs_split_backward_writes_is_taken_too() -> None:
    # torch writes the gradients of weights itself, in a backward that fires no hooks.
    topology = Topology.create(pipeline=2, stage_to_rank=(0, 1, 0, 1))
    true = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))
    modules = {s: copy.deepcopy(true[s]) for s in topology.local_stages}
    group = topology.group_along("pp")
    stages: list[Any] = [PipelineStage(m, s, 4, CPU, group=group) for s, m in modules.items()]
    schedule = ScheduleInterleavedZeroBubble(stages, 4, loss_fn=nn.functional.mse_loss)
    sync = attach(schedule, topology=topology, handlers=[], accessor=MainGrad())
    sync.optimizer_parameters()
    for number in range(2):
        x, target = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(number))
        schedule.step(*([x] if 0 in modules else []), target=target if 3 in modules else None)
        nn.functional.mse_loss(true(x), target).backward()
        assert len(sync.main_parameters()) == 4
        for one in sync.main_parameters():
            goal = true.get_parameter(f"{one.record.stage}.{one.record.name}").grad
            assert error(one.tensor.grad, goal) <= MOST, one.record.key
            one.tensor.grad = None
        true.zero_grad()
        sync.publish()
        assert all(p.grad is None for module in modules.values() for p in module.parameters())
    sync.close()


def test_an_accessor_of_ones_own_is_refused() -> None:
    own: Any = object()
    with pytest.raises(PlanError, match=r"accessor=object: it is pipegrad.MainGrad\(\) or None"):
        GradientSync({0: nn.Linear(3, 2)}, ALONE, handlers=[], accessor=own)


def test_an_optimizer_steps_what_has_its_gradients_elsewhere() -> None:
    torch.manual_seed(1)
    module = nn.Linear(3, 2)
    true = copy.deepcopy(module)
    sync = GradientSync({0: module}, ALONE, handlers=[], accessor=MainGrad())
    optimizer = torch.optim.SGD(sync.optimizer_parameters(), lr=0.5)
    true_optimizer = torch.optim.SGD(true.parameters(), lr=0.5)
    for number in range(3):
        x = torch.full((4, 3), 1.0 + number)
        sync.prepare(divisor=2)
        for part in x.chunk(2):
            module(part).pow(2).mean().backward()
            assert module.weight.grad is None
        sync.stage_final(0)
        sync.finish()
        true(x).pow(2).mean().backward()
        norm = sync.clip_grad_norm_(1.0)
        true_norm = nn.utils.clip_grad_norm_(true.parameters(), 1.0)
        assert norm.item() == pytest.approx(true_norm.item(), rel=rounding(3 * 4 * 3))
        for each in (optimizer, true_optimizer):
            each.step()
            each.zero_grad()
        sync.publish()
        for mine, theirs in zip(module.parameters(), true.parameters(), strict=True):
            assert error(mine.detach(), theirs.detach()) <= rounding(3 * 4 * 3)
    sync.close()


class Kernel(torch.autograd.Function):
    """Adds to main_grad itself, as those of Megatron and Transformer Engine do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        product: Tensor = x * weight.detach()
        return product

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        main = weight.main_grad
        main.add_(gradient.to(main.dtype) * x.to(main.dtype))
        weight.grad_added_to_main_grad = True
        return gradient * weight.detach(), torch.full_like(weight, torch.nan)  # a placeholder


@pytest.mark.ranks(2)
def test_a_kernel_that_adds_to_main_grad_itself_is_believed() -> None:
    module = stage(w=torch.zeros(3, dtype=torch.bfloat16))
    weight = module.get_parameter("w")
    sync = replicated(module, accessor=MainGrad(), master_dtype=torch.float32)
    sync.optimizer_parameters()
    (one,) = sync.main_parameters()
    x = torch.arange(3, dtype=torch.bfloat16) + 0.5
    for _ in range(2):
        sync.prepare()
        for _ in range(2):
            product: Tensor = Kernel.apply(x, weight)  # type: ignore[no-untyped-call]
            product.sum().backward()
        (weight * x).sum().backward()
        sync.stage_final(0)
        sync.finish()
        assert one.tensor.grad is not None
        assert torch.equal(one.tensor.grad, 3 * x.float())
        one.tensor.grad = None
        sync.publish()
    sync.close()


# Whose writes to a gradient count inside a step, in which order, and what they are divided by.


STEPS = 6


def taken(sync: GradientSync) -> dict[str, Any]:
    """Returns the gradients that an optimizer would step, and sets them to None."""
    gradients = {}
    for one in sync.main_parameters():
        gradient, one.tensor.grad = one.tensor.grad, None
        gradients[one.record.name] = None if gradient is None else gradient.tolist()
    return gradients


@pytest.mark.ranks(2)
@pytest.mark.parametrize("inside", [False, True])
def test_a_hook_registered_after_the_first_step_changes_what_leaves(inside: bool) -> None:
    module = stage(a=(64,), b=(64,))
    a = module.get_parameter("a")
    sync = tied(module, "a", "b", bucket_bytes=0)
    step(sync, module, a=1.0, b=1.0)
    launched: list[int] = []

    def hook(parameter: Tensor) -> None:
        launched.append(sync._reducer.num_launched)
        assert parameter.grad is not None
        parameter.grad.clamp_(-3.5, 3.5)

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
        right = min(number + 1.0, 3.5) + min(number + 2.0, 3.5)
        assert grads(module) == {"a": [right] * 64, "b": [2.0] * 64}
    assert launched == [0] * STEPS
    assert sync.statistics().early == 2
    sync.close()


@pytest.mark.ranks(2)
def test_what_is_written_behind_autograd_is_divided_and_reduced() -> None:
    # Rank 0 writes behind autograd, and no hook fires; rank 1 by autograd, or not at all.
    module = stage(a=(2,), b=(2,), c=(2,))
    sync = tied(module, "a", "b", "c", accessor=MainGrad())
    sync.optimizer_parameters()

    def write(divisor: float) -> None:
        sync.prepare(divisor=divisor)
        if rank() == 0:
            for name in ("a", "b"):
                parameter: Any = module.get_parameter(name)
                parameter.main_grad.data[1] += 4.0
        else:
            give(module, a=4.0)
        sync.stage_final(rank())
        sync.finish()

    for divisor, parts in ((4.0, 1), (1.0, 1), (2.0, 2)):
        with sync.accumulate():
            for _ in range(parts - 1):
                write(divisor)
        write(divisor)
        one = 4.0 * parts / divisor
        assert taken(sync) == {"a": [one, 2 * one], "b": [0.0, one], "c": None}
        sync.publish()
    sync.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["own", "a"])
def test_a_gradient_that_a_hook_has_dropped_is_an_error(name: str) -> None:
    # Rank 0's hook drops the gradient of a tie, or steps a parameter of its own.
    module = stage(a=(2,), own=(2,))
    sync = tied(module, "a")

    def drop(parameter: Tensor) -> None:
        if rank() == 0 and parameter is module.get_parameter(name):
            parameter.grad = None

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(drop)
    words = outcome(lambda: step(sync, module, a=1.0, own=1.0))
    gone = f"the gradient of '0.{name}' is gone: autograd added to it in this step"
    if rank() == 0:
        assert words.startswith(f"StepError: {gone}")
        assert "optimizer.step() after finish()" in words
    elif name == "a":  # no rank waits for the other one, so rank 1 may have ended its step
        assert words.startswith("ReduceError: a step failed on another rank")
        assert f"rank 0: StepError: {gone}" in words


def test_a_gradient_of_the_users_own_is_not_divided() -> None:
    # It is no sum of microbatches: one process would add to it.
    module = stage(a=(1,))
    sync = GradientSync({0: module}, ALONE, handlers=[])
    module.get_parameter("a").grad = torch.tensor([5.0])
    assert step(sync, module, divisor=4.0, a=8.0) == {"a": [7.0]}
    sync.close()
