"""Replicas that train alone and meet are those of a simulation in one process."""

from __future__ import annotations

import copy
import math
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from pipegrad import GradientSync, GradScaler, Topology
from pipegrad.errors import PipegradError, StepError
from pipegrad_handlers.diloco import DiLoCo
from tests.support.gradients.cases import outcome, rank, stage
from tests.support.gradients.diloco import (
    REPLICAS,
    ROWS,
    Run,
    Trainer,
    batch,
    make_scheduler,
    meet,
    meetings_of,
    model,
    same,
    simulate,
)
from tests.support.gradients.placements import compute
from tests.support.pipeline.models import TOKENS
from tests.support.pipeline.schedulers import error
from tests.support.ranked import gathered
from tests.support.rounding import rounding

pytestmark = pytest.mark.ranks(4)

INNER = {"name": "data-parallel", "axis": "dp"}
SHARDED = {"name": "sharded", "axis": "dp"}
OWNED = {"name": "pipeline-shared", "placement": "owner"}
PAIR = {"name": "pipeline-shared", "exchange": "asymmetric"}

# Two stages by two replicas.
FLAT = {
    "every second step": Run(),
    "every third step, clipped": Run(steps=6, every=3, clip=0.5),
    "means, master copies": Run(lr=1.0, momentum=0.0, options={"master_dtype": torch.float64}),
    "an optimizer of the caller, the owner of a tie": Run(
        is_published_by_hand=True, beside=[OWNED]
    ),
    "a pair exchange, small buckets, one comm stream": Run(
        beside=[PAIR], options={"bucket_bytes": 128, "comm_streams": 1}
    ),
    "gradients in bf16 on the wire": Run(steps=2, options={"reduce_dtype": torch.bfloat16}),
    "never in this run": Run(steps=3, every=4),
}
# Two stages by two inner data ranks by two replicas.
NESTED = {
    "inner data parallel": Run(inner=2, beside=["pipeline-shared", INNER], clip=0.5),
    "inner shards": Run(inner=2, beside=["pipeline-shared", SHARDED], clip=0.5),
    "inner shards of owners": Run(inner=2, beside=[OWNED, SHARDED]),
}


def train_and_compare(run: Run) -> Trainer:
    """Compares parameters after every step with the simulation, and copies with each other."""
    trainer = Trainer(run)
    trainer.train(range(run.steps))
    trainer.sync.check_replicas()
    if "reduce_dtype" not in run.options:
        truth: list[Any] = [simulate(run) if rank() == 0 else None]
        dist.broadcast_object_list(truth)
        most = rounding(run.steps * ROWS * TOKENS * run.inner)
        for step, weights in enumerate(trainer.weights):
            for name, weight in weights.items():
                right = truth[0][rank() % REPLICAS][step][name]
                assert error(weight, right) <= most, (step, name)
    for other, others in enumerate(gathered(trainer.weights)):
        for step, weights in enumerate(trainer.weights):
            have_met = (step + 1) % run.every == 0
            # Copies of a tie always, those of replicas after a meeting, and never before it.
            for name in weights.keys() & others[step].keys():
                is_frozen = name == "1.norm.bias"
                expected = have_met or (rank() - other) % REPLICAS == 0 or is_frozen
                assert torch.equal(weights[name], others[step][name]) == expected, (other, name)
    trainer.scheduler.close()
    return trainer


@pytest.mark.parametrize("run", FLAT.values(), ids=FLAT)
def test_replicas_train_as_in_one_process_and_copies_have_the_same_bits(run: Run) -> None:
    norms = gathered(train_and_compare(run).norms)
    assert norms[0] == norms[2]
    assert norms[1] == norms[3]
    # Each replica has norms of its own.
    assert all(a != b for a, b in zip(norms[0], norms[1], strict=True))


@pytest.mark.ranks(8)
def test_clusters_train_as_in_one_process_and_inner_data_ranks_meet_once() -> None:
    met = {name: gathered(train_and_compare(run).met_bytes[-1]) for name, run in NESTED.items()}
    whole, shards = met["inner data parallel"], met["inner shards"]
    for half in (slice(0, 4), slice(4, 8)):
        # With shards the elements are the same, but each rank has its own.
        assert sum(whole[half]) == sum(shards[half]) > 0
        assert [num_bytes > 0 for num_bytes in whole[half]] == [True, True, False, False]
    assert all(shards)


@pytest.mark.parametrize("every", [1, 2])
def test_bytes_are_those_of_one_step_in_every_so_many(every: int) -> None:
    trainer = Trainer(Run(every=every))
    trainer.train(range(4))
    # Nothing of a gradient goes to another replica: this is the tie alone, with its flag.
    assert trainer.sync.plan.reduced_bytes == 4 * (32 * 16 + 1)
    trained = {n: w for n, w in trainer.weights[0].items() if n != "1.norm.bias"}
    if rank() >= REPLICAS:  # the tie meets once, on its lowest stage
        trained.pop("0.weight")
    met = 4 * sum(weight.numel() for weight in trained.values())
    assert trainer.met_bytes == [met * ((step + 1) // every) for step in range(4)]
    # The loss is the mean over replicas.
    first, *others = gathered(trainer.losses)
    assert others == [first] * 3


# What goes wrong, or is unusual, with replicas that train alone: nothing hangs, and they meet.


@pytest.mark.parametrize("raised", [ValueError, MemoryError])
def test_a_step_that_fails_in_one_replica_fails_in_all(raised: type[BaseException]) -> None:
    # They counted other steps, and one replica waited in a meeting.
    trainer = Trainer(Run())

    def fail(*_: object) -> None:
        raise raised("bad")

    trainer.train([0, 1])
    hook = None
    if rank() == 1:
        hook = nn.modules.module.register_module_forward_pre_hook(fail)
    with pytest.raises(BaseException, match="bad") as caught:
        trainer.train([2])
    assert caught.type is (raised if rank() == 1 else StepError)
    if hook is not None:
        hook.remove()
    trainer.train([3, 4])
    assert trainer.have_met() == (2, True)
    trainer.train([5])
    trainer.sync.check_replicas()
    trainer.scheduler.close()


def a_step_that_one_replica_leaves_out() -> Trainer:
    trainer = Trainer(Run())
    for step in range(4):
        trainer.compute(step)
        if step % 2 == 0 or trainer.share == 0:
            trainer.optimizer.step()
        trainer.optimizer.zero_grad()
    trainer.sync.wait_parameters()
    return trainer


def a_publish_that_is_forgotten() -> Trainer:
    trainer = Trainer(Run(is_published_by_hand=True))
    for step in range(4):
        trainer.compute(step)
        trainer.update()
    trainer.sync.check_replicas()
    return trainer


def a_stage_that_is_frozen() -> Trainer:
    whole = model()
    head = whole.get_submodule("3")
    head.weight = nn.Parameter(head.get_parameter("weight").detach().clone())
    for parameter in whole[2:].parameters():
        parameter.requires_grad_(False)
    # The head starts as the embedding, and is not tied to it.
    trainer = Trainer(Run(options={"allow_unsynced": ["*"]}, clip=0.5), whole=whole)
    trainer.train(range(4))
    trainer.sync.load_state_dict(trainer.sync.state_dict())
    trainer.sync.check_replicas()
    return trainer


def parameters_that_are_clamped_after_a_step() -> Trainer:
    trainer = Trainer(Run())
    for step in range(4):
        trainer.compute(step)
        trainer.update()
        with torch.no_grad():
            for record in trainer.sync.records():
                trainer.sync.parameter(record).clamp_(-0.5, 0.5)
    return trainer


@pytest.mark.parametrize(
    "train",
    [
        a_step_that_one_replica_leaves_out,
        a_publish_that_is_forgotten,
        a_stage_that_is_frozen,
        parameters_that_are_clamped_after_a_step,
    ],
)
def test_replicas_meet_after_the_same_steps(train: Any) -> None:
    assert train().have_met() == (2, True)


def spoil(sync: GradientSync, value: float) -> None:
    for main in sync.main_parameters():
        assert main.tensor.grad is not None
        main.tensor.grad.fill_(value)


def test_an_overflow_or_nan_of_one_replica_is_known_to_all() -> None:
    trainer = Trainer(Run())
    scaler = GradScaler(trainer.sync, init_scale=8.0)
    for step in range(4):
        trainer.compute(step)
        if step == 1 and rank() == 1:
            spoil(trainer.sync, math.inf)
        assert trainer.sync.clip_grad_norm_(1.0).isfinite() == (step != 1)
        scaler.step(trainer.optimizer)
        scaler.update()
        trainer.optimizer.zero_grad()
    assert scaler.get_scale() == 4.0
    assert trainer.are_equal()
    # A gradient that is no number is known everywhere.
    trainer = Trainer(Run())
    trainer.compute(0)
    if rank() == 3:
        spoil(trainer.sync, math.nan)
    for kind in (2.0, math.inf):
        assert not trainer.sync.clip_grad_norm_(1.0, kind).isfinite()
    assert "'2.norm.weight' (stage 1, rank 3)" in map(str, trainer.sync.non_finite())


def test_any_parameter_meets() -> None:
    module = stage(
        transposed=torch.randn(4, 3).t(),
        scalar=torch.tensor(1.0),
        empty=torch.empty(0),
        complex=torch.randn(3, dtype=torch.complex64),
        float64=torch.randn(2, dtype=torch.float64),
        float16=torch.randn(2, dtype=torch.float16),
        last=torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        unused=torch.randn(2),
        used_once=torch.randn(2),
    )

    def backward() -> None:
        for name, parameter in module.named_parameters():
            real = torch.view_as_real(parameter) if parameter.is_complex() else parameter
            factor = {"unused": 0, "used_once": rank() == 3}.get(name, 1.0 + rank())
            if factor:
                (factor * real.double().sum()).backward()

    handler = {"name": "diloco", "every": 2, "lr": 1.0, "momentum": 0.0}
    sync = GradientSync({0: module}, Topology.create(pipeline=1), handlers=[handler])
    optimizer = sync.optimizer(torch.optim.SGD, lr=0.25)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    for _ in range(2):
        compute(sync, backward)
        optimizer.step()
        optimizer.zero_grad()
    sync.check_replicas()
    for name, parameter in module.named_parameters():
        way = before[name] - parameter.detach()
        if name in ("unused", "empty"):
            assert way.abs().sum() == 0
            continue
        # Two steps of rate 1/4, with gradients of 1 to 4 on the ranks; of which one alone has used
        # this parameter, with a gradient of 1.
        real = 2 * 0.25 / 4 if name == "used_once" else 2 * 0.25 * 2.5
        right = real * (1 + 1j) if name == "complex" else real
        assert ((way - right).abs() <= 16 * torch.finfo(way.dtype).eps).all(), name
    sync.close()


def test_a_handler_keeps_nothing_and_an_optimizer_that_would_never_meet_is_refused() -> None:
    handlers = ["pipeline-shared", DiLoCo(every=2)]
    trainers = [Trainer(Run(), handlers=handlers) for _ in range(2)]
    for step in range(4):
        for trainer in trainers:
            trainer.train([step])
    assert same(*(trainer.weights[-1] for trainer in trainers))
    # An optimizer that would never meet is refused.
    scheduler = make_scheduler(Run())
    own = torch.optim.AdamW([scheduler.sync.parameter(r) for r in scheduler.sync.records()])
    tokens, target = batch(0, 0)
    scheduler.step(tokens, target=target)
    with pytest.raises(PipegradError, match="replicas train alone, and nobody has asked for what"):
        own.step()


DISAGREE = "ranks disagree on what handler 'diloco' goes on from"


def test_a_state_that_is_refused_leaves_equal_replicas() -> None:
    """Replicas that begin anew from different parameters would never be equal again."""
    trainer = Trainer(Run(every=3))
    trainer.train(range(4))
    saved = copy.deepcopy(trainer.sync.state_dict())
    for state, words in (
        ({}, "None"),
        ({"plan": "x", "handlers": {}}, "is of another plan"),
        (saved if rank() else {}, DISAGREE),
    ):
        trainer.sync.load_state_dict(saved)
        assert words in outcome(lambda state=state: trainer.sync.load_state_dict(state))  # type: ignore[misc]
        assert trainer.are_equal()
    # They go on after a state that one rank lacks. They counted their meetings differently, and one
    # of them compared copies alone.
    trainer.train(range(3))
    assert trainer.are_equal()
    trainer.scheduler.close()


def test_a_bit_that_flips_in_the_parameters_of_the_last_meeting_ends_the_run() -> None:
    trainer = Trainer(Run())
    trainer.train(range(2))
    if rank() == 3:
        anchor = next(iter(meetings_of(trainer.sync)._anchors.values()))
        anchor.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 30)
    words = outcome(lambda: trainer.train([2, 3]))
    assert "ranks [3] have other parameters of the last meeting than the first replica" in words


def of_one_matrix(topology: Topology) -> tuple[GradientSync, nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = nn.Linear(6, 5, bias=False)
    outer = {"name": "diloco", "axis": "out", "every": 3}
    handlers: Any = [{"name": "owned", "axis": "dp"}, outer]
    sync = GradientSync({0: module}, topology, handlers=handlers, agree_seconds=30)
    return sync, module, sync.optimizer(torch.optim.SGD, lr=0.1)


def test_states_and_outer_steps_of_clusters() -> None:
    # One matrix, so of two ranks one owns nothing, and it counts steps all the same.
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "dp", "out"))
    topology = Topology.from_mesh(mesh, data=("dp", "out"))
    sync, module, optimizer = of_one_matrix(topology)
    compute(sync, lambda: (module.weight * (1.0 + rank())).sum().backward())
    optimizer.step()
    optimizer.zero_grad()
    sync.wait_parameters()
    state = copy.deepcopy(sync.state_dict())
    sync.close()
    other, _, _ = of_one_matrix(topology)
    steps_nothing = not other.main_parameters()
    assert gathered(steps_nothing) == [False, False, True, True]
    words = gathered(outcome(lambda: other.load_state_dict({} if steps_nothing else state)))
    assert "what handler 'diloco' goes on from" in words[0]
    assert set(words) == {words[0]}
    other.check_replicas()
    other.load_state_dict(state)
    other.check_replicas()
    other.close()
    # The outer step is that of the handler by which parameters meet.
    # The outer step of the first handler was made, whose dimension has one rank.
    mesh = init_device_mesh("cpu", (1, 1, 4), mesh_dim_names=("pp", "dp", "out"))
    handlers: Any = [
        {"name": "diloco", "axis": axis, "every": n} for axis, n in (("dp", 7), ("out", 3))
    ]
    module = nn.Linear(2, 2)
    topology = Topology.from_mesh(mesh, data=("dp", "out"))
    sync = GradientSync({0: module}, topology, handlers=handlers)
    optimizer = sync.optimizer(torch.optim.SGD, lr=0.1)
    for _ in range(3):
        compute(sync, lambda: (module(torch.ones(1, 2)) * rank()).sum().backward())
        optimizer.step()
        optimizer.zero_grad()
    sync.check_replicas()
    sync.load_state_dict(sync.state_dict())
    assert meetings_of(sync)._last == 3
    sync.close()


def test_clusters_may_shard_by_fsdp2() -> None:
    def rows(step: int, inner: int, replica: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + 10 * inner + replica)
        return torch.randn(4, 5, generator=generator)

    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "dp", "out"))
    topology = Topology.from_mesh(mesh, data=("dp", "out"))
    module = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    anchor, *replicas = (copy.deepcopy(module) for _ in range(3))
    fully_shard(module, mesh=mesh["dp"])
    handlers = [{"name": "diloco", "every": 2, "axis": "out"}]
    sync = GradientSync({0: module}, topology, handlers=handlers)
    optimizer = sync.optimizer(torch.optim.SGD, lr=0.1)
    outer = torch.optim.SGD(anchor.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    for step in range(4):
        own = rows(step, topology.coordinate("dp"), topology.coordinate("out"))
        compute(sync, lambda own=own: module(own).square().mean().backward())  # type: ignore[misc]
        sync.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        for number, replica in enumerate(replicas):
            for inner in range(2):
                (replica(rows(step, inner, number)).square().mean() / 2).backward()
            nn.utils.clip_grad_norm_(replica.parameters(), 0.5)
            torch.optim.SGD(replica.parameters(), lr=0.1).step()
            replica.zero_grad()
        if step % 2:
            meet(list(anchor.parameters()), replicas, outer)
    sync.check_replicas()
    for parameter, right in zip(module.parameters(), anchor.parameters(), strict=True):
        whole = cast("DTensor", parameter).full_tensor().detach()
        assert error(whole, right.detach()) <= rounding(4 * 8)
