"""Two replicas: wrappers that are right, parameters that are frozen, and copies that drift."""

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


def sums(module: nn.Module) -> None:
    for parameter in module.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= 2


def drifts(module: nn.Module) -> None:
    sums(module)
    for parameter in module.parameters():
        parameter.data *= 1 + dist.get_rank() / 1000


def sharded(module: nn.Module) -> nn.Module:
    fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    return module


def nothing(module: nn.Module) -> None:
    """Reduces nothing: a wrapper does."""


def by_hand(**options: Any) -> Audit:
    return audit(lambda m: m, sums, **options)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "make",
    [by_hand, lambda: audit(DistributedDataParallel, nothing), lambda: audit(sharded, nothing)],
    ids=["by hand", "DDP", "FSDP2"],
)
def test_replicas_that_average_are_right(make: Callable[[], Audit]) -> None:
    report = make().run()
    assert report.is_right, str(report)


@pytest.mark.ranks(2)
def test_replicas_with_frozen_modes_or_missing_modules_are_told_apart() -> None:
    report = audit(sharded, nothing, freezes=True).run()
    assert report.is_right, str(report)
    # A mode of one ranks uncut model keeps no rank waiting.
    by_hand(drops=True).run()
    # Experts are held by one replica each, so a module that is left out is no error.
    report = by_hand(held=slice(1)).run()
    assert "not every replica holds 2.weight, 2.bias: these were taken for" in report.notes[0]
    [finding] = audit(lambda m: m, drifts).run().findings
    assert finding.cause.startswith("copies of the parameter differ after the optimizer's step")
