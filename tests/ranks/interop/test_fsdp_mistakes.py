"""What FSDP2 stages cannot have is refused by name, on all ranks; and rare steps are right."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor import Shard

import pipegrad
from pipegrad import GradientSync, MainGrad, Scheduler, Stage, Topology, find_tied
from pipegrad.errors import PipegradError
from pipegrad.testing import run_ranks
from tests.support.gradients.cases import in_float32
from tests.support.pipeline.pipelines import CPU, loss_of
from tests.support.pipeline.schedulers import MOST, error
from tests.support.pipeline.sharded import batch, build
from tests.support.versions import needs_2_13

PLACES = ((0, 1), (0, 1, 1, 0), (0, 1, 0, 1))
TIE = [{0: "0.weight", 1: "3.weight"}]


def stages(
    mesh: DeviceMesh,
    places: Sequence[int] = PLACES[0],
    *,
    over: DeviceMesh | None = None,
    **options: Any,
) -> dict[int, Any]:
    """Returns this rank's stages of the model, each layer sharded, and each stage."""
    options["mesh"] = over or mesh["dp"]
    model, here = build(), mesh.get_local_rank("pp")
    number = len(model) // len(places)
    found = {}
    for stage, place in enumerate(places):
        if place == here:
            layers = range(stage * number, (stage + 1) * number)
            module = nn.Sequential()
            for layer in layers:
                module.add_module(str(layer), copy.deepcopy(model[layer]))
                fully_shard(module[-1], **options)
            found[stage] = fully_shard(module, **options)
    return found


def synced(mesh: DeviceMesh, modules: dict[int, Any] | None = None, **options: Any) -> None:
    given = {"tied": TIE, "handlers": ["pipeline-shared"], **options}
    GradientSync(modules or stages(mesh), Topology.from_mesh(mesh), **given).close()


def both_handlers(mesh: DeviceMesh) -> None:
    synced(mesh, handlers=["pipeline-shared", "data-parallel"])


def sharded_handler(mesh: DeviceMesh) -> None:
    synced(mesh, handlers=["pipeline-shared", "sharded"])


def owner(mesh: DeviceMesh) -> None:
    synced(mesh, handlers=[{"name": "pipeline-shared", "placement": "owner"}])


def stored_in_fp32(mesh: DeviceMesh) -> None:
    modules = stages(mesh)
    for module in modules.values():
        module.bfloat16()
    synced(mesh, modules, master_dtype=torch.float32)


def float32_grad(mesh: DeviceMesh) -> None:
    modules = stages(mesh)
    for module in modules.values():
        in_float32(module.bfloat16())
    synced(mesh, modules)


def main_grad(mesh: DeviceMesh) -> None:
    synced(mesh, accessor=MainGrad())


def another_accessor_on_one_rank(mesh: DeviceMesh) -> None:
    synced(mesh, accessor=MainGrad() if mesh.get_rank() == 3 else None)


def cut_along_columns_on_one_stage(mesh: DeviceMesh) -> None:
    columns = mesh.get_local_rank("pp") == 1

    def placed(parameter: nn.Parameter) -> Shard:
        return Shard(1 if columns and parameter.dim() == 2 else 0)

    synced(mesh, stages(mesh, shard_placement_fn=placed))


def numbered_the_other_way_on_one_stage(mesh: DeviceMesh) -> None:
    rows = torch.tensor([[0, 1], [3, 2]])
    turned = DeviceMesh("cpu", rows, mesh_dim_names=("pp", "dp"))
    used = turned if mesh.get_local_rank("pp") == 1 else mesh
    synced(mesh, stages(mesh, over=used["dp"]))


def undeclared(mesh: DeviceMesh) -> None:
    synced(mesh, tied=())


def uncovered(mesh: DeviceMesh) -> None:
    synced(mesh, handlers=[])


def left_out(mesh: DeviceMesh) -> None:
    modules = stages(mesh)
    for stage, module in modules.items():
        if stage == 1:
            module.late = nn.Parameter(torch.ones(2))
    synced(mesh, modules)


def scheduled(mesh: DeviceMesh, schedule: str, places: Sequence[int]) -> None:
    Scheduler(
        [Stage(module, stage) for stage, module in stages(mesh, places).items()],
        Topology.from_mesh(mesh),
        schedule=schedule,
        num_microbatches=4,
        loss_fn=loss_of,
        tied=find_tied(build()),
        handlers=["pipeline-shared"],
    ).close()


def zb_h1(mesh: DeviceMesh) -> None:
    scheduled(mesh, "zb-h1", PLACES[0])


def zbv(mesh: DeviceMesh) -> None:
    scheduled(mesh, "zbv", PLACES[1])


def attached(mesh: DeviceMesh, schedule: str, places: Sequence[int], **options: Any) -> None:
    topology = Topology.from_mesh(mesh)
    group = topology.group_along("pp")
    made: Any = [
        PipelineStage(module, stage, len(places), CPU, group=group)
        for stage, module in stages(mesh, places, **options).items()
    ]
    wanted = get_schedule_class(schedule)(made, 4, loss_fn=loss_of)
    shared = find_tied(build())
    pipegrad.attach(wanted, topology=topology, tied=shared, handlers=["pipeline-shared"])


def torchs_split(mesh: DeviceMesh) -> None:
    attached(mesh, "InterleavedZeroBubble", PLACES[2])


def torchs_vee(mesh: DeviceMesh) -> None:
    attached(mesh, "ZBVZeroBubble", PLACES[1], reshard_after_forward=False)


LAYOUT = "(33, 6) by Shard(dim=0) over dp of 2"
REFUSALS: dict[Callable[[DeviceMesh], None], tuple[str, ...]] = {
    both_handlers: ("'data-parallel' reduces '0.0.weight'", LAYOUT, "reduced twice"),
    sharded_handler: ("'sharded' reduces '0.0.weight'", LAYOUT, "take REPLICATE"),
    owner: ("'pipeline-shared' reduces '0.0.weight' by owner-sum", LAYOUT, "take REPLICATE"),
    stored_in_fp32: (
        "master_dtype=torch.float32",
        "by Shard(dim=0) over dp of 2",
        "FSDP2 has MixedPrecisionPolicy",
    ),
    float32_grad: (
        "torch.float32 by GradAttribute",
        "by Shard(dim=0) over dp of 2",
        "FSDP2 has MixedPrecisionPolicy",
    ),
    main_grad: ("by MainGrad", "by Shard(dim=0) over dp of 2", "FSDP2 has MixedPrecisionPolicy"),
    another_accessor_on_one_rank: ("ranks disagree on accessor", "ranks [3]: MainGrad"),
    cut_along_columns_on_one_stage: (LAYOUT, "(33, 6) by Shard(dim=1) over dp of 2"),
    numbered_the_other_way_on_one_stage: ("different parts of it", "number the ranks"),
    undeclared: ("nobody declared them tied", "{0: '0.weight', 1: '3.weight'}"),
    uncovered: ("add 'pipeline-shared'",),
    left_out: ("'1.late' is a whole parameter in stage 1", "call fully_shard on the stage"),
    zb_h1: ("'zb-h1' splits backward", "take a schedule that does not split"),
    zbv: ("'zbv' splits backward", "take a schedule that does not split"),
    torchs_split: ("InterleavedZeroBubble splits backward", "reshard_after_forward=False"),
    torchs_vee: ("'3.weight' on stage 3 are on one rank", "place these stages on two ranks"),
}


def refusals() -> dict[str, str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    said = {}
    for refused in REFUSALS:
        try:
            refused(mesh)
        except PipegradError as found:
            said[refused.__name__] = str(found)
    return said


@functools.cache
def told() -> list[dict[str, str]]:
    return run_ranks(refusals, 4)


@pytest.mark.parametrize(
    "refused",
    [
        pytest.param(f, id=f.__name__, marks=needs_2_13 if f in (torchs_split, torchs_vee) else ())
        for f in REFUSALS
    ],
)
def test_is_refused_on_all_ranks_by_name(refused: Callable[[DeviceMesh], None]) -> None:
    for said in told():
        for words in REFUSALS[refused]:
            assert words in said[refused.__name__]


# Rare steps.


class Ignoring(nn.Module):
    """Does not use what it is given, if that is zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, flag: Tensor) -> Tensor:
        made: Tensor = self.linear(x.detach() if bool(flag.any()) else x)
        return made


def ignored(steps: int) -> dict[str, float]:
    """A stage gets no gradient back in the last microbatch; what has added up is reduced."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
    torch.manual_seed(2)
    modules: list[Any] = [nn.Linear(4, 4), Ignoring()]
    true = copy.deepcopy(modules)
    for module in modules:
        fully_shard(module, mesh=mesh["dp"])
    topology = Topology.from_mesh(mesh)
    scheduler = Scheduler(
        [Stage(modules[0], 0), Stage(modules[1], 1, inputs=("x", "flag"))],
        topology,
        schedule={"name": "interleaved-1f1b"},
        num_microbatches=2,
        loss_fn=lambda y, target: (y - target).pow(2).mean(),
        handlers=[],
    )
    errors = {}
    for step in range(steps):
        x, target = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(step))
        flag = torch.tensor([0.0, 0.0, 1.0, 1.0] * 2)
        mine = [t.chunk(2)[topology.coordinate("dp")] for t in (x, flag, target)]
        scheduler.step(mine[0], flag=mine[1], target=mine[2])
        for a, b, c in zip(x.chunk(4), flag.chunk(4), target.chunk(4), strict=True):
            ((true[1](true[0](a), b) - c).pow(2).mean() / 4).backward()
        for index in (0, 1):
            pairs = zip(modules[index].parameters(), true[index].parameters(), strict=True)
            for number, (ours, theirs) in enumerate(pairs):
                found = None if ours.grad is None else ours.grad.full_tensor()
                errors[f"{step} {index} {number}"] = error(found, theirs.grad)
                ours.grad = theirs.grad = None
    scheduler.close()
    return errors


def test_a_last_microbatch_without_a_backward_reduces_all_the_same() -> None:
    for errors in run_ranks(ignored, 2, 3):
        assert len(errors) == 12
        assert {name: e for name, e in errors.items() if not e <= MOST} == {}


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.countdown = -1

    def forward(self, x: Tensor) -> Tensor:
        self.countdown -= 1
        if not self.countdown:
            raise RuntimeError("a stage fails")
        made: Tensor = self.linear(x)
        return made


def failed(countdown: int) -> tuple[str, dict[str, float]]:
    """A step fails behind some backwards, on all replicas of a stage; the next one is right."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    torch.manual_seed(2)
    both: list[Any] = [Failing(), Failing()]
    true = copy.deepcopy(both)
    topology = Topology.from_mesh(mesh)
    (stage,) = topology.local_stages
    module = fully_shard(both[stage], mesh=mesh["dp"])
    x, target = torch.randn(2, 16, 4, generator=torch.Generator().manual_seed(1))
    mine = [t.chunk(2)[topology.coordinate("dp")] for t in (x, target)]
    options: Any = {"schedule": "1f1b", "num_microbatches": 4, "loss_fn": squared}
    scheduler = Scheduler([Stage(module, stage)], topology, handlers=[], **options)
    optimizer = torch.optim.SGD(scheduler.sync.optimizer_parameters(), lr=0.0)
    scheduler.step(mine[0], target=mine[1])
    optimizer.zero_grad()
    module.countdown = countdown if stage else -1
    with pytest.raises((RuntimeError, PipegradError)) as raised:
        scheduler.step(mine[0], target=mine[1])
    optimizer.zero_grad()
    scheduler.step(mine[0], target=mine[1])
    squared(true[1](true[0](x)), target).backward()
    pairs = zip(module.parameters(), true[stage].parameters(), strict=True)
    errors = {n: error(p.grad.full_tensor(), q.grad) for n, (p, q) in enumerate(pairs)}
    scheduler.close()
    return str(raised.value), {str(n): e for n, e in errors.items()}


def squared(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).pow(2).mean()


def test_what_had_added_up_in_a_step_that_failed_is_not_in_the_next_one() -> None:
    for said, errors in run_ranks(failed, 4, 3):
        assert "a stage fails" in said
        assert {name: e for name, e in errors.items() if not e <= MOST} == {}


def stale() -> float:
    """Evaluates, steps, and evaluates: the root, left gathered, must be gathered anew."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
    torch.manual_seed(2)
    module: Any = nn.Linear(4, 4)
    true = copy.deepcopy(module)
    fully_shard(module, mesh=mesh["dp"])
    scheduler = Scheduler(
        [Stage(module, 0)],
        Topology.from_mesh(mesh),
        schedule="1f1b",
        num_microbatches=1,
        loss_fn=lambda y, target: (y - target).pow(2).mean(),
        handlers=[],
    )
    x, target = batch(1, 4)[0][:, :4].float(), torch.ones(4, 4)
    optimizer = torch.optim.SGD(scheduler.sync.optimizer_parameters(), lr=0.01)
    scheduler.step(x, target=target)
    scheduler.evaluate(x, target=target)
    optimizer.step()
    loss = scheduler.evaluate(x, target=target).loss
    (true(x) - target).pow(2).mean().backward()
    torch.optim.SGD(true.parameters(), lr=0.01).step()
    found = error(loss, (true(x) - target).pow(2).mean().detach())
    scheduler.close()
    return found


def test_an_evaluation_sees_what_was_stepped_since_the_last_one() -> None:
    assert max(run_ranks(stale, 2)) <= MOST
