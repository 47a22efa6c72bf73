"""A second step without zero_grad: where nothing is reduced it adds up, else it is refused."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B
from torch.utils._python_dispatch import TorchDispatchMode

from pipegrad import GradientSync, MainGrad, Scheduler, Stage, Topology, attach
from pipegrad.errors import StepError
from pipegrad.testing import run_ranks
from pipegrad_handlers.data_parallel import DataParallel
from pipegrad_handlers.pipeline_shared import PipelineShared
from tests.support.gradients.cases import (
    Case,
    Replies,
    give,
    on,
    outcome,
    replicated,
    replies,
    stage,
    tied,
)
from tests.support.gradients.placements import SHARD, By

ALONE = Topology.build(axes=(("pp", 1), ("dp", 1)))
EPS = torch.finfo(torch.float32).eps
TWO: list[Case] = []
two = replies(2, TWO)

WAYS: dict[str, dict[str, Any]] = {
    "in .grad": {},
    "main_grad": {"accessor": MainGrad()},
    "master copies": {"master_dtype": torch.float64},
    "both": {"accessor": MainGrad(), "master_dtype": torch.float64},
}


def add(sync: GradientSync, module: nn.Module, number: int, **gradients: float) -> None:
    """Takes a step of `number` microbatches, each with these gradients."""
    sync.prepare(divisor=number)
    for at in sync.topology.local_stages:
        sync.stage_first_use(at)
    for _ in range(number):
        give(module, **gradients)
    for at in sync.topology.local_stages:
        sync.stage_final(at)
    sync.finish()


@pytest.mark.parametrize("way", WAYS)
def test_steps_that_reduce_nothing_add_up_as_in_one_process(way: str) -> None:
    """Issue 16, point 13. It was "already reduced"; in copies the first step's was lost."""
    module = stage(a=(2,), b=(2,), c=(2,))
    sync = GradientSync({0: module}, ALONE, handlers=[], **WAYS[way])
    sync.optimizer_parameters()
    goals = {"a": 0.0, "b": 0.0}
    for number, given in enumerate(({"a": 8.0}, {"a": 2.0, "b": 1.0}, {"b": 3.0}), start=1):
        add(sync, module, 4, **given)
        goals = {name: goal + given.get(name, 0.0) for name, goal in goals.items()}
        found = {s.record.name: s.tensor.grad for s in sync.main_parameters()}
        expected = {name: [goal] * 2 for name, goal in goals.items() if goal}
        assert {n: g.tolist() for n, g in found.items() if g is not None} == expected, number
    sync.clip_grad_norm_(1e-3)  # and what was clipped
    clipped = {
        s.record.name: s.tensor.grad.tolist()  # type: ignore[union-attr]
        for s in sync.main_parameters()
        if s.record.name < "c"
    }
    with sync.accumulate():
        add(sync, module, 2, a=1.0)
    add(sync, module, 8, a=1.0)
    for one in sync.main_parameters():
        if one.record.name == "a":
            assert one.tensor.grad is not None
            assert one.tensor.grad.tolist() == pytest.approx(
                [clipped["a"][0] + 2.0] * 2, rel=4 * EPS
            )
            one.tensor.grad.zero_()
        else:
            one.tensor.grad = None
    add(sync, module, 4, a=1.0, b=2.0)
    found = {s.record.name: s.tensor.grad for s in sync.main_parameters()}
    assert {n: g.tolist() for n, g in found.items() if g is not None} == {
        "a": [1.0] * 2,
        "b": [2.0] * 2,
    }
    sync.close()


def test_a_divisor_that_is_no_power_of_two_rounds_once() -> None:
    """Issue 16, point 13. The steps before are not divided again."""
    torch.manual_seed(1)
    module, true = stage(a=(50,)), torch.zeros(50, dtype=torch.float64)
    sync = GradientSync({0: module}, ALONE, handlers=[])
    for number in (3, 5, 7):
        given = torch.randn(50)
        sync.prepare(divisor=number)
        for _ in range(number):
            give(module, a=given)
        sync.stage_final(0)
        sync.finish()
        true += given.double()
    gradient = module.get_parameter("a").grad
    assert gradient is not None
    # A step has up to 7 sums, a division, and a scaling of what was there: 3 * 9 roundings.
    assert float((gradient.double() - true).abs().max()) <= 27 * EPS * float(true.abs().max())
    sync.close()


@on(TWO)
def reduced() -> Any:
    """What is reduced is refused, and named; what is beside it is not."""
    found: list[Any] = []
    half = {"accessor": MainGrad()}
    for options in ({}, half, {"master_dtype": torch.float64}):
        module = stage(own=(2,), a=(2,))
        sync = tied(module, "a", **options)
        sync.optimizer_parameters()
        add(sync, module, 1, own=1.0, a=1.0)
        found.append(outcome(sync.prepare))
        for one in sync.main_parameters():
            if one.record.name in ("a", "w"):
                one.tensor.grad = None
        sync.publish()
        add(sync, module, 2, own=1.0, a=1.0)
        found.append({s.record.name: s.tensor.grad.tolist() for s in sync.main_parameters()})  # type: ignore[union-attr]
        sync.close()
    module = stage(w=(256,))
    sync = replicated(module, handlers=[By("dp", SHARD)])
    optimizer = torch.optim.SGD(sync.optimizer_parameters(), lr=1.0)
    add(sync, module, 1, w=1.0)
    found.append(outcome(sync.prepare))
    optimizer.zero_grad(set_to_none=False)
    add(sync, module, 1, w=3.0)
    found.append([set(s.tensor.grad.tolist()) for s in sync.main_parameters()])  # type: ignore[union-attr]
    sync.close()
    return found


def test_only_what_is_reduced_is_refused_and_named(two: Replies) -> None:
    """Issue 16, point 13. In rows and in copies, the first step's gradient was lost in silence."""
    for reply in two:
        *ways, shard, row = reply["reduced"]
        for said in (*ways[::2], shard):
            name = "0.w" if said is shard else "0.a"
            assert said.startswith(f"StepError: the gradient of '{name}' is already reduced")
            assert "for the parameters that this optimizer has" in said
        assert ways[1::2] == [{"own": [2.0, 2.0], "a": [2.0, 2.0]}] * 3
        assert row == [{6.0}]


@on(TWO)
def zeroed_and_accumulated() -> Any:
    """Steps of one part, and of two with a divisor each: gradients are zeroed in place between."""
    found = []
    for options in ({}, {"accessor": MainGrad()}, {"reduce_dtype": torch.float64}, WAYS["both"]):
        module = stage(own=(2,), a=(2,))
        sync = tied(module, "a", **options)
        optimizer = torch.optim.SGD(sync.optimizer_parameters(), lr=0.0)
        for parts in (1, 1, 2, 2):
            if parts == 2:
                with sync.accumulate():
                    add(sync, module, 2, own=1.0, a=1.0)
            add(sync, module, 4, own=2.0, a=3.0)
            found.append(
                {one.record.name: one.tensor.grad.tolist() for one in sync.main_parameters()}  # type: ignore[union-attr]
            )
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        sync.close()
    return found


def test_steps_may_begin_with_gradients_zeroed_in_place(two: Replies) -> None:
    """Issue 16, point 13. Reduced gradients of stand-ins were doubled; second parts refused."""
    for reply in two:
        found = reply["zeroed_and_accumulated"]
        one, both = {"own": [2.0, 2.0], "a": [6.0, 6.0]}, {"own": [3.0, 3.0], "a": [8.0, 8.0]}
        assert found == [one, one, both, both] * 4


# The engines.


def loss_of(out: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(out, target)


def engines(cases: Sequence[tuple[str, int]]) -> list[Any]:
    """Three steps without zero_grad, of a pipeline and of one process: the largest errors."""
    return [engine(*case) for case in cases]


def engine(kind: str, microbatches: int) -> list[float]:
    topology = Topology.create(pipeline=2)
    torch.manual_seed(1)
    true = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)))
    index = topology.local_stages[0]
    module = copy.deepcopy(true[index])
    if kind == "attach":
        part: Any = PipelineStage(module, index, 2, torch.device("cpu"))
        schedule: Any = Schedule1F1B(part, microbatches, loss_fn=loss_of)
        sync = attach(schedule, topology=topology)
    else:
        schedule = Scheduler(
            [Stage(module, index)],
            topology,
            schedule=kind,
            num_microbatches=microbatches,
            loss_fn=loss_of,
        )
        sync = schedule.sync
    errors = []
    for number in range(3):
        x, y = torch.randn(2, 12, 4, generator=torch.Generator().manual_seed(number))
        loss_of(true(x), y).backward()
        if kind == "attach":
            schedule.step(*([x] if index == 0 else []), target=y if index == 1 else None)
        else:
            schedule.step(x, target=y)
        pairs = zip(module.parameters(), true[index].parameters(), strict=True)
        errors.append(max(float((p.grad - q.grad).abs().max()) for p, q in pairs))  # type: ignore[operator]
    sync.close()
    return errors


def test_engines_add_up_as_one_process_does() -> None:
    """Issue 16, point 13. torch's own division would divide the steps before once more."""
    cases = [("attach", 4), ("attach", 3), ("1f1b", 4), ("zb-h1", 3)]
    for errors in run_ranks(engines, 2, cases):
        # Sums of 12 rows of products of 4, and up to 3 steps of them; gradients are below 1.
        assert max(map(max, errors)) <= 4 * EPS * (3 * 12 * 4) ** 0.5


# Results in main_grad.


@on(TWO)
def results() -> Any:
    """What main_grad is behind finish, behind clipping and in the next step, by placement."""
    found: list[Any] = []
    for placement in ("replicate", "owner"):
        handlers = [PipelineShared(placement=placement), DataParallel]
        module = stage(a=(2,), own=(2,), idle=(2,))
        sync = tied(module, "a", "idle", accessor=MainGrad(), handlers=handlers)
        optimizer = torch.optim.SGD(sync.optimizer_parameters(), lr=1.0)

        def mains(module: nn.Module = module) -> dict[str, Any]:
            read = {n: MainGrad().read(p) for n, p in module.named_parameters()}
            return {name: None if g is None else g.tolist() for name, g in read.items()}

        for _ in range(2):
            add(sync, module, 1, a=1.5, own=4.0)
            sync_found = mains()
            norm = sync.clip_grad_norm_(sum((9.0 * 2, 16.0 * 4)) ** 0.5 / 2)
            found.append((sync_found, norm.item(), mains()))
            optimizer.step()
            optimizer.zero_grad()
            sync.publish()
        sync.prepare()
        found.append(mains())
        sync.abort(RuntimeError("enough"))
        sync.close()
    return found


def test_main_grad_is_the_result_until_the_next_step(two: Replies) -> None:
    """Issue 16, point 14. It was None behind finish: Megatron's optimizers and loggers read it."""
    norm = (9.0 * 2 + 16.0 * 4) ** 0.5
    for number, reply in enumerate(two):
        *replicate, fresh, one, two_, owner_fresh = reply["results"]
        for before, measured, after in (*replicate, one, two_):
            has = (before, measured, after) in replicate or number == 0
            assert before == {"a": [3.0, 3.0] if has else None, "own": [4.0, 4.0], "idle": None}
            assert measured == pytest.approx(norm, rel=4 * EPS)
            halved = {"a": [1.5, 1.5] if has else None, "own": [2.0, 2.0], "idle": None}
            assert {n: g and pytest.approx(g, rel=1e-6) for n, g in after.items()} == halved
        assert fresh == owner_fresh == {"a": [0.0, 0.0], "own": None, "idle": [0.0, 0.0]}


def test_an_optimizer_that_has_a_part_of_the_parameters_is_told_so() -> None:
    """Issue 16, point 10 (3.8). The advice was to call zero_grad(), which had been called."""
    for said in run_ranks(partial_optimizer, 2):
        assert "optimizer.zero_grad() does so for the parameters that this optimizer has" in said


def partial_optimizer() -> str:
    module = stage(a=(2,), b=(2,))
    sync = tied(module, "a", "b")
    optimizer = torch.optim.SGD([module.get_parameter("a")], lr=1.0)
    add(sync, module, 1, a=1.0, b=1.0)
    optimizer.step()
    optimizer.zero_grad()
    try:
        sync.prepare()
    except StepError as error:
        return str(error)
    return "nothing"


# What a step looks at.


class Looks(TorchDispatchMode):
    """Counts operators that read values to the host, or look at all of a tensor for it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))


def looks() -> Any:
    """On 2 ranks: walks down the modules and reads of values in `prepare`, by way of zeroing."""
    module = Pair()
    sync = replicated(module)
    found = []
    for set_to_none in (True, False, False):
        with mock.patch.object(nn.Module, "get_parameter", autospec=True) as walks, Looks() as ops:
            sync.prepare()
        found.append((walks.call_count, ops.seen["aminmax"], ops.seen["_local_scalar_dense"]))
        sum(p.sum() for p in module.parameters()).backward()  # type: ignore[union-attr]
        sync.stage_final(0)
        sync.finish()
        module.zero_grad(set_to_none=set_to_none)
    module.parts[3] = nn.Linear(4, 4)  # found although nobody said so
    sync.prepare()
    sum(p.sum() for p in module.parameters()).backward()  # type: ignore[union-attr]
    sync.stage_final(0)
    sync.finish()
    gradients = [p.grad for p in module.parts[3].parameters()]
    values = [None if g is None else set(g.flatten().tolist()) for g in gradients]
    module.zero_grad()
    nn.utils.parametrizations.weight_norm(module.parts[3])
    return found, values, outcome(sync.prepare)


def test_a_step_neither_walks_down_the_modules_nor_reads_each_gradient() -> None:
    """Issue 16, point 10 (3.7, 3.5). 18 us a parameter and step; words without the key."""
    for found, values, said in run_ranks(looks, 2):
        assert found == [(0, 0, 0), (0, 0, 0), (0, 1, 1)]
        assert values == [{1.0}, {1.0}]
        assert said.startswith("StepError: '0.parts.3.weight' is no parameter of its module")
        assert "weight_norm, prune and parametrize" in said


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_clipping_takes_sparse_gradients_and_measures_fp64_in_fp64(dtype: torch.dtype) -> None:
    """Issue 16, point 10 (3.5, 3.9). NotImplementedError; and 4e-8 off, as far as fp32 goes."""
    torch.manual_seed(1)
    module = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 3)).to(dtype)
    true = copy.deepcopy(module)
    rows = torch.tensor([1, 1, 5])  # a row twice: its gradient is not coalesced
    sync = GradientSync({0: module}, ALONE, handlers=[])
    sync.prepare()
    module(rows).pow(2).sum().backward()
    sync.stage_final(0)
    sync.finish()
    norm = sync.clip_grad_norm_(0.5)
    true(rows).pow(2).sum().backward()
    goals = [p.grad.to_dense() for p in true.parameters()]  # type: ignore[union-attr]
    goal = torch.stack([g.double().pow(2).sum() for g in goals]).sum().sqrt()
    bound = 4 * torch.finfo(dtype).eps * sum(g.numel() for g in goals) ** 0.5
    assert norm.dtype == dtype
    assert float(norm) == pytest.approx(float(goal), rel=bound)
    for parameter, gradient in zip(module.parameters(), goals, strict=True):
        assert parameter.grad is not None
        expected = (gradient * (0.5 / (goal + 1e-6))).to(dtype)
        torch.testing.assert_close(parameter.grad.to_dense(), expected, rtol=bound, atol=0)
    sync.close()
