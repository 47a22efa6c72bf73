"""What goes wrong, or is unusual, with replicas that train alone: nothing hangs, and they meet."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import pipegrad
from pipegrad import GradientSync, GradScaler, Scheduler, Topology
from pipegrad.errors import DriftError, PipegradError
from pipegrad.testing import run_ranks
from pipegrad_handlers.diloco import DiLoCo
from tests.support.gradients.cases import outcome
from tests.support.gradients.diloco import (
    Run,
    Seen,
    batch,
    loss_of,
    make_optimizer,
    make_scheduler,
    meet,
    model,
    share_of,
    train_step,
    weights_of,
)
from tests.support.pipeline.schedulers import error
from tests.support.rounding import rounding

CASES: dict[str, Callable[[], Any]] = {}


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    """Runs a function on four ranks, two stages by two replicas, with all others."""
    CASES[function.__name__] = function
    return function


def run_cases() -> dict[str, Any]:
    return {name: function() for name, function in CASES.items()}


@functools.cache
def replies() -> list[dict[str, Any]]:
    return run_ranks(run_cases, 4, timeout_seconds=120)


def of(function: Callable[[], Any]) -> list[Any]:
    return [reply[function.__name__] for reply in replies()]


def are_equal(scheduler: Scheduler) -> bool:
    """Whether this rank's parameters are those of its copy in the other replica."""
    weights: list[dict[str, Tensor]] = [{} for _ in range(4)]
    dist.all_gather_object(weights, weights_of(scheduler))
    own, other = weights[dist.get_rank()], weights[dist.get_rank() ^ 1]
    return all(torch.equal(own[name], other[name]) for name in own)


def made(run: Run) -> tuple[Scheduler, torch.optim.Optimizer]:
    scheduler = make_scheduler(run)
    return scheduler, make_optimizer(run, scheduler)


def compute(scheduler: Scheduler, step: int) -> None:
    tokens, target = batch(step, share_of(scheduler))
    scheduler.step(tokens, target=target)


def failing(error: type[BaseException]) -> tuple[list[str], int, bool]:
    """Trains six steps, of which one rank of one replica fails in the third."""
    scheduler, optimizer = made(Run())
    errors, seen = [], Seen()
    were_equal = False

    def fail(*_: object) -> None:
        raise error("bad")

    for step in range(6):
        hook = None
        if step == 2 and dist.get_rank() == 1:
            hook = nn.modules.module.register_module_forward_pre_hook(fail)
        try:
            train_step(Run(), scheduler, optimizer, step, seen)
        except BaseException as raised:  # noqa: BLE001 - Ctrl-C too
            errors.append(f"{step}: {type(raised).__name__}")
            if hook is not None:
                hook.remove()
        if step == 4:
            were_equal = are_equal(scheduler)
    scheduler.sync.check_replicas()
    number = scheduler.sync.statistics().meetings
    scheduler.close()
    return errors, number, were_equal


@case
def a_forward_that_raises() -> Any:
    return failing(ValueError)


@case
def an_interrupt() -> Any:
    return failing(KeyboardInterrupt)


@pytest.mark.parametrize(
    ("function", "own"),
    [(a_forward_that_raises, "2: ValueError"), (an_interrupt, "2: KeyboardInterrupt")],
)
def test_a_step_that_fails_in_one_replica_fails_in_all(
    function: Callable[[], Any], own: str
) -> None:
    """They counted other steps, and one replica waited in a meeting for ever."""
    for rank, (errors, number, were_equal) in enumerate(of(function)):
        assert errors == [own if rank == 1 else "2: StepError"]
        assert (number, were_equal) == (2, True)


@case
def a_step_that_one_replica_leaves_out() -> Any:
    scheduler, optimizer = made(Run())
    for step in range(4):
        compute(scheduler, step)
        if step % 2 == 0 or share_of(scheduler) == 0:
            optimizer.step()
        optimizer.zero_grad()
    scheduler.sync.wait_parameters()
    return scheduler.sync.statistics().meetings, are_equal(scheduler)


@case
def a_publish_that_is_forgotten() -> Any:
    scheduler, optimizer = made(Run(is_published_by_hand=True))
    for step in range(4):
        compute(scheduler, step)
        optimizer.step()
        optimizer.zero_grad()
    scheduler.sync.check_replicas()
    return scheduler.sync.statistics().meetings, are_equal(scheduler)


@case
def steps_that_accumulate() -> Any:
    scheduler, optimizer = made(Run())
    for step in range(8):
        if step % 2 == 0:
            with scheduler.sync.accumulate():
                compute(scheduler, step)
        else:
            compute(scheduler, step)
            optimizer.step()
            optimizer.zero_grad()
    return scheduler.sync.statistics().meetings, are_equal(scheduler)


@case
def a_stage_that_is_frozen() -> Any:
    whole = model()
    head = whole.get_submodule("3")
    head.weight = nn.Parameter(head.get_parameter("weight").detach().clone())
    for parameter in whole[2:].parameters():
        parameter.requires_grad_(False)
    scheduler = Scheduler(
        pipegrad.cut(whole, 2),
        Topology.create(pipeline=2),
        schedule="1f1b",
        num_microbatches=2,
        loss_fn=loss_of,
        handlers=Run().handlers,
        allow_unsynced=["*"],  # the head starts as the embedding, and is not tied to it
    )
    optimizer = scheduler.optimizer(torch.optim.SGD, lr=0.1)
    for step in range(4):
        compute(scheduler, step)
        scheduler.sync.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    scheduler.sync.load_state_dict(scheduler.sync.state_dict())
    scheduler.sync.check_replicas()
    return scheduler.sync.statistics().meetings, are_equal(scheduler)


@case
def parameters_that_are_clamped_after_a_step() -> Any:
    scheduler, optimizer = made(Run())
    for step in range(4):
        compute(scheduler, step)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for record in scheduler.sync.records():
                scheduler.sync.parameter(record).clamp_(-0.5, 0.5)
    return scheduler.sync.statistics().meetings, are_equal(scheduler)


@pytest.mark.parametrize(
    "function",
    [
        a_step_that_one_replica_leaves_out,
        a_publish_that_is_forgotten,
        steps_that_accumulate,
        a_stage_that_is_frozen,
        parameters_that_are_clamped_after_a_step,
    ],
)
def test_replicas_meet_after_the_same_steps(function: Callable[[], Any]) -> None:
    assert of(function) == [(2, True)] * 4


@case
def an_overflow_in_one_replica() -> Any:
    scheduler, optimizer = made(Run())
    scaler, norms = GradScaler(scheduler.sync, init_scale=8.0), []
    for step in range(4):
        compute(scheduler, step)
        if step == 1 and dist.get_rank() == 1:
            for main in scheduler.sync.main_parameters():
                assert main.tensor.grad is not None
                main.tensor.grad.fill_(float("inf"))
        norms.append(scheduler.sync.clip_grad_norm_(1.0).item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return norms, scaler.get_scale(), are_equal(scheduler)


def test_all_replicas_skip_a_step_of_which_one_overflows() -> None:
    seen = of(an_overflow_in_one_replica)
    assert [(scale, equal) for _, scale, equal in seen] == [(4.0, True)] * 4
    for norms, *_ in seen:
        assert [torch.tensor(norm).isfinite().item() for norm in norms] == [True, False, True, True]


@case
def gradients_that_are_no_numbers() -> Any:
    scheduler, _ = made(Run())
    compute(scheduler, 0)
    if dist.get_rank() == 3:
        for main in scheduler.sync.main_parameters():
            assert main.tensor.grad is not None
            main.tensor.grad.fill_(float("nan"))
    norms = [scheduler.sync.clip_grad_norm_(1.0, kind).item() for kind in (2.0, float("inf"))]
    return norms, [str(found) for found in scheduler.sync.non_finite()]


def test_a_gradient_that_is_no_number_is_known_everywhere() -> None:
    for norms, found in of(gradients_that_are_no_numbers):
        assert not any(torch.tensor(norm).isfinite() for norm in norms)
        assert "'2.norm.weight' (stage 1, rank 3)" in found


@case
def odd_parameters() -> Any:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.transposed = nn.Parameter(torch.randn(4, 3).t())
            self.scalar = nn.Parameter(torch.tensor(1.0))
            self.empty = nn.Parameter(torch.empty(0))
            self.complex = nn.Parameter(torch.randn(3, dtype=torch.complex64))
            self.double_ = nn.Parameter(torch.randn(2, dtype=torch.float64))
            self.half_ = nn.Parameter(torch.randn(2, dtype=torch.float16))
            self.unused = nn.Parameter(torch.randn(2))
            self.used_once = nn.Parameter(torch.randn(2))
            last = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
            self.last = nn.Parameter(last)

        def forward(self, factor: float) -> Tensor:
            real = (self.transposed, self.scalar, self.empty, self.double_, self.half_, self.last)
            total = sum(p.double().sum() for p in real) + self.complex.real.sum()
            total = total + self.complex.imag.sum()
            return factor * total + (self.used_once.sum() if factor == 4 else 0)

    module = Odd()
    handler = {"name": "diloco", "every": 2, "lr": 1.0, "momentum": 0.0}
    sync = GradientSync({0: module}, Topology.create(pipeline=1), handlers=[handler])
    optimizer = sync.optimizer(torch.optim.SGD, lr=0.25)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    for _ in range(2):
        sync.prepare()
        module(float(1 + dist.get_rank())).backward()
        sync.stage_final(0)
        sync.finish()
        optimizer.step()
        optimizer.zero_grad()
    sync.check_replicas()
    ways = {n: (before[n] - p.detach()).flatten() for n, p in module.named_parameters()}
    sync.close()
    return ways


def test_any_parameter_meets() -> None:
    """Two steps of rate 1/4, with gradients of 1 to 4 on the ranks: all go 2/4 * 2.5."""
    for ways in of(odd_parameters):
        for name, way in ways.items():
            if name in ("unused", "empty"):
                assert way.abs().sum() == 0
                continue
            # Of the ranks one alone has used it, twice, with a gradient of 1.
            real = 2 * 0.25 / 4 if name == "used_once" else 2 * 0.25 * 2.5
            expected = real * (1 + 1j) if name == "complex" else real
            eps = torch.finfo(way.dtype).eps
            assert ((way - expected).abs() <= 16 * eps).all(), name


@case
def two_schedulers_of_one_handler() -> Any:
    class Shared(Run):
        @property
        def handlers(self) -> list[Any]:
            return ["pipeline-shared", handler]

    handler = DiLoCo(every=2)
    both = [(*made(Shared()), Seen()) for _ in range(2)]
    for step in range(4):
        for scheduler, optimizer, seen in both:
            train_step(Shared(), scheduler, optimizer, step, seen)
    first, second = (seen.weights[-1] for *_, seen in both)
    return all(torch.equal(first[name], second[name]) for name in first)


def test_a_handler_keeps_nothing() -> None:
    assert of(two_schedulers_of_one_handler) == [True] * 4


def resumed(run: Run) -> tuple[list[bool], Scheduler, dict[str, Any]]:
    """Saves after four steps, and goes on for three: here, and in another Scheduler.

    Returns:
        Whether both have the same bits after each step, the other Scheduler, and the saved state.
    """
    seen, again = Seen(), Seen()
    scheduler, optimizer = made(run)
    for step in range(4):
        train_step(run, scheduler, optimizer, step, seen)
    weights, of_optimizer, state = copy.deepcopy(
        (weights_of(scheduler), optimizer.state_dict(), scheduler.sync.state_dict())
    )
    for step in range(4, 7):
        train_step(run, scheduler, optimizer, step, seen)
    other, other_optimizer = made(run)
    for record in other.sync.records():
        other.sync.parameter(record).data.copy_(weights[record.key.partition(".")[2]])
    other.sync.synchronize_parameters()
    other_optimizer.load_state_dict(of_optimizer)
    other.sync.load_state_dict(state)
    for step in range(4, 7):
        train_step(run, other, other_optimizer, step, again)
    equal = [
        all(torch.equal(one[name], two[name]) for name in one)
        for one, two in zip(seen.weights[4:], again.weights, strict=True)
    ]
    return equal, other, state


@case
def a_state_after_a_meeting_in_bf16() -> Any:
    return resumed(Run(every=2, dtype=torch.bfloat16))[0]


def test_a_state_after_a_meeting_has_what_16_bits_cannot_hold() -> None:
    """Meetings went on from rounded parameters, and the resumed run had other bits."""
    assert of(a_state_after_a_meeting_in_bf16) == [[True, True, True]] * 4


@case
def a_state_between_meetings() -> Any:
    equal, other, saved = resumed(Run(every=3))
    found: list[Any] = [*equal]
    for state in ({}, {"plan": "x", "handlers": {}}, saved if dist.get_rank() else {}):
        other.sync.load_state_dict(saved)
        try:
            other.sync.load_state_dict(state)
            found.append("")
        except PipegradError as error:
            found.append(str(error))
        found.append(are_equal(other))
    return found


def test_a_state_between_meetings_goes_on_with_the_same_bits() -> None:
    for first, second, third, *_ in of(a_state_between_meetings):
        assert (first, second, third) == (True, True, True)


def test_a_state_that_is_refused_leaves_equal_replicas() -> None:
    """Replicas that begin anew from different parameters would never be equal again."""
    for *_, none, equal, other_plan, still_equal, some_ranks, last_equal in of(
        a_state_between_meetings
    ):
        assert (none, equal, still_equal, last_equal) == ("", True, True, True)
        assert "is of another plan" in other_plan
        assert "ranks disagree on what handler 'diloco' goes on from" in some_ranks


@case
def steps_after_a_state_that_one_rank_lacks() -> Any:
    scheduler, optimizer = made(Run(every=2))

    def train(steps: int) -> None:
        for step in range(steps):
            compute(scheduler, step)
            optimizer.step()
            optimizer.zero_grad()

    train(2)
    state = copy.deepcopy(scheduler.sync.state_dict())
    said = outcome(lambda: scheduler.sync.load_state_dict(state if dist.get_rank() else {}))
    train(4)
    found = said, scheduler.sync.statistics().meetings, are_equal(scheduler)
    scheduler.close()
    return found


def test_replicas_go_on_after_a_state_that_one_rank_lacks() -> None:
    """They counted their meetings differently, and one of them compared copies alone."""
    for said, meetings, equal in of(steps_after_a_state_that_one_rank_lacks):
        assert "ranks disagree on what handler 'diloco' goes on from" in said
        assert (meetings, equal) == (2, True)


@case
def a_copy_that_changes_between_meetings() -> Any:
    found: list[Any] = []
    for repair in (False, True):
        run = Run(options={"repair": repair, "check_every": 4})
        scheduler, optimizer = made(run)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                for step in range(3):
                    if step == 2 and dist.get_rank() == 3:  # right after the first meeting
                        name = scheduler.sync.records()[0]
                        scheduler.sync.parameter(name).data.view(-1)[0] += 1e-3
                    train_step(run, scheduler, optimizer, step, Seen())
                found.append(scheduler.sync.statistics().repaired)
            except DriftError as error:
                found.append(str(error))
    return found


def test_copies_are_compared_after_a_meeting() -> None:
    for message, repaired in of(a_copy_that_changes_between_meetings):
        assert "over ranks [2, 3]. They differ in step 3" in message
        assert repaired == 1


@case
def a_state_that_a_rank_lacks_which_steps_nothing() -> Any:
    """One matrix, so of two ranks one owns nothing, and it counts steps all the same."""
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "dp", "out"))
    topology = Topology.from_mesh(mesh, data=("dp", "out"))
    outer = {"name": "diloco", "axis": "out", "every": 3}
    sync, module, optimizer = _of_one_matrix(topology, outer)
    sync.prepare()
    sync.stage_first_use(0)
    (module.weight * (1.0 + dist.get_rank())).sum().backward()
    sync.stage_final(0)
    sync.finish()
    optimizer.step()
    optimizer.zero_grad()
    sync.wait_parameters()
    state = copy.deepcopy(sync.state_dict())
    sync.close()
    other, _, _ = _of_one_matrix(topology, outer)
    steps_nothing = not other.main_parameters()
    said = outcome(lambda: other.load_state_dict({} if steps_nothing else state))
    other.check_replicas()
    other.load_state_dict(state)
    other.check_replicas()
    other.close()
    return steps_nothing, said


def _of_one_matrix(
    topology: Topology, outer: dict[str, Any]
) -> tuple[GradientSync, nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = nn.Linear(6, 5, bias=False)
    handlers = [{"name": "owned", "axis": "dp"}, outer]
    sync = GradientSync({0: module}, topology, handlers=handlers, agree_seconds=30)
    return sync, module, sync.optimizer(torch.optim.SGD, lr=0.1)


def test_a_rank_that_steps_nothing_needs_its_state_too() -> None:
    found = of(a_state_that_a_rank_lacks_which_steps_nothing)
    assert [steps_nothing for steps_nothing, _ in found] == [False, False, True, True]
    for _, said in found:
        assert "what handler 'diloco' goes on from" in said
        assert said == found[0][1]


@case
def a_second_outer_step_along_a_dimension_of_one_rank() -> Any:
    mesh = init_device_mesh("cpu", (1, 1, 4), mesh_dim_names=("pp", "dp", "out"))
    handlers = [
        {"name": "diloco", "axis": "dp", "every": 7},
        {"name": "diloco", "axis": "out", "every": 3},
    ]
    module = nn.Linear(2, 2)
    topology = Topology.from_mesh(mesh, data=("dp", "out"))
    sync = GradientSync({0: module}, topology, handlers=handlers)
    optimizer = sync.optimizer(torch.optim.SGD, lr=0.1)
    for _ in range(3):
        sync.prepare()
        (module(torch.ones(1, 2)) * dist.get_rank()).sum().backward()
        sync.stage_final(0)
        sync.finish()
        optimizer.step()
    sync.check_replicas()
    sync.load_state_dict(sync.state_dict())
    number = sync.statistics().meetings
    sync.close()
    return number


def test_the_outer_step_is_that_of_the_handler_by_which_parameters_meet() -> None:
    """The outer step of the first handler was made, whose dimension has one rank."""
    assert of(a_second_outer_step_along_a_dimension_of_one_rank) == [1] * 4


def rows(step: int, inner: int, replica: int) -> Tensor:
    made_of = torch.Generator().manual_seed(100 * step + 10 * inner + replica)
    return torch.randn(4, 5, generator=made_of)


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


@case
def clusters_inside_of_which_fsdp2_shards() -> Any:
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "dp", "out"))
    topology = Topology.from_mesh(mesh, data=("dp", "out"))
    module = small()
    fully_shard(module, mesh=mesh["dp"])
    sync = GradientSync(
        {0: module}, topology, handlers=[{"name": "diloco", "every": 2, "axis": "out"}]
    )
    optimizer = sync.optimizer(torch.optim.SGD, lr=0.1)
    for step in range(4):
        sync.prepare()
        sync.stage_first_use(0)
        own = rows(step, topology.coordinate("dp"), topology.coordinate("out"))
        module(own).square().mean().backward()
        sync.stage_final(0)
        sync.finish()
        sync.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    sync.check_replicas()
    sharded = [cast("DTensor", parameter) for parameter in module.parameters()]
    return [parameter.full_tensor().detach() for parameter in sharded]


def test_clusters_may_shard_by_fsdp2() -> None:
    anchor = small()
    outer = torch.optim.SGD(anchor.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    replicas = [small() for _ in range(2)]
    for step in range(4):
        for number, replica in enumerate(replicas):
            for inner in range(2):
                (replica(rows(step, inner, number)).square().mean() / 2).backward()
            nn.utils.clip_grad_norm_(replica.parameters(), 0.5)
            torch.optim.SGD(replica.parameters(), lr=0.1).step()
            replica.zero_grad()
        if step % 2:
            meet(list(anchor.parameters()), replicas, outer)
    for weights in of(clusters_inside_of_which_fsdp2_shards):
        for found, expected in zip(weights, anchor.parameters(), strict=True):
            assert error(found, expected.detach()) <= rounding(4 * 8)


@case
def an_optimizer_of_all_parameters() -> Any:
    scheduler = make_scheduler(Run())
    own = torch.optim.AdamW([scheduler.sync.parameter(r) for r in scheduler.sync.records()])
    compute(scheduler, 0)
    try:
        own.step()
    except PipegradError as error:
        return str(error)


def test_an_optimizer_that_would_never_meet_is_refused() -> None:
    for message in of(an_optimizer_of_all_parameters):
        assert "replicas meet, and nobody has asked for what this rank steps" in message
