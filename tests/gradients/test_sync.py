"""GradientSync on hand-made gradients: values, verbs, views, failures. Two worlds run all cases.

A case runs on every rank and returns plain values; the test of its name asserts those of all ranks.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from pipegrad import (
    FlatBucket,
    Float32Grad,
    GradientHandler,
    GradientSync,
    Hop,
    ParameterRecord,
    Placement,
    PlanError,
    Reduction,
    Topology,
    Work,
    make_plan,
)
from pipegrad.testing import run_ranks
from pipegrad_handlers.data_parallel import DataParallel
from pipegrad_handlers.pipeline_shared import PipelineShared

Case = Callable[[], Any]
TWO: dict[str, Case] = {}
FOUR: dict[str, Case] = {}
SHARED, DATA = "pipegrad_handlers.pipeline_shared:PipelineShared", "data-parallel"


def on(world: dict[str, Case]) -> Callable[[Case], Case]:
    """Makes a function one of the cases of a world."""

    def add(case: Case) -> Case:
        world[case.__name__] = case
        return case

    return add


def run_cases(name: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for case in {"two": TWO, "four": FOUR}[name].values():
        began = time.monotonic()
        results[case.__name__] = case()
        results[f"{case.__name__} seconds"] = time.monotonic() - began
    return results


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run_ranks(run_cases, 2, "two", timeout_seconds=50)


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    return run_ranks(run_cases, 4, "four", timeout_seconds=50)


# --- what cases are made of


def rank() -> int:
    return dist.get_rank()


def outcome(function: Callable[[], object]) -> str:
    """Returns what `function` raised, or what it returned."""
    try:
        found = function()
    except Exception as error:  # noqa: BLE001 - whatever it is, is asserted
        return f"{type(error).__name__}: {error}"
    return repr(found)


def stage(**parameters: object) -> nn.Module:
    """A module of parameters: tensors as they are, sequences as shapes of zeros."""
    module = nn.Module()
    for name, given in parameters.items():
        tensor = given if isinstance(given, torch.Tensor) else torch.zeros(given)  # type: ignore[call-overload]
        made = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor)
        setattr(module, name, made)
    return module


def give(module: nn.Module, **gradients: float | torch.Tensor) -> None:
    """Runs a backward that adds these to the gradients."""
    for name, gradient in gradients.items():
        (module.get_parameter(name) * gradient).sum().backward()


def grads(module: nn.Module) -> dict[str, Any]:
    return {
        name: None if p.grad is None else p.grad.tolist() for name, p in module.named_parameters()
    }


def tied(module: nn.Module, *names: str, **options: Any) -> GradientSync:
    """A pipeline of two stages, one a rank, which hold `names` together."""
    topology = Topology.create(pipeline=2)
    options = {"handlers": [PipelineShared, DataParallel], **options}
    here = topology.coordinate("pp")
    return GradientSync({here: module}, topology, shared=[[name] for name in names], **options)


def replicated(module: nn.Module, **options: Any) -> GradientSync:
    """One stage, a copy on every rank; means unless told otherwise."""
    options = {"handlers": [DATA], **options}
    return GradientSync({0: module}, Topology.create(pipeline=1), **options)


def step(
    sync: GradientSync, module: nn.Module, **gradients: float | torch.Tensor
) -> dict[str, Any]:
    sync.prepare()
    give(module, **gradients)
    for at in sync.topology.local_stages:
        sync.stage_final(at)
    sync.finish()
    return grads(module)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.detach().contiguous().view(torch.int32).flatten().tolist()


class NewStorage(TorchDispatchMode):
    """Counts the bytes of every storage that an operator makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        if isinstance(result, torch.Tensor):
            storage = result.untyped_storage()
            if storage.data_ptr() not in known:
                self.nbytes += storage.nbytes()
        return result


# --- values


@on(TWO)
def crossed() -> Any:
    """Two ties that the stages register in opposite order."""
    names = ("a", "b") if rank() == 0 else ("b", "a")
    module = stage(**dict.fromkeys(names, (1,)))
    sync = tied(module, "a", "b")
    here = (10.0 if rank() else 1.0) * 1.0
    return step(sync, module, a=here, b=100 * here), len(sync.plan.launches)


def test_ties_registered_in_another_order_get_their_own_sums(two: list[dict[str, Any]]) -> None:
    """By local order both a and b would be 101 (or 1001) on one of the ranks."""
    gradients, launches = two[0]["crossed"]
    assert (gradients, launches) == ({"a": [11.0], "b": [1100.0]}, 1)
    assert two[1]["crossed"] == ({"b": [1100.0], "a": [11.0]}, 1)


@on(TWO)
def missing() -> Any:
    """`a` only on rank 0, `b` nowhere, `c` everywhere, `d` is frozen."""
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    module = stage(a=(2,), b=(2,), c=(2,), d=frozen)
    found = []
    for options in ({}, {"bucket_bytes": 0}, {"reduce_dtype": torch.float64}):
        sync = tied(module, "a", "b", "c", "d", **options)
        for _ in range(2):
            given = {"a": 1.0, "c": 2.0} if rank() == 0 else {"c": 3.0}
            found.append(step(sync, module, **given))
            module.zero_grad()
    return found


def test_missing_gradients_are_zeros_or_none_and_never_hang(two: list[dict[str, Any]]) -> None:
    right = {"a": [1.0, 1.0], "b": None, "c": [5.0, 5.0], "d": None}
    assert [reply["missing"] for reply in two] == [[right] * 6] * 2
    assert all(reply["missing seconds"] < 5 for reply in two)


@on(TWO)
def zeroed() -> Any:
    """After zero_grad(set_to_none=False) a gradient nobody adds to stays zero."""
    module = stage(a=(2,), b=(2,))
    sync = tied(module, "a", "b")
    first = step(sync, module, a=1.0)
    refused = outcome(sync.prepare)
    module.zero_grad(set_to_none=False)
    second = step(sync, module, a=2.0, b=1.0)
    sync.clip_grad_norm_(1e-3)
    clipped = outcome(sync.prepare)
    module.zero_grad(set_to_none=False)
    third = step(sync, module, b=3.0)
    for p in module.parameters():
        p.grad = torch.ones_like(p)  # the user's own, not yet reduced
    fourth = step(sync, module, a=1.0)
    return refused, clipped, [first, second, third, fourth]


def test_a_reduced_gradient_is_refused_and_a_zeroed_one_accepted(two: list[dict[str, Any]]) -> None:
    for refused, clipped, steps in (reply["zeroed"] for reply in two):
        assert refused == clipped
        assert refused.startswith("StepError: the gradient of '0.a' is already reduced")
        assert "zero_grad()" in refused
        assert "sync.accumulate()" in refused
        assert steps == [
            {"a": [2.0, 2.0], "b": None},
            {"a": [4.0, 4.0], "b": [2.0, 2.0]},
            {"a": [0.0, 0.0], "b": [6.0, 6.0]},
            {"a": [4.0, 4.0], "b": [2.0, 2.0]},
        ]


@on(TWO)
def accumulated() -> Any:
    module = stage(a=(1,))
    found: list[Any] = []
    for options in ({}, {"reduce_dtype": torch.float64}):
        module.zero_grad()
        sync = tied(module, "a", **options)
        with sync.accumulate():
            step(sync, module, a=1.0)
            with sync.accumulate():
                step(sync, module, a=2.0)
            inner = step(sync, module, a=4.0)
        with suppress(KeyError), sync.accumulate():
            sync.prepare()
            give(module, a=8.0)
            raise KeyError
        quiet = sync.statistics().steps
        sync.prepare(divisor=2.0)
        give(module, a=16.0)
        sync.stage_final(rank())
        sync.finish()
        found.append((inner, quiet, grads(module), sync.statistics().collectives))
        module.zero_grad()
        found.append(step(sync, module, a=1.0))
    return found


def test_accumulated_steps_only_add_up_and_are_divided_once(two: list[dict[str, Any]]) -> None:
    once = [({"a": [7.0]}, 0, {"a": [31.0]}, 1), {"a": [2.0]}]
    assert [reply["accumulated"] for reply in two] == [once * 2] * 2


@on(TWO)
def divided() -> Any:
    """Every gradient once: routed, local, held twice by this rank."""
    topology = Topology.create(pipeline=2, stage_to_rank=[0, 1, 1, 0])
    first, last = stage(w=(1,), own=(1,)), stage(w=(1,))
    modules = {0: first, 3: last} if rank() == 0 else {1: first, 2: last}
    sync = GradientSync(
        modules,
        topology,
        shared=[{0: "w", 3: "w"}, {1: "w", 2: "w"}],
        handlers=[SHARED],
    )
    sync.prepare(divisor=4.0)
    give(first, w=8.0, own=4.0)
    give(last, w=16.0)
    for at in reversed(topology.local_stages):
        sync.stage_final(at)
    sync.finish()
    one = first.get_parameter("w") is last.get_parameter("w")
    return one, grads(first), sync.statistics().collectives, len(sync.records())


def test_a_tie_on_one_rank_is_one_parameter_and_costs_no_collective(
    two: list[dict[str, Any]],
) -> None:
    right = (True, {"w": [6.0], "own": [1.0]}, 0, 2)
    assert [reply["divided"] for reply in two] == [right, right]


# --- verbs


@on(TWO)
def out_of_order() -> Any:
    module = stage(a=(1,))
    sync = tied(module, "a")
    said = [
        outcome(sync.finish),
        outcome(lambda: sync.stage_final(rank())),
        outcome(lambda: sync.stage_last_backward(rank())),
        outcome(lambda: sync.stage_final(1 - rank())),
    ]
    sync.prepare()
    said += [
        outcome(lambda: sync.stage_final(1 - rank())),
        outcome(sync.finish),
        outcome(lambda: sync.clip_grad_norm_(1.0)),
    ]
    give(module, a=1.0)
    sync.stage_final(rank())
    said += [outcome(lambda: sync.stage_final(rank())), outcome(sync.prepare)]
    sync.finish()
    said += [outcome(sync.finish), outcome(lambda: sync.stage_final(rank()))]
    return said, grads(module)


def test_verbs_out_of_order_are_refused_and_do_no_harm(two: list[dict[str, Any]]) -> None:
    for number, reply in enumerate(two):
        said, gradients = reply["out_of_order"]
        here, there = number, 1 - number
        assert [s.split(":")[0] for s in said] == ["StepError"] * len(said)
        expected = [
            "finish() without prepare()",
            f"stage {here} cannot become final outside a step: call prepare() first",
            f"stage {here} cannot become final outside a step: call prepare() first",
            f"stage {there} is not on this rank, which has [{here}]",
            f"stage {there} is not on this rank, which has [{here}]",
            f"finish() before stage_final() of stages [{here}]",
            "clip_grad_norm_() inside a step: call finish() first",
            f"stage {here} is final already",
            "prepare() inside a step",
            "finish() without prepare()",
            f"stage {here} cannot become final outside a step",
        ]
        assert [e for e, s in zip(expected, said, strict=True) if e not in s] == []
        assert gradients == {"a": [2.0]}


@on(TWO)
def late() -> Any:
    """A backward after stage_final changes what has left."""
    module = stage(a=(1,))
    sync = tied(module, "a", handlers=[Silent])
    sync.prepare()
    give(module, a=1.0)
    sync.stage_final(rank())
    give(module, a=1.0)
    said = outcome(sync.finish)
    return said, outcome(sync.prepare)


def test_a_gradient_that_changes_after_it_is_final_is_an_error(two: list[dict[str, Any]]) -> None:
    for said, after in (reply["late"] for reply in two):
        assert said.startswith("StepError: autograd added to the gradient of '0.a' after it was")
        assert after.startswith("ReduceError: this GradientSync failed before")


@on(TWO)
def untied() -> Any:
    """One of the two names of a parameter that this rank holds twice is replaced."""
    topology = Topology.create(pipeline=2, stage_to_rank=[0, 1, 1, 0])
    low, high = topology.local_stages
    modules = {low: stage(w=(1,)), high: stage(w=(1,))}
    ties = [{0: "w", 3: "w"}, {1: "w", 2: "w"}]
    sync = GradientSync(modules, topology, shared=ties, handlers=[PipelineShared])
    modules[high].w = nn.Parameter(torch.zeros(1))
    said = outcome(sync.prepare)
    modules[high].w = modules[low].w
    return said, outcome(sync.prepare)


def test_a_tie_that_comes_apart_is_refused(two: list[dict[str, Any]]) -> None:
    for reply, stages in zip(two, ([0, 3], [1, 2]), strict=True):
        said, repaired = reply["untied"]
        assert said.startswith(f"StepError: '{stages[0]}.w' was one parameter on stages {stages}")
        assert repaired == "None"


@on(TWO)
def aborted() -> Any:
    """A step that fails before anything left can be repeated."""
    module = stage(a=(1,))
    sync = tied(module, "a")
    sync.prepare()
    give(module, a=5.0)
    sync.abort(RuntimeError("out of memory"))
    module.zero_grad()
    return step(sync, module, a=1.0)


def test_a_step_aborted_before_a_launch_can_be_repeated(two: list[dict[str, Any]]) -> None:
    assert [reply["aborted"] for reply in two] == [{"a": [2.0]}] * 2


# --- views


@on(TWO)
def steady() -> Any:
    torch.manual_seed(0)
    last = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    module = stage(a=(7,), image=last, t=torch.zeros(3, 5).t(), s=(), e=(0, 3), own=(4,))
    sync = tied(module, "a", "image", "t", "s", "e")
    strides: dict[str, tuple[int, ...]] = {}
    found: dict[str, list[Any]] = {"pointers": [], "bytes": [], "copies": [], "early": []}
    for number in range(4):
        with NewStorage() as counter:
            sync.prepare()
        sync.stage_last_backward(rank())
        torch.stack([(p * (rank() + 1.0)).sum() for p in module.parameters()]).sum().backward()
        with counter:
            sync.stage_final(rank())
            sync.finish()
        held = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
        found["pointers"].append([held[n].data_ptr() for n in ("a", "image", "t", "s")])
        found["bytes"].append(counter.nbytes)
        found["copies"].append(sync.statistics().copies)
        found["early"].append(sync.statistics().early)
        strides = {name: gradient.stride() for name, gradient in held.items()}
        module.zero_grad(set_to_none=number % 2 == 0)
    return found, strides


def test_steady_state_allocates_and_copies_nothing(two: list[dict[str, Any]]) -> None:
    for found, strides in (reply["steady"] for reply in two):
        assert (strides["image"], strides["t"], strides["s"]) == ((48, 1, 12, 3), (1, 5), ())
        assert len(set(map(tuple, found["pointers"]))) == 1
        assert found["bytes"][2:] == [6, 0]  # after zeroing in place, one bool a gradient
        assert found["copies"] == [0, 0, 0, 0]
        assert found["early"] == [0, 6, 6, 6]


@on(TWO)
def shapes() -> Any:
    """Strided, 0-d, empty and sparse gradients; create_graph; the empty alone in its bucket."""
    table = nn.Parameter(torch.zeros(4, 2))
    module = stage(
        t=torch.zeros(2, 3).t(), s=(), e=(0, 3), table=table, gaps=torch.zeros(2, 6)[:, ::2]
    )
    ties = list(dict(module.named_parameters()))
    found = []
    for options in ({}, {"bucket_bytes": 0, "lanes": 3}, {"reduce_dtype": torch.float64}):
        module.zero_grad()
        sync = tied(module, *ties, **options)
        sync.check_replicas()
        sync.prepare()
        values = torch.arange(6.0).reshape(3, 2)
        (module.get_parameter("t") * values).sum().backward(create_graph=True)
        give(module, s=2.0, e=1.0, gaps=torch.arange(6.0).reshape(2, 3))
        index = torch.tensor([rank(), 3])
        nn.functional.embedding(index, table, sparse=True).sum().backward()
        sync.stage_final(rank())
        sync.finish()
        norm = sync.clip_grad_norm_(math.inf).item()
        graph = [p.grad.requires_grad for p in module.parameters() if p.grad is not None]
        layouts = {p.grad.layout for p in module.parameters() if p.grad is not None}
        found.append((grads(module), norm, any(graph), layouts == {torch.strided}))
    return found


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_gradients_of_every_shape_and_layout(two: list[dict[str, Any]]) -> None:
    right = {
        "t": [[0.0, 2.0], [4.0, 6.0], [8.0, 10.0]],
        "s": 4.0,
        "e": [],
        "table": [[1.0, 1.0], [1.0, 1.0], [0.0, 0.0], [2.0, 2.0]],
        "gaps": [[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]],
    }
    squares = 2 * sum(x * x for x in (2, 4, 6, 8, 10)) + 16 + 4 + 8
    for reply in two:
        for gradients, norm, graph, dense in reply["shapes"]:
            assert gradients == right
            assert norm == pytest.approx(math.sqrt(squares), rel=1e-6)
            assert (graph, dense) == (False, True)


@on(TWO)
def replaced() -> Any:
    """Parameters are looked up anew in every step."""
    module = stage(a=torch.zeros(2, dtype=torch.bfloat16), b=(1,))
    found = []
    sync = tied(module, "a", "b")
    for accessor in (None, Float32Grad()):
        sync = tied(module, "a", "b", accessor=accessor)
        step(sync, module, a=1.0, b=1.0)
        module.a = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        module.zero_grad()
        found.append(step(sync, module, a=2.0, b=2.0))
        kept = sync.records()[0]
        assert sync.parameter(kept) is module.a
        module.zero_grad()
    module.a = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    said = [outcome(sync.prepare)]
    module.a = nn.Parameter(torch.ones(2))
    said += [outcome(sync.prepare)]
    module.a = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    module.get_parameter("b").requires_grad = False
    said += [outcome(sync.prepare)]
    module.get_parameter("b").requires_grad = True
    found.append(step(sync, module, a=1.0, b=1.0))
    return found, said


def test_parameters_may_be_replaced_but_not_by_something_else(two: list[dict[str, Any]]) -> None:
    right = [{"a": [4.0, 4.0], "b": [4.0]}] * 2 + [{"a": [2.0, 2.0], "b": [2.0]}]
    for found, (shape, dtype, trained) in (reply["replaced"] for reply in two):
        assert found == right
        assert shape.startswith("StepError: '0.a' was (2,)")
        assert "(3,)" in shape
        assert dtype.startswith("StepError: '0.a' was (2,)")
        assert "torch.float32" in dtype
        assert trained.startswith("StepError: '0.b' was (1,)")
        assert "requires_grad=False" in trained


# --- dtypes


@on(TWO)
def dtypes() -> Any:
    """Gradients of bf16 and fp32 parameters, on their own wire and on the other's."""
    torch.manual_seed(rank())
    values = torch.randn(300)
    low = torch.zeros(300, dtype=torch.bfloat16)
    found: dict[str, Any] = {}
    for wire in (None, torch.float32, torch.bfloat16):
        module = stage(low=low, high=torch.zeros(300))
        sync = tied(module, "low", "high", reduce_dtype=wire)
        step(sync, module, low=values.to(torch.bfloat16), high=values)
        found[str(wire)] = (
            module.get_parameter("low").grad,
            module.get_parameter("high").grad,
            sorted(str(b.wire_dtype) for b in sync.plan.buckets),
            sync.statistics().copies,
        )
    module = stage(low=low, high=torch.zeros(300))
    sync = tied(module, "low", "high", accessor=Float32Grad())
    parts = (values.to(torch.bfloat16), (values * 2**-9).to(torch.bfloat16))
    sync.prepare()
    for part in parts:
        give(module, low=part)
    sync.stage_final(rank())
    sync.finish()
    found["fp32 gradients"] = (module.get_parameter("low").grad, parts, len(sync.plan.buckets))
    found["values"] = values
    return found


def test_dtypes_on_the_wire(two: list[dict[str, Any]]) -> None:
    replies = [reply["dtypes"] for reply in two]
    values = torch.stack([reply["values"] for reply in replies])
    exact, lowered = values.sum(0), values.to(torch.bfloat16).float().sum(0)
    scale = values.abs().sum(0)
    wires = {
        "None": (["torch.bfloat16", "torch.float32"], 0),
        "torch.float32": (["torch.float32"] * 2, 1),
        "torch.bfloat16": (["torch.bfloat16"] * 2, 1),
    }
    for reply in replies:
        for wire, expected in wires.items():
            low, high, *said = reply[wire]
            assert (low.dtype, high.dtype, tuple(said)) == (torch.bfloat16, torch.float32, expected)
            assert torch.equal(low, replies[0][wire][0])
            assert torch.equal(high, replies[0][wire][1])
            assert ((low.float() - lowered).abs() <= scale * 2**-8).all()
            bound = 2**-7 if wire == "torch.bfloat16" else 2**-24
            assert ((high - exact).abs() <= scale * bound).all()
        # On an fp32 wire bf16 gradients are added exactly and rounded once.
        assert torch.equal(reply["torch.float32"][0], lowered.to(torch.bfloat16))


def test_fp32_gradients_of_bf16_parameters(two: list[dict[str, Any]]) -> None:
    replies = [reply["dtypes"]["fp32 gradients"] for reply in two]
    sums = [parts[0].float() + parts[1].float() for _, parts, _ in replies]
    for gradient, _, buckets in replies:
        assert (gradient.dtype, buckets) == (torch.float32, 1)
        assert torch.equal(gradient, sums[0] + sums[1])


# --- norms and replicas


@on(FOUR)
def clipped() -> Any:
    """pp 2 x dp 2: a tie, a replicated and a local parameter; sums, then means of 1 + rank."""
    module = stage(tie=(4,), own=(4,))
    sync = tied(module, "tie")
    found: dict[str, Any] = {}
    before = []
    for name, kind, most in (("two", 2.0, 1.0), ("inf", math.inf, 5.0), ("one", 1.0, 1e9)):
        module.zero_grad()
        before.append(step(sync, module, tie=10.0, own=float(sync.topology.local_stages[0] * 20)))
        norm = sync.clip_grad_norm_(most, kind)
        found[name] = (norm.item(), bits(norm), grads(module), norm.dtype == torch.float32)
    found["before"] = before[0] == before[1] == before[2]
    return found, before[0]


def test_clipping_counts_a_shared_parameter_once(four: list[dict[str, Any]]) -> None:
    """The tie: 4 elements of 20 on 2 stages and 2 copies, norm 40 once. Counted twice: 56.57."""
    tie, own = 20.0, (0.0, 20.0)
    norm = math.sqrt(4 * tie**2 + 4 * own[1] ** 2)
    norms = {"two": norm, "inf": 20.0, "one": 4 * tie + 4 * own[1]}
    factors = {"two": 1 / (norm + 1e-6), "inf": 5 / (20 + 1e-6), "one": 1.0}
    for number, (found, before) in enumerate(reply["clipped"] for reply in four):
        local = own[number // 2]
        assert before == {"tie": [tie] * 4, "own": [local] * 4}
        assert found.pop("before")
        for name, (value, same, gradients, single) in found.items():
            assert value == pytest.approx(norms[name], rel=1e-6)
            assert (same, single) == (four[0]["clipped"][0][name][1], True)
            assert gradients["tie"] == pytest.approx([tie * factors[name]] * 4, rel=1e-6)
            assert gradients["own"] == pytest.approx([local * factors[name]] * 4, rel=1e-6)
    assert [reply["clipped"][0]["two"][2]["tie"] for reply in four] == [
        four[0]["clipped"][0]["two"][2]["tie"]
    ] * 4


@on(FOUR)
def replicas() -> Any:
    """All ranks begin with other values; then one bit of one copy flips."""
    torch.manual_seed(rank())
    counts = nn.Parameter(torch.full((2,), rank()), requires_grad=False)
    module = stage(tie=torch.randn(5), own=torch.randn(3), empty=(0,), counts=counts)
    flags = torch.tensor([bool(rank()), True])
    module.flags = nn.Parameter(flags, requires_grad=False)
    module.low = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))
    sync = tied(module, "tie")
    values = {name: p.detach().clone() for name, p in module.named_parameters()}
    sync.check_replicas()
    with torch.no_grad():
        if rank() == 3:
            module.get_parameter("tie").view(torch.int32)[2] ^= 1
        if rank() == 0:
            module.get_parameter("own")[:2] = module.get_parameter("own")[:2].flip(0)
    said = outcome(sync.check_replicas)
    again = outcome(sync.check_replicas)
    sync.synchronize_parameters()
    sync.check_replicas()
    repaired = {name: torch.equal(values[name], p) for name, p in module.named_parameters()}
    return said, again == said, values, repaired


def test_replicas_are_made_equal_and_a_single_bit_is_found(four: list[dict[str, Any]]) -> None:
    texts = {reply["replicas"][0] for reply in four}
    (text,) = texts
    assert text.startswith("ReduceError: copies of one parameter have drifted apart")
    named = ["'0.tie' over ranks [1, 3]", "'0.tie' over ranks [2, 3]", "'0.own' over ranks [0, 1]"]
    assert [name for name in named if name not in text] == []
    assert "over ranks [0, 2]" not in text
    values = [reply["replicas"][2] for reply in four]
    for name in ("tie", "own", "counts", "flags", "low", "empty"):
        for a, b in ((0, 1), (2, 3), *([(0, 2)] if name == "tie" else [])):
            assert torch.equal(values[a][name], values[b][name]), name
    torch.manual_seed(2)
    assert torch.equal(values[0]["tie"], values[2]["tie"])
    for reply in four:
        assert reply["replicas"][1]
        repaired = reply["replicas"][3]
        own = repaired.pop("own")
        assert all(repaired.values())
        assert own == (reply is not four[0] and reply is not four[1])


@on(FOUR)
def grid_of_four() -> Any:
    """A tie of sums over stages of means over data; and any rank's plan, made anywhere."""
    module = stage(tie=(2,), own=(2,))
    sync = tied(module, "tie", lanes=1)
    found = step(sync, module, tie=float(10 ** rank()), own=float(rank()))
    handlers: list[tuple[str, GradientHandler]] = [
        (SHARED, PipelineShared()),
        ("pipegrad_handlers.data_parallel:DataParallel", DataParallel()),
    ]
    plans = [
        make_plan(sync.manifest, sync.topology.at(r), handlers, bucket_bytes=25 * 2**20)
        for r in range(4)
    ]
    return found, sync.plan, plans


def test_means_over_data_then_sums_over_stages(four: list[dict[str, Any]]) -> None:
    tie = [(1 + 10) / 2 + (100 + 1000) / 2] * 2
    assert [reply["grid_of_four"][0] for reply in four] == [
        {"tie": tie, "own": [0.5, 0.5]}, {"tie": tie, "own": [0.5, 0.5]},
        {"tie": tie, "own": [2.5, 2.5]}, {"tie": tie, "own": [2.5, 2.5]},
    ]  # fmt: skip


def test_a_plan_made_elsewhere_is_the_ranks_own(four: list[dict[str, Any]]) -> None:
    own = [reply["grid_of_four"][1] for reply in four]
    assert [reply["grid_of_four"][2] for reply in four] == [own] * 4


# --- failures in a lane


class Silent(GradientHandler):
    """Plans what pipeline-shared does, and sends nothing."""

    def reductions(
        self, parameters: Sequence[ParameterRecord], topology: Topology
    ) -> Iterable[Reduction]:
        return [Reduction(p, topology.ranks_of(p.holders)) for p in parameters if p.shared]

    def launch(self, bucket: FlatBucket, reduction: Hop, group: dist.ProcessGroup) -> Work:
        return Done()


class Done:
    def wait(self) -> None:
        pass


class FailsOnOne(PipelineShared):
    """Fails on rank 1, for the bucket of `b` alone."""

    def launch(self, bucket: FlatBucket, reduction: Hop, group: dist.ProcessGroup) -> Work:
        if rank() == 1 and bucket.buffer[0] == 11:
            raise OSError("no route to host")
        return super().launch(bucket, reduction, group)


@on(TWO)
def lane_failure() -> Any:
    """Values arrive in the first step. In the second, rank 1 cannot send `b`."""
    module = stage(a=(1,), b=(1,))
    sync = tied(module, "a", "b", handlers=[FailsOnOne], bucket_bytes=0, lanes=1)
    right = step(sync, module, a=1.0, b=2.0)
    module.zero_grad()
    if rank() == 0:  # a refusal that one rank alone meets does not part the ranks
        give(module, a=1.0)
        module.zero_grad()
    began = time.monotonic()
    said = outcome(lambda: step(sync, module, a=1.0, b=11.0))
    seconds = time.monotonic() - began
    return right, said, outcome(sync.prepare), outcome(sync.finish), seconds


def test_a_failure_in_a_lane_is_every_ranks_error(two: list[dict[str, Any]]) -> None:
    for reply in two:
        right, said, prepared, finished, seconds = reply["lane_failure"]
        assert right == {"a": [2.0], "b": [4.0]}
        assert said.startswith("ReduceError: ")
        told = [
            "rank 1",
            "bucket 0 (0.b",
            "over ranks [0, 1]",
            "FailsOnOne",
            "no route to host",
        ]
        assert [part for part in told if part not in said] == []
        assert prepared.startswith("ReduceError: this GradientSync failed before")
        assert "no route to host" in prepared
        assert finished.startswith("StepError: finish() without prepare()")
        assert seconds < 4


@on(TWO)
def refused_on_one() -> Any:
    """Rank 0 has to prepare twice; the failure notice must still be the same step's."""
    module = stage(a=(1,))
    sync = tied(module, "a", handlers=[FailsOnOne])
    step(sync, module, a=1.0)
    if rank() == 1:
        module.zero_grad()
    else:
        outcome(sync.prepare)
        outcome(sync.prepare)
        module.zero_grad()
    began = time.monotonic()
    said = outcome(lambda: step(sync, module, a=11.0))
    return said, time.monotonic() - began


def test_a_refused_prepare_does_not_part_the_ranks(two: list[dict[str, Any]]) -> None:
    for said, seconds in (reply["refused_on_one"] for reply in two):
        assert "no route to host" in said
        assert seconds < 4


@on(TWO)
def abort_on_one() -> Any:
    """Rank 1's forward fails when rank 0 already waits for its gradients."""
    module = stage(a=(1,))
    sync = tied(module, "a")
    began = time.monotonic()
    if rank() == 1:
        sync.prepare()
        sync.abort(MemoryError("too large"))
        return "", 0.0
    return outcome(lambda: step(sync, module, a=1.0)), time.monotonic() - began


def test_a_step_aborted_on_one_rank_ends_on_those_that_wait(two: list[dict[str, Any]]) -> None:
    said, seconds = two[0]["abort_on_one"]
    assert said.startswith("ReduceError: ")
    assert "rank 1: MemoryError: too large" in said
    assert seconds < 4


# --- the order of launches, by recorded events


class Gate(GradientHandler):
    """Reduces over the data dimension; a launch is recorded, then waits until it is let go."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self._changed = threading.Condition()
        self._allowed = 0

    def reductions(
        self, parameters: Sequence[ParameterRecord], topology: Topology
    ) -> Iterable[Reduction]:
        return [Reduction(p, topology.ranks_along("dp")) for p in parameters]

    def launch(self, bucket: FlatBucket, reduction: Hop, group: dist.ProcessGroup) -> Work:
        with self._changed:
            self.events.append(f"launch {bucket.buffer[0]:g}")
            mine = sum(event.startswith("launch") for event in self.events)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._allowed >= mine, timeout=10)
        return Done()

    def note(self, event: str) -> None:
        with self._changed:
            self.events.append(event)

    def allow(self, number: int) -> None:
        with self._changed:
            self._allowed = number
            self._changed.notify_all()

    def wait_for(self, number: int) -> bool:
        """Waits until as many launches have begun."""
        with self._changed:
            return self._changed.wait_for(
                lambda: sum(e.startswith("launch") for e in self.events) >= number, timeout=10
            )


def gated(modules: Mapping[int, nn.Module], **options: Any) -> tuple[Gate, GradientSync]:
    gate = Gate()
    topology = Topology.create(pipeline=1, stage_to_rank=[0] * len(modules))
    sync = GradientSync(modules, topology, handlers=[gate], bucket_bytes=0, **options)
    return gate, sync


@on(TWO)
def order_of_stages() -> Any:
    """Stages become final 0, 2, 1; the plan says 2, 1, 0. Stage k's gradient is k + 1."""
    modules = {s: stage(w=(1,)) for s in range(3)}
    gate, sync = gated(modules, lanes=1)
    sync.prepare()
    for s in (0, 2, 1):
        give(modules[s], w=s + 1.0)
    gate.note("final 0")
    sync.stage_final(0)
    gate.note("final 2")
    sync.stage_final(2)
    begun = gate.wait_for(1)
    gate.note("final 1")
    sync.stage_final(1)
    gate.allow(2)
    begun = gate.wait_for(3) and begun
    gate.note("finish")
    gate.allow(3)
    sync.finish()
    return begun, gate.events


def test_launches_leave_before_finish_in_the_order_of_the_plan(two: list[dict[str, Any]]) -> None:
    events = [
        "final 0", "final 2", "launch 3", "final 1", "launch 2", "launch 1", "finish",
    ]  # fmt: skip
    assert [reply["order_of_stages"] for reply in two] == [(True, events)] * 2


@on(TWO)
def lanes_run_beside_each_other() -> Any:
    """The first launch is held back in its lane; the second leaves in the other."""
    modules = {s: stage(w=(1,)) for s in range(2)}
    gate, sync = gated(modules, lanes=2)
    sync.prepare()
    for s in (1, 0):
        give(modules[s], w=s + 1.0)
        sync.stage_final(s)
    begun = gate.wait_for(2)
    gate.allow(2)
    sync.finish()
    return begun, sorted(gate.events)


def test_one_lane_does_not_hold_up_another(two: list[dict[str, Any]]) -> None:
    right = (True, ["launch 1", "launch 2"])
    assert [reply["lanes_run_beside_each_other"] for reply in two] == [right] * 2


@on(TWO)
def early() -> Any:
    """A chain of three factors: from the second step on, the last leaves inside backward."""
    module = stage(p0=torch.tensor([2.0]), p1=torch.tensor([3.0]), p2=torch.tensor([5.0]))
    gate, sync = gated({0: module}, lanes=1)
    gate.allow(99)
    found: list[Any] = []
    for microbatches in (1, 2, 2):
        sync.prepare()
        seen: list[int] = []
        for microbatch in range(microbatches):
            last = microbatch == microbatches - 1
            hidden = module.get_parameter("p0") * 1.0

            def look(gradient: torch.Tensor, last: bool = last, seen: list[int] = seen) -> None:
                del gradient
                if last and found:
                    gate.wait_for(2)
                seen.append(sum(e.startswith("launch") for e in gate.events))

            hidden.register_hook(look)
            if last:
                sync.stage_last_backward(0)
            (hidden * module.get_parameter("p1") * module.get_parameter("p2")).backward()
        inside = seen[:]
        sync.stage_final(0)
        sync.finish()
        found.append((inside, gate.events[:], sync.statistics().early, grads(module)))
        gate.events.clear()
        module.zero_grad()
    return found


def test_parameters_leave_one_by_one_inside_the_last_backward(two: list[dict[str, Any]]) -> None:
    def launched(factor: int) -> list[str]:
        return [f"launch {factor * g}" for g in (6, 10, 15)]

    def gradients(factor: int) -> dict[str, list[float]]:
        return {"p0": [15.0 * factor], "p1": [10.0 * factor], "p2": [6.0 * factor]}

    for found in (reply["early"] for reply in two):
        assert found[0] == ([0], launched(1), 0, gradients(1))
        for inside, events, number, values in found[1:]:
            assert (events, values) == (launched(2), gradients(2))
            assert inside == [0, 2]  # nothing in the first microbatch; p2 and p1 before p0
            assert number == 3


@on(TWO)
def partial_sums() -> Any:
    """Reentrant checkpointing fires a hook twice: then the end of the stage decides."""
    module = stage(w=torch.tensor([2.0]))
    w = module.get_parameter("w")
    sync = replicated(module)
    found = []
    for _ in range(3):
        sync.prepare()
        sync.stage_last_backward(0)
        inner = checkpoint(lambda x: x * w, w * 1.0, use_reentrant=True)
        (inner + w).backward()
        sync.stage_final(0)
        sync.finish()
        found.append((grads(module), sync.statistics().early))
        module.zero_grad()
    return found


def test_a_partial_sum_does_not_leave(two: list[dict[str, Any]]) -> None:
    """w * w + w has the gradient 2 w + 1 = 5."""
    assert [reply["partial_sums"] for reply in two] == [[({"w": [5.0]}, 0)] * 3] * 2


# --- ranks that disagree


class Optioned(PipelineShared):
    def __init__(self, *, size: int = 1, path: str = "") -> None:
        if path and rank():
            raise FileNotFoundError(f"no such file: {path}")
        self.size = size


class Impure(PipelineShared):
    """Says on each rank that only this rank's process averages."""

    def reductions(
        self, parameters: Sequence[ParameterRecord], topology: Topology
    ) -> Iterable[Reduction]:
        op = "mean" if rank() else "sum"
        return [Reduction(p, topology.ranks_of(p.holders), op) for p in parameters]  # type: ignore[arg-type]


class Raises(PipelineShared):
    def reductions(
        self, parameters: Sequence[ParameterRecord], topology: Topology
    ) -> Iterable[Reduction]:
        if rank():
            raise KeyError("dp")
        return super().reductions(parameters, topology)


class Sharded(GradientHandler):
    def reductions(
        self, parameters: Sequence[ParameterRecord], topology: Topology
    ) -> Iterable[Reduction]:
        ranks = topology.ranks_of((0, 1))
        return [Reduction(p, ranks, "sum", Placement.SHARD) for p in parameters if p.shared]


def table(cls: type, **options: object) -> dict[str, object]:
    return {"name": cls, **options}


@on(TWO)
def disagree() -> Any:
    here = rank()
    cases: dict[str, Mapping[str, Any]] = {
        "handlers": {"handlers": [Optioned] if here else [Optioned, DATA]},
        "options": {"handlers": [table(Optioned, size=here)]},
        "bucket_bytes": {"bucket_bytes": 100 + here},
        "reduce_dtype": {"reduce_dtype": torch.float32 if here else None},
        "lanes": {"lanes": 1 + here},
        "allow_unsynced": {"allow_unsynced": ["x"] * here},
        "stage_ticks": {"stage_ticks": [1, here]},
        "shared": {"shared": [["a"], {0: "b", 1: "b"}] if here else [["a"], ["b"]]},
        "missing file": {"handlers": [table(Optioned, path="groups.toml")]},
        "import": {"handlers": [f"no_module_{here}:Handler"] if here else [SHARED]},
        "no handler": {"handlers": ["pipeline-shred"]},
        "impure": {"handlers": [Impure]},
        "raises": {"handlers": [Raises]},
        "uncovered": {"handlers": [DATA]},
        "shard": {"handlers": [Sharded]},
        "arguments": {"lanes": 2 - 2 * here},
        "not a list": {"shared": None if here else [["a"], ["b"]]},
        "no patterns": {"allow_unsynced": None if here else ()},
        "missing name": {"shared": [["a", "z"]]},
    }
    found = {}
    for name, options in cases.items():
        began = time.monotonic()
        given = {"shared": [["a"], ["b"]], "handlers": [Optioned], "agree_seconds": 5, **options}
        modules = {here: stage(a=(2,), b=(2,))}
        said = outcome(partial(GradientSync, modules, Topology.create(pipeline=2), **given))
        found[name] = (said, time.monotonic() - began)
    module = stage(a=(2 + here,), b=(2,))
    found["shapes"] = (outcome(lambda: tied(module, "a")), 0.0)
    found["copies"] = (outcome(lambda: replicated(module)), 0.0)
    began = time.monotonic()
    if here == 0:  # the other never arrives
        absent = outcome(lambda: tied(stage(a=(1,)), "a", agree_seconds=0.5))
        found["absent"] = (absent, time.monotonic() - began)
    return found


def test_ranks_that_disagree_all_end_with_the_same_error(two: list[dict[str, Any]]) -> None:
    first, second = (reply["disagree"] for reply in two)
    absent, seconds = first.pop("absent")
    assert "AgreementError: GradientSync " in absent
    assert "nothing heard from ranks [1] within 0.5 s" in absent
    assert seconds < 3
    expected = {
        "handlers": ["AgreementError: ranks disagree on handlers", "ranks [0]", "data-parallel"],
        "options": ["AgreementError: ranks disagree on handlers", "'size', '0'", "'size', '1'"],
        "bucket_bytes": ["ranks disagree on bucket_bytes", "ranks [0]: 100", "ranks [1]: 101"],
        "reduce_dtype": ["ranks disagree on reduce_dtype", "None", "torch.float32"],
        "lanes": ["ranks disagree on lanes", "ranks [1]: 2"],
        "allow_unsynced": ["ranks disagree on allow_unsynced"],
        "stage_ticks": ["ranks disagree on stage_ticks"],
        "shared": ["ranks disagree on shared"],
        "missing file": [
            "AgreementError",
            "rank 1: PluginOptionError",
            "no such file: groups.toml",
        ],
        "import": ["AgreementError", "rank 1: PluginLoadError", "no_module_1"],
        "no handler": ["PluginNotFoundError: no plug-in", "'pipeline-shred'", "pipeline-shared"],
        "impure": ["AgreementError: ranks disagree on what the handlers reduce"],
        "raises": ["AgreementError", "rank 1: KeyError: 'dp'"],
        "uncovered": ["PlanError: 'a' on stage 0 and 'a' on stage 1", "pipeline-shared"],
        "shard": ["PlanError", "SHARD", "'0.a'", "only REPLICATE can be run"],
        "arguments": ["AgreementError", "rank 1: PlanError", "lanes=0"],
        "not a list": ["AgreementError", "rank 1: "],
        "no patterns": ["AgreementError", "rank 1: "],
        "missing name": ["PlanError", "no such parameter: ['z']"],
        "shapes": ["PlanError", "shape is (3,) and the other's (2,)"],
        "copies": ["AgreementError: ranks disagree on the parameters of stage 0", "a (3,)"],
    }
    assert list(first) == list(second) == list(expected)
    for name, parts in expected.items():
        said, _ = first[name]
        assert said == second[name][0], name
        assert [part for part in parts if part not in said] == [], name
    assert max(seconds for _, seconds in (*first.values(), *second.values())) < 5


# --- alone


@contextmanager
def closing(sync: GradientSync) -> Iterator[GradientSync]:
    yield sync
    sync.close()


def test_one_process_needs_no_process_group() -> None:
    first, last = stage(w=(2,), b=(2,)), stage(w=(2,))
    topology = Topology.build(axes=(("pp", 1), ("dp", 1)), stage_to_rank=[0, 0])
    with closing(
        GradientSync({0: first, 1: last}, topology, shared=[["w"]], handlers=[PipelineShared])
    ) as sync:
        sync.check_replicas()
        sync.prepare(divisor=2.0)
        give(first, w=2.0)
        give(last, w=4.0)
        sync.stage_final(1)
        sync.stage_final(0)
        sync.finish()
        assert grads(first) == {"w": [3.0, 3.0], "b": None}
        assert sync.clip_grad_norm_(1.0).item() == pytest.approx(math.sqrt(18))
        assert (sync.statistics().steps, sync.statistics().collectives) == (1, 0)


def test_a_tie_that_nobody_declares_is_refused() -> None:
    torch.manual_seed(0)
    weight = torch.randn(8)
    modules = {
        0: stage(emb=weight, a=torch.randn(3)),
        1: stage(head=weight.clone(), b=torch.randn(3)),
    }
    topology = Topology.build(axes=(("pp", 1), ("dp", 1)), stage_to_rank=[0, 0])
    with pytest.raises(PlanError, match=r"{0: 'emb', 1: 'head'}"):
        GradientSync(modules, topology, handlers=[PipelineShared])
    with closing(
        GradientSync(modules, topology, handlers=[PipelineShared], allow_unsynced=["emb"])
    ):
        pass
