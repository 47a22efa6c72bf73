"""Gradients of DTensors: read, written, reduced and counted as this rank's part."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

from pipegrad import GradientSync, Scheduler, Stage, Topology
from pipegrad.model.dtensor import as_dtensor, local
from pipegrad.plugins.handler import Exchange
from tests.support.gradients.cases import rank
from tests.support.gradients.placements import compute, mesh
from tests.support.pipeline.pipelines import loss_of
from tests.support.pipeline.schedulers import error
from tests.support.pipeline.sharded import VOCAB, WIDTH, batch
from tests.support.rounding import rounding

pytestmark = pytest.mark.ranks(4)
MOST = rounding(2 * 2 * 2 * 8)  # of the largest batch, in two parts


def tensor_parallel(**axes: int) -> tuple[Topology, DeviceMesh]:
    topology = mesh(**axes)
    assert topology.mesh is not None
    return topology, topology.mesh["tp"]


@pytest.mark.ranks(2)
def test_autograd_adds_to_the_slot_that_a_dtensor_holds() -> None:
    """On a mesh of two ranks; the second has fewer rows."""
    dp = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    parameter = nn.Parameter(distribute_tensor(torch.arange(10.0).view(5, 2), dp, [Shard(0)]))
    slot = torch.zeros(local(parameter).shape)
    assert slot.shape == (3 - rank(), 2)
    parameter.grad = held = as_dtensor(slot, parameter)
    (parameter * 3).sum().backward()
    assert parameter.grad is held
    assert held.shape == (5, 2)
    assert slot.unique().tolist() == [3.0]
    # Autograd sums the terms of a replicated one, which a whole backward leaves as they are.
    terms = nn.Parameter(distribute_tensor(torch.ones(4), dp, [Replicate()]))
    terms.grad = held = as_dtensor(torch.zeros(4), terms)
    (distribute_tensor(torch.ones(2, 4), dp, [Shard(0)]) * terms).sum().backward()
    assert terms.grad is held
    assert local(held).tolist() == [2.0] * 4


class Projection(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return self.multiplied(x, self.weight.T)

    def multiplied(self, x: Tensor, matrix: Any) -> Tensor:
        tp = self.weight.device_mesh  # type: ignore[attr-defined]
        made = DTensor.from_local(x, tp, [Replicate()], run_check=False) @ matrix
        found: Tensor = made.redistribute(placements=[Replicate()]).to_local()
        return found.clone()


class Table(Projection):
    def forward(self, x: Tensor) -> Tensor:
        one_hot = nn.functional.one_hot(x, self.weight.shape[0]).float()
        return self.multiplied(one_hot, self.weight)


@pytest.mark.ranks(8)
def test_tensor_parallel_parameters_are_reduced_along_other_dimensions_and_count_once() -> None:
    """A tied matrix cut over "tp" in both of two stages, and data parallel: against one process."""
    topology, tp = tensor_parallel(pp=2, dp=2, tp=2)
    stage = topology.local_stages[0]
    true = nn.Parameter(torch.randn(VOCAB, WIDTH) * 0.3)
    weight = nn.Parameter(distribute_tensor(true.detach(), tp, [Shard(0)]))
    scheduler = Scheduler(
        [Stage((Table, Projection)[stage](weight), stage)],
        topology,
        schedule="1f1b",
        num_microbatches=2,
        loss_fn=loss_of,
        tied=[{0: "weight", 1: "weight"}],
    )
    tokens, target = batch(5, 8)
    mine = [t.chunk(2)[topology.coordinate("dp")] for t in (tokens, target)]
    loss = scheduler.step(mine[0], target=mine[1]).loss
    true_loss = loss_of(true[tokens] @ true.T, target)
    true_loss.backward()
    gradient: Any = weight.grad
    norm = scheduler.sync.clip_grad_norm_(torch.inf)
    assert true.grad is not None
    assert error(loss, true_loss.detach()) <= MOST
    assert error(gradient.full_tensor(), true.grad) <= MOST
    assert error(norm, true.grad.norm()) <= MOST
    scheduler.sync.check_replicas()
    scheduler.close()


@pytest.mark.parametrize("how", ["all-reduce", "asymmetric"])
def test_the_smaller_part_of_a_matrix_cut_along_columns_is_reduced_whole(how: Exchange) -> None:
    """It lay in its slot with the larger one's strides: half of it was beyond what was sent."""
    topology, tp = tensor_parallel(pp=2, tp=2)
    stage = topology.local_stages[0]
    values = torch.arange(20.0).view(4, 5)
    start = (values + 1) * (1 - stage)  # of 3 columns and 2; zeros take what the other stage has
    module = Projection(nn.Parameter(distribute_tensor(start, tp, [Shard(1)])))
    handlers = [{"name": "pipeline-shared", "exchange": how}]
    shared = [{0: "weight", 1: "weight"}]
    sync = GradientSync({stage: module}, topology, tied=shared, handlers=handlers)
    weight: Any = module.weight
    assert torch.equal(weight.detach().full_tensor(), values + 1)
    given = distribute_tensor(values * (1 + 9 * stage), tp, [Shard(1)])
    compute(sync, lambda: (weight * given).sum().backward())
    assert torch.equal(weight.grad.full_tensor(), 11 * values)
    sync.check_replicas()
    sync.close()


@pytest.mark.parametrize("data", [1, 2])
def test_terms_that_backward_leaves_are_summed_over_their_mesh(data: int) -> None:
    """A norm of torch's `SequenceParallel`, of which backward leaves each rank a term."""
    topology, tp = tensor_parallel(dp=data, tp=4 // data)
    true = nn.Sequential(nn.LayerNorm(6))
    module = copy.deepcopy(true)
    parallelize_module(module, tp, {"0": SequenceParallel()})
    sync = GradientSync({0: module}, topology, handlers=["data-parallel"])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(2):
        parts = torch.randn(2, data, 2, 8, 6, generator=torch.Generator().manual_seed(step))
        for number, part in enumerate(parts):
            with contextlib.nullcontext() if number else sync.accumulate():
                sync.prepare()
                for half in part[topology.coordinate("dp")].chunk(2):
                    cut = distribute_tensor(half, tp, [Shard(1)])
                    module(cut).pow(3).sum().full_tensor().backward()
                sync.stage_final(0)
                sync.finish()
        (true(parts.flatten(0, 2)).pow(3).sum() / data).backward()
        for name, mine in module.named_parameters():
            ours: Any = mine.grad
            assert error(ours.full_tensor(), true.get_parameter(name).grad) <= MOST, name
        optimizer.zero_grad()
        true.zero_grad()
    sync.close()
