"""Gradients of DTensors: read, written, reduced and counted as this rank's part."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

from pipegrad import GradientSync, Scheduler, Stage, Topology
from pipegrad.errors import StepError
from pipegrad.model.dtensor import local
from pipegrad.model.gradient_storage import GradAttribute, GradientAccessor
from pipegrad.plugins.handler import Exchange
from pipegrad.testing import run_ranks
from tests.support.gradients.hooks import POWER_SGD, hooked
from tests.support.pipeline.pipelines import loss_of
from tests.support.pipeline.schedulers import error
from tests.support.pipeline.sharded import VOCAB, WIDTH, batch
from tests.support.rounding import rounding

MOST = rounding(2 * 2 * 2 * 8)  # of the largest batch, in two parts
ALONE = Topology.build(axes=(("pp", 1), ("dp", 1)))
SHARED = [["a.weight", "b.weight"]]


def shards() -> dict[str, Any]:
    """Writes, reads and accumulates on a mesh of two ranks; the second has fewer rows."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    parameter = nn.Parameter(distribute_tensor(torch.arange(10.0).view(5, 2), mesh, [Shard(0)]))
    accessor: GradientAccessor = GradAttribute()
    slot = torch.zeros(local(parameter).shape)
    accessor.write(parameter, slot)
    found = {"shape": tuple(slot.shape), "same": accessor.read(parameter) is slot}
    (parameter * 3).sum().backward()
    found["added"] = slot.tolist()
    found["global"] = tuple(parameter.grad.shape) if parameter.grad is not None else ()
    parameter.grad = None
    found["dropped"] = accessor.read(parameter) is None
    parameter.grad = DTensor.from_local(torch.ones(5, 2), mesh, [Partial()])
    try:
        accessor.read(parameter)
    except StepError as refused:
        found["refused"] = str(refused)
    return found


def test_a_dtensors_gradient_is_read_and_written_as_the_local_shard() -> None:
    first, second = run_ranks(shards, 2)

    assert (first["shape"], second["shape"]) == ((3, 2), (2, 2))
    for found in (first, second):
        assert found["same"]
        assert found["global"] == (5, 2)
        assert {x for row in found["added"] for x in row} == {3.0}
        assert found["dropped"]
        assert "[Shard(dim=0)], its gradient by [Partial(sum)]" in found["refused"]


class TensorParallel(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


class Table(TensorParallel):
    def forward(self, x: Tensor) -> Tensor:
        mesh, weight = self.weight.device_mesh, self.weight  # type: ignore[attr-defined]
        one_hot = nn.functional.one_hot(x, self.weight.shape[0]).float()
        given = DTensor.from_local(one_hot, mesh, [Replicate()], run_check=False)
        return whole(given @ weight)


class Projection(TensorParallel):
    def forward(self, x: Tensor) -> Tensor:
        mesh = self.weight.device_mesh  # type: ignore[attr-defined]
        given = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        return whole(given @ self.weight.T)


def whole(made: Any) -> Tensor:
    found: Tensor = made.redistribute(placements=[Replicate()]).to_local()
    return found.clone()


def tensor_parallel() -> dict[str, float]:
    """A tied matrix cut over "tp" in both of two stages, and data parallel: against one process."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    topology = Topology.from_mesh(mesh)
    stage = topology.local_stages[0]
    torch.manual_seed(3)
    true = nn.Parameter(torch.randn(VOCAB, WIDTH) * 0.3)
    weight = nn.Parameter(distribute_tensor(true.detach(), mesh["tp"], [Shard(0)]))
    module = (Table, Projection)[stage](weight)
    scheduler = Scheduler(
        [Stage(module, stage)],
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
    errors = {
        "loss": error(loss, true_loss.detach()),
        "gradient": error(gradient.full_tensor(), true.grad),
        "norm": error(norm, true.grad.norm()),
    }
    scheduler.sync.check_replicas()
    scheduler.close()
    return errors


def test_tensor_parallel_parameters_are_reduced_along_other_dimensions_and_count_once() -> None:
    for errors in run_ranks(tensor_parallel, 8):
        assert set(errors) == {"loss", "gradient", "norm"}
        assert {name: e for name, e in errors.items() if not e <= MOST} == {}


def columns(how: Exchange) -> dict[str, Any]:
    """A tied matrix cut along columns, 3 and 2: the gradient, and what stage 1 began with."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "dp", "tp"))
    topology = Topology.from_mesh(mesh)
    stage = topology.local_stages[0]
    values = torch.arange(20.0).view(4, 5)
    start = (values + 1) * (1 - stage)  # zeros take what the other stage has
    module = Projection(nn.Parameter(distribute_tensor(start, mesh["tp"], [Shard(1)])))
    handlers = [{"name": "pipeline-shared", "exchange": how}]
    shared = [{0: "weight", 1: "weight"}]
    sync = GradientSync({stage: module}, topology, tied=shared, handlers=handlers)
    weight: Any = module.weight
    found = {"began": weight.detach().full_tensor().tolist()}
    sync.prepare()
    goal = distribute_tensor(values * (1 + 9 * stage), mesh["tp"], [Shard(1)])
    (weight * goal).sum().backward()
    sync.stage_final(stage)
    sync.finish()
    found["gradient"] = weight.grad.full_tensor().tolist()
    sync.check_replicas()
    sync.close()
    return found


def compressed_columns() -> list[Tensor]:
    """A matrix of 5 and 4 columns on two ranks, averaged by PowerSGD over two others."""
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    topology = Topology.from_mesh(mesh)
    module = Projection(nn.Parameter(distribute_tensor(torch.zeros(8, 9), mesh["tp"], [Shard(1)])))
    hook = {**POWER_SGD, "matrix_approximation_rank": 1}  # as the gradient
    sync = GradientSync({0: module}, topology, handlers=[hooked(hook)])
    weight: Any = module.weight
    found = []
    for _ in range(4):
        sync.prepare()
        goal = (1.0 + topology.coordinate("dp")) * torch.arange(1.0, 10).expand(8, 9)
        (weight * distribute_tensor(goal, mesh["tp"], [Shard(1)])).sum().backward()
        sync.stage_final(0)
        sync.finish()
        found.append(weight.grad.full_tensor())
        weight.grad = None
    sync.close()
    return found


def sequence_parallel(data: int) -> dict[str, float]:
    """A norm of torch's `SequenceParallel`, of which backward leaves each rank a term."""
    mesh = init_device_mesh("cpu", (1, data, 4 // data), mesh_dim_names=("pp", "dp", "tp"))
    topology = Topology.from_mesh(mesh)
    torch.manual_seed(2)
    true = nn.Sequential(nn.LayerNorm(6))
    module = copy.deepcopy(true)
    parallelize_module(module, mesh["tp"], {"0": SequenceParallel()})
    sync = GradientSync({0: module}, topology, handlers=["data-parallel"])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    errors = {}
    for step in range(2):
        parts = torch.randn(2, data, 2, 8, 6, generator=torch.Generator().manual_seed(step))
        for number, part in enumerate(parts):
            with contextlib.nullcontext() if number else sync.accumulate():
                sync.prepare()
                for half in part[topology.coordinate("dp")].chunk(2):
                    cut = distribute_tensor(half, mesh["tp"], [Shard(1)])
                    module(cut).pow(3).sum().full_tensor().backward()
                sync.stage_final(0)
                sync.finish()
        (true(parts.flatten(0, 2)).pow(3).sum() / data).backward()
        for name, mine in module.named_parameters():
            ours: Any = mine.grad
            theirs = true.get_parameter(name).grad
            errors[f"{step} {name}"] = error(ours.full_tensor(), theirs)
        optimizer.zero_grad()
        true.zero_grad()
    sync.close()
    return errors


def tensor_parallel_cases() -> dict[str, Any]:
    exchanges: list[Exchange] = ["all-reduce", "pairwise", "asymmetric"]
    return {
        "columns": [columns(how) for how in exchanges],
        "compressed": compressed_columns(),
        "sequence": [sequence_parallel(data) for data in (1, 2)],
    }


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    return run_ranks(tensor_parallel_cases, 4)


def test_the_smaller_part_of_a_matrix_cut_along_columns_is_reduced_whole(four: Any) -> None:
    """It lay in its slot with the larger one's strides: half of it was beyond what was sent."""
    values = torch.arange(20.0).view(4, 5)
    for reply in four:
        for found in reply["columns"]:
            assert found == {"began": (values + 1).tolist(), "gradient": (11 * values).tolist()}
        for gradient in reply["compressed"]:
            goal = 1.5 * torch.arange(1.0, 10).expand(8, 9)
            assert error(gradient, goal) <= rounding(8 * 9)


def test_terms_that_backward_leaves_are_summed_over_their_mesh(four: Any) -> None:
    for reply in four:
        for errors in reply["sequence"]:
            assert set(errors) == {f"{n} 0.{name}" for n in (0, 1) for name in ("weight", "bias")}
            assert {name: e for name, e in errors.items() if not e <= MOST} == {}
