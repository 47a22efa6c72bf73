"""What FSDP2 stages cannot have is refused by name, on all ranks; and rare steps are right."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor import DTensor, Shard

import pipegrad
from pipegrad import GradientSync, MainGrad, Scheduler, Stage, Topology, find_tied
from pipegrad.errors import PipegradError, PlanError
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


def low_precision(mesh: DeviceMesh, *, accumulates: bool) -> None:
    modules = stages(mesh)
    for module in modules.values():
        module.bfloat16()
        if accumulates:
            in_float32(module)
    synced(mesh, modules, **({} if accumulates else {"master_dtype": torch.float32}))


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


def left_out(mesh: DeviceMesh) -> None:
    modules = stages(mesh)
    for stage, module in modules.items():
        if stage == 1:
            module.late = nn.Parameter(torch.ones(2))
    synced(mesh, modules)


def scheduled(mesh: DeviceMesh) -> None:
    Scheduler(
        [Stage(module, stage) for stage, module in stages(mesh).items()],
        Topology.from_mesh(mesh),
        schedule="zb-h1",
        num_microbatches=4,
        loss_fn=loss_of,
        tied=find_tied(build()),
        handlers=["pipeline-shared"],
    ).close()


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


LAYOUT = "(33, 6) by Shard(dim=0) over dp of 2"
ANY_LAYOUT, POLICY = "by Shard(dim=0) over dp of 2", "FSDP2 has MixedPrecisionPolicy"
NO_SPLIT, BOTH = "take a schedule that does not split", ["pipeline-shared", "data-parallel"]
COLUMNS = "(33, 6) by Shard(dim=1) over dp of 2"
REFUSALS: list[tuple[Callable[[DeviceMesh], None], tuple[str, ...]]] = [
    (
        lambda mesh: synced(mesh, handlers=BOTH),
        (LAYOUT, "'data-parallel' reduces '0.0.weight'", "reduced twice"),
    ),
    (
        lambda mesh: synced(mesh, handlers=["pipeline-shared", "sharded"]),
        ("'sharded' reduces '0.0.weight'", LAYOUT, "take REPLICATE"),
    ),
    (
        lambda mesh: low_precision(mesh, accumulates=False),
        ("master_dtype=torch.float32", ANY_LAYOUT, POLICY),
    ),
    (
        lambda mesh: low_precision(mesh, accumulates=True),
        ("gradients of torch.float32 in .grad", ANY_LAYOUT, POLICY),
    ),
    (lambda mesh: synced(mesh, accessor=MainGrad()), ("in main_grad", ANY_LAYOUT, POLICY)),
    (
        lambda mesh: synced(mesh, accessor=MainGrad() if mesh.get_rank() == 3 else None),
        ("ranks disagree on accessor", "MainGrad on rank 3"),
    ),
    (cut_along_columns_on_one_stage, (LAYOUT, COLUMNS)),
    (numbered_the_other_way_on_one_stage, ("different parts of it", "number the ranks")),
    (
        lambda mesh: synced(mesh, tied=()),
        ("nobody declared them tied", "{0: '0.weight', 1: '3.weight'}"),
    ),
    (left_out, ("'1.late' is a whole parameter in stage 1", "call fully_shard on the stage")),
    (scheduled, ("'zb-h1' splits backward", NO_SPLIT)),
]
OF_TORCH: list[tuple[Callable[[DeviceMesh], None], tuple[str, ...]]] = [
    (
        lambda mesh: attached(mesh, "InterleavedZeroBubble", PLACES[2]),
        ("InterleavedZeroBubble splits backward", "reshard_after_forward=False"),
    ),
    (
        lambda mesh: attached(mesh, "ZBVZeroBubble", PLACES[1], reshard_after_forward=False),
        ("'3.weight' on stage 3 are on one rank", "place these stages on two ranks"),
    ),
]


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("refused", "words"),
    [
        *(pytest.param(*row, id=row[1][0]) for row in REFUSALS),
        *(pytest.param(*row, id=row[1][0], marks=needs_2_13) for row in OF_TORCH),
    ],
)
def test_is_refused_by_name(refused: Callable[[DeviceMesh], None], words: tuple[str, ...]) -> None:
    with pytest.raises(PipegradError) as caught:
        refused(init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp")))
    assert [word for word in words if word not in str(caught.value)] == []


class Ignoring(nn.Module):
    """Does not use what it is given, if that is zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, flag: Tensor) -> Tensor:
        made: Tensor = self.linear(x.detach() if bool(flag.any()) else x)
        return made


def squared(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).pow(2).mean()


@pytest.mark.ranks(2)
def test_a_last_microbatch_without_a_backward_reduces_all_the_same() -> None:
    """A stage gets no gradient back in the last microbatch; what has added up is reduced."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
    modules: list[Any] = [nn.Linear(4, 4), Ignoring()]
    true = copy.deepcopy(modules)
    for module in modules:
        fully_shard(module, mesh=mesh["dp"])
    topology = Topology.from_mesh(mesh)
    scheduler = Scheduler(
        [Stage(modules[0], 0), Stage(modules[1], 1, inputs=("x", "flag"))],
        topology,
        schedule="interleaved-1f1b",
        num_microbatches=2,
        loss_fn=squared,
        handlers=[],
    )
    for _ in range(3):
        x, target = torch.randn(2, 8, 4)
        flag = torch.tensor([0.0, 0.0, 1.0, 1.0] * 2)
        mine = [t.chunk(2)[topology.coordinate("dp")] for t in (x, flag, target)]
        scheduler.step(mine[0], flag=mine[1], target=mine[2])
        for a, b, c in zip(x.chunk(4), flag.chunk(4), target.chunk(4), strict=True):
            (squared(true[1](true[0](a), b), c) / 4).backward()
        for module, theirs in zip(modules, true, strict=True):
            pairs = zip(module.parameters(), theirs.parameters(), strict=True)
            for ours, expected in pairs:
                assert ours.grad is not None
                assert error(ours.grad.full_tensor(), expected.grad) <= MOST
                ours.grad = expected.grad = None
    scheduler.close()


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


@pytest.mark.ranks(4)
def test_what_had_added_up_in_a_step_that_failed_is_not_in_the_next_one() -> None:
    """A step fails behind some backwards, on all replicas of a stage; the next one is right."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    both: list[Any] = [Failing(), Failing()]
    true = copy.deepcopy(both)
    topology = Topology.from_mesh(mesh)
    (stage,) = topology.local_stages
    module = fully_shard(both[stage], mesh=mesh["dp"])
    x, target = torch.randn(2, 16, 4)
    mine = [t.chunk(2)[topology.coordinate("dp")] for t in (x, target)]
    options: Any = {"schedule": "1f1b", "num_microbatches": 4, "loss_fn": squared}
    scheduler = Scheduler([Stage(module, stage)], topology, handlers=[], **options)
    optimizer = torch.optim.SGD(scheduler.sync.optimizer_parameters(), lr=0.0)
    scheduler.step(mine[0], target=mine[1])
    optimizer.zero_grad()
    module.countdown = 3 if stage else -1
    with pytest.raises((RuntimeError, PipegradError), match="a stage fails"):
        scheduler.step(mine[0], target=mine[1])
    optimizer.zero_grad()
    scheduler.step(mine[0], target=mine[1])
    squared(true[1](true[0](x)), target).backward()
    for ours, expected in zip(module.parameters(), true[stage].parameters(), strict=True):
        assert error(ours.grad.full_tensor(), expected.grad) <= MOST
    scheduler.close()


@pytest.mark.ranks(2)
def test_an_evaluation_sees_what_was_stepped_since_the_last_one() -> None:
    """The root, left gathered by an evaluation, is gathered anew."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
    module: Any = nn.Linear(4, 4)
    true = copy.deepcopy(module)
    fully_shard(module, mesh=mesh["dp"])
    options: Any = {"schedule": "1f1b", "num_microbatches": 1, "loss_fn": squared}
    scheduler = Scheduler([Stage(module, 0)], Topology.from_mesh(mesh), handlers=[], **options)
    x, target = batch(1, 4)[0][:, :4].float(), torch.ones(4, 4)
    optimizer = torch.optim.SGD(scheduler.sync.optimizer_parameters(), lr=0.01)
    scheduler.step(x, target=target)
    scheduler.evaluate(x, target=target)
    optimizer.step()
    loss = scheduler.evaluate(x, target=target).loss
    squared(true(x), target).backward()
    torch.optim.SGD(true.parameters(), lr=0.01).step()
    assert error(loss, squared(true(x), target).detach()) <= MOST
    scheduler.close()


@pytest.mark.ranks(2)
def test_an_optimizer_takes_its_state_back_and_no_other_ranks() -> None:
    """Its DTensors were copied into whole ones, which is an error of torch."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
    module: Any = nn.Linear(4, 3)  # rank 0 has two rows, rank 1 has one
    fully_shard(module, mesh=mesh["dp"])
    options: Any = {"schedule": "1f1b", "num_microbatches": 1, "loss_fn": squared}
    scheduler = Scheduler([Stage(module, 0)], Topology.from_mesh(mesh), handlers=[], **options)
    optimizer = scheduler.optimizer(torch.optim.AdamW, lr=0.01)
    x, target = torch.ones(4, 4), torch.ones(4, 3)
    scheduler.step(x, target=target)
    optimizer.step()
    state, other = optimizer.state_dict(), scheduler.optimizer(torch.optim.AdamW, lr=0.1)
    other.load_state_dict(copy.deepcopy(state))
    for name, values in other.state_dict()["state"].items():
        for key, value in values.items():
            assert torch.equal(to_local(value), to_local(state["state"][name][key]))
    assert other.param_groups[0]["lr"] == 0.01
    files: list[Any] = [None, None]
    dist.all_gather_object(files, pickle.dumps(state))
    words = r"'0.weight' has \((1|2), 4\) of \(3, 4\) at .*, and this rank steps \((2|1), 4\) of"
    with pytest.raises(PlanError, match=words):
        other.load_state_dict(pickle.loads(files[1 - dist.get_rank()]))
    scheduler.close()


def to_local(value: Any) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value
