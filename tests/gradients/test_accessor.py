"""Gradients wherever they live: local shards of DTensors, main_grad, and a third party's ledger."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from torch.utils.weak import WeakTensorKeyDictionary

from pipegrad import (
    Exchange,
    GradAttribute,
    GradientAccessor,
    GradientSync,
    MainGrad,
    Scheduler,
    Stage,
    StepError,
    Topology,
    attach,
    find_shared,
)
from pipegrad.gradients.shards import local
from pipegrad.testing import OrderChecker, run_ranks
from tests.gradients.hooks import POWER_SGD, hooked
from tests.runtime.pipelines import CPU, loss_of
from tests.runtime.schedulers import error
from tests.runtime.sharded import VOCAB, WIDTH, batch, build, low_step

MOST = 1e-6
ALONE = Topology.build(axes=(("pp", 1), ("dp", 1)))
SHARED = [["a.weight", "b.weight"]]


class Ledger:
    """Somebody else's: all gradients in one place."""

    def __init__(self) -> None:
        self.entries = WeakTensorKeyDictionary()

    def dtype(self, parameter: nn.Parameter) -> torch.dtype:
        return parameter.dtype

    def read(self, parameter: nn.Parameter) -> Tensor | None:
        found: Tensor | None = self.entries.get(parameter)
        return found

    def write(self, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        self.entries[parameter] = gradient

    def accumulated(self, parameter: nn.Parameter) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        there = self.read(parameter)
        if there is None:
            self.write(parameter, gradient.clone())
        else:
            there.add_(gradient)


# DTensors.


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
        shared=[{0: "weight", 1: "weight"}],
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
    module = Projection(nn.Parameter(distribute_tensor(values + 1 - stage, mesh["tp"], [Shard(1)])))
    handlers = [{"name": "pipeline-shared", "exchange": how}]
    shared = [{0: "weight", 1: "weight"}]
    sync = GradientSync({stage: module}, topology, shared=shared, handlers=handlers)
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
            torch.testing.assert_close(gradient, goal, rtol=1e-5, atol=1e-5)


def test_terms_that_backward_leaves_are_summed_over_their_mesh(four: Any) -> None:
    for reply in four:
        for errors in reply["sequence"]:
            assert set(errors) == {f"{n} 0.{name}" for n in (0, 1) for name in ("weight", "bias")}
            assert {name: e for name, e in errors.items() if not e <= MOST} == {}


# main_grad.


def megatron(schedule: str, accumulate: int) -> dict[str, Any]:
    """Trains bf16 stages with fp32 main_grad and master copies, beside one process' arithmetic."""
    topology, model = Topology.create(pipeline=2), build()
    true: Any = copy.deepcopy(model).bfloat16().float()
    cut = copy.deepcopy(model).bfloat16()
    stage = topology.local_stages[0]
    module = cut[2 * stage : 2 * stage + 2]
    scheduler = Scheduler(
        [Stage(module, stage)],
        topology,
        schedule=schedule,
        num_microbatches=4,
        loss_fn=loss_of,
        shared=find_shared(model),
        accessor=MainGrad(),
        stored_dtype=torch.float32,
    )
    sync = scheduler.sync
    optimizer = torch.optim.AdamW(sync.optimizer_parameters(), lr=1e-2)
    true_optimizer = torch.optim.AdamW(true.parameters(), lr=1e-2)
    stepped = {one.record.name: one.tensor for one in sync.stepped()}
    errors, early = dict[str, float](), list[int]()
    with OrderChecker() as checker:
        for step in range(3):
            for part in range(accumulate):
                tokens, target = batch(10 * step + part, 8)
                if part < accumulate - 1:
                    with sync.accumulate():
                        loss = scheduler.step(tokens, target=target).loss
                else:
                    loss = scheduler.step(tokens, target=target).loss
                errors[f"{step} loss {part}"] = error(loss, low_step(true, tokens, target, 4))
            early.append(sync.statistics().early)
            assert all(p.grad is None for p in module.parameters())
            assert all(MainGrad().read(p) is None for p in module.parameters())
            norm = sync.clip_grad_norm_(0.5)
            errors[f"{step} norm"] = error(norm, nn.utils.clip_grad_norm_(true.parameters(), 0.5))
            for name, tensor in stepped.items():
                goal = true.get_parameter(name).grad  # of "3.weight" that of "0.weight"
                if goal is None:
                    assert tensor.grad is None
                    continue
                assert tensor.grad is not None
                errors[f"{step} gradient {name}"] = error(tensor.grad, goal)
            for one in (optimizer, true_optimizer):
                one.step()
                one.zero_grad()
            sync.publish()
            master = dict(true.named_parameters(remove_duplicate=False))
            errors |= {f"{step} master {n}": error(t, master[n]) for n, t in stepped.items()}
    sync.check_replicas()
    dtypes = {str(t.dtype) for t in stepped.values()}
    scheduler.close()
    return {"errors": errors, "early": early, "violations": len(checker.violations)} | {
        "dtypes": dtypes
    }


def megatrons(cases: Sequence[tuple[str, int]]) -> list[dict[str, Any]]:
    return [megatron(*case) for case in cases]


def test_bf16_with_main_grad_and_master_copies_is_one_process_in_mixed_precision() -> None:
    cases = [("1f1b", 1), ("gpipe", 2), ("zb-h1", 1)]
    for rank, reports in enumerate(run_ranks(megatrons, 2, cases)):
        for case, report in zip(cases, reports, strict=True):
            wrong = {name: e for name, e in report["errors"].items() if not e <= MOST}
            assert wrong == {}, (rank, case)
            assert {name.split()[1] for name in report["errors"]} == {
                "loss",
                "norm",
                "gradient",
                "master",
            }
            assert report["violations"] == 0
            assert report["dtypes"] == {"torch.float32"}
            used = 8 if rank else 6
            assert report["early"] == [0, used, used] or case[0] == "zb-h1"


def torchs_split() -> dict[str, float]:
    """torch writes the gradients of weights itself, in a backward that fires no hooks."""
    topology = Topology.create(pipeline=2, stage_to_rank=(0, 1, 0, 1))
    torch.manual_seed(1)
    true = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))
    modules = {s: copy.deepcopy(true[s]) for s in topology.local_stages}
    group = topology.group_along("pp")
    stages: list[Any] = [PipelineStage(m, s, 4, CPU, group=group) for s, m in modules.items()]
    schedule = ScheduleInterleavedZeroBubble(stages, 4, loss_fn=nn.functional.mse_loss)
    sync = attach(schedule, topology=topology, handlers=[], accessor=MainGrad())
    sync.optimizer_parameters()
    errors = {}
    for step in range(2):
        x, target = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(step))
        schedule.step(*([x] if 0 in modules else []), target=target if 3 in modules else None)
        nn.functional.mse_loss(true(x), target).backward()
        for one in sync.stepped():
            goal = true.get_parameter(f"{one.record.stage}.{one.record.name}")
            errors[f"{step} {one.record.key}"] = error(one.tensor.grad, goal.grad)
            one.tensor.grad = None
        true.zero_grad()
        sync.publish()
        assert all(p.grad is None for module in modules.values() for p in module.parameters())
    sync.close()
    return errors


def test_what_torchs_split_backward_writes_is_taken_too() -> None:
    for errors in run_ranks(torchs_split, 2):
        assert len(errors) == 2 * 4
        assert {name: e for name, e in errors.items() if not e <= MOST} == {}


def alone(accessor: GradientAccessor, *, dtype: torch.dtype, **options: Any) -> Any:
    """Returns a sync of one rank, its module and its optimizer."""
    torch.manual_seed(1)
    module = nn.Linear(3, 2, dtype=dtype)
    sync = GradientSync({0: module}, ALONE, handlers=[], accessor=accessor, **options)
    return sync, module, torch.optim.SGD(sync.optimizer_parameters(), lr=0.5)


@pytest.mark.parametrize("make", [MainGrad, Ledger])
def test_an_optimizer_steps_what_has_its_gradients_elsewhere(make: type) -> None:
    sync, module, optimizer = alone(make(), dtype=torch.float32)
    true = copy.deepcopy(module)
    true_optimizer = torch.optim.SGD(true.parameters(), lr=0.5)
    for step in range(3):
        x = torch.full((4, 3), 1.0 + step)
        sync.prepare(divisor=2)
        for part in x.chunk(2):
            module(part).pow(2).mean().backward()
            assert module.weight.grad is None
        sync.stage_final(0)
        sync.finish()
        true(x).pow(2).mean().backward()
        norm = sync.clip_grad_norm_(1.0)
        true_norm = nn.utils.clip_grad_norm_(true.parameters(), 1.0)
        assert norm.item() == pytest.approx(true_norm.item(), rel=1e-6)
        for one in (optimizer, true_optimizer):
            one.step()
            one.zero_grad()
        sync.publish()
        for mine, theirs in zip(module.parameters(), true.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)
    sync.close()


def test_who_steps_the_parameters_themselves_is_told() -> None:
    torch.manual_seed(1)
    module = nn.Linear(3, 2)
    sync = GradientSync({0: module}, ALONE, handlers=[], accessor=MainGrad())
    sync.prepare()
    module(torch.ones(1, 3)).sum().backward()
    sync.stage_final(0)
    sync.finish()
    with pytest.raises(StepError, match=r"give the optimizer sync\.optimizer_parameters"):
        sync.publish()


class FusedKernel(torch.autograd.Function):
    """Adds to main_grad itself, as Megatron's and Transformer Engine's do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        made: Tensor = x @ weight.detach().T
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = ctx.saved_tensors
        weight = ctx.weight
        weight.main_grad.add_(gradient.T.float() @ x.float())
        weight.grad_added_to_main_grad = True
        returned: Tensor = gradient @ weight.detach()
        return returned, torch.full_like(weight, torch.nan)  # a placeholder


def by_kernel(x: Tensor, weight: Tensor) -> Tensor:
    made: Tensor = FusedKernel.apply(x, weight)  # type: ignore[no-untyped-call]
    return made


def fused() -> list[Tensor]:
    """Two microbatches by the kernel, and one without it."""
    topology = Topology.create(pipeline=1)
    torch.manual_seed(1)
    module = nn.Linear(3, 2, bias=False, dtype=torch.bfloat16)
    sync = GradientSync(
        {0: module},
        topology,
        handlers=["data-parallel"],
        accessor=MainGrad(),
        stored_dtype=torch.float32,
    )
    sync.optimizer_parameters()
    x = torch.arange(6.0, dtype=torch.bfloat16).view(2, 3)
    found = []
    for _ in range(2):
        sync.prepare()
        for _ in range(2):
            by_kernel(x, module.weight).sum().backward()
        module(x).sum().backward()
        sync.stage_final(0)
        sync.finish()
        (one,) = sync.stepped()
        assert one.tensor.grad is not None
        found.append(one.tensor.grad.clone())
        one.tensor.grad = None
        sync.publish()
    sync.close()
    return found


def test_a_kernel_that_adds_to_main_grad_itself_is_believed() -> None:
    true = 3 * torch.arange(6.0).view(2, 3).sum(0).expand(2, 3)
    for found in run_ranks(fused, 2):
        for gradient in found:
            assert torch.equal(gradient, true)
