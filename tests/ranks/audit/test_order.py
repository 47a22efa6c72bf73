"""The order of accesses in somebody's step: a Work that is not waited for is found."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from pipegrad.audit import Audit


def audit(wrapped: Callable[[nn.Module], nn.Module], finish: Callable[[nn.Module], None]) -> Audit:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    module = wrapped(copy.deepcopy(model))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def step(inputs: Tensor, target: Tensor) -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(module(inputs), target).backward()
        finish(module)
        optimizer.step()

    return Audit(
        step=step,
        modules=module,
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


def sharded(module: nn.Module) -> nn.Module:
    fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    return module


def nothing(module: nn.Module) -> None:
    """Reduces nothing: a wrapper does."""


def waits() -> Audit:
    return audit(lambda m: m, lambda m: sums(m, waits=True))


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
