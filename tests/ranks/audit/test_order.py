"""Two replicas: a Work that nobody waits for, parameters that are frozen, and copies that drift."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from pipegrad.audit import Audit


def audit(
    wrapped: Callable[[Any], Any],
    finish: Callable[[nn.Module], None],
    *,
    freezes: bool = False,
    drops: bool = False,
    held: slice | None = None,
) -> Audit:
    """Returns the audit; `drops` changes the mode of rank 1's uncut model, `held` its modules."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    model[0].requires_grad_(not freezes)
    module = wrapped(copy.deepcopy(model))
    if drops:
        model.append(nn.Dropout(0.5)).train(dist.get_rank() == 0)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def step(inputs: Tensor, target: Tensor) -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(module(inputs), target).backward()
        finish(module)
        optimizer.step()

    return Audit(
        step=step,
        modules=module if held is None or dist.get_rank() == 0 else module[held],
        model=model,
        loss_fn=nn.functional.mse_loss,
        batches=[(torch.randn(4, 4), torch.randn(4, 2)) for _ in range(2)],
        microbatches=1,
        replica=dist.get_rank(),
        num_replicas=2,
    )


def sums(module: nn.Module, *, waits: bool) -> None:
    works = [dist.all_reduce(p.grad, async_op=True) for p in module.parameters()]
    if waits:
        for work in works:
            work.wait()
    for parameter in module.parameters():
        assert parameter.grad is not None
        parameter.grad /= 2
    for work in () if waits else works:
        work.wait()


def drifts(module: nn.Module) -> None:
    sums(module, waits=True)
    for parameter in module.parameters():
        parameter.data *= 1 + dist.get_rank() / 1000


def sharded(module: nn.Module) -> nn.Module:
    fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    return module


def nothing(module: nn.Module) -> None:
    """Reduces nothing: a wrapper does."""


def waits(**options: Any) -> Audit:
    return audit(lambda m: m, lambda m: sums(m, waits=True), **options)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "make",
    [waits, lambda: audit(DistributedDataParallel, nothing), lambda: audit(sharded, nothing)],
    ids=["waits", "DDP", "FSDP2"],
)
def test_a_step_that_waits_is_right(make: Callable[[], Audit]) -> None:
    order, numbers = make().order(), make().run()
    assert order.is_right, str(order)
    assert numbers.is_right, str(numbers)


@pytest.mark.ranks(2)
def test_a_gradient_that_is_written_before_its_sum_has_ended_is_found() -> None:
    order = audit(lambda m: m, lambda m: sums(m, waits=False)).order()
    causes = [finding.cause for finding in order.findings]
    assert causes
    assert all("not ordered after" in cause for cause in causes)
    assert all("allreduce_" in cause and "test_order.py" in cause for cause in causes)
    # The report says what it cannot see.
    notes = "\n".join(waits().order().notes)
    assert "not seen: " in notes
    assert "rank 0 ran " in notes


@pytest.mark.ranks(2)
def test_replicas_with_frozen_modes_or_missing_modules_are_told_apart() -> None:
    report = audit(sharded, nothing, freezes=True).run()
    assert report.is_right, str(report)
    # A mode of one ranks uncut model keeps no rank waiting.
    waits(drops=True).run()
    # Experts are held by one replica each, so a module that is left out is no error.
    report = waits(held=slice(1)).run()
    assert "not every replica holds 2.weight, 2.bias: these were taken for" in report.notes[0]
    [finding] = audit(lambda m: m, drifts).run().findings
    assert finding.cause.startswith("copies of the parameter differ after the optimizer's step")
