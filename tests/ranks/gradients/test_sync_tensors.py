"""GradientSync and tensors: views, layouts, dtypes, norms, replicas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from pipegrad import (
    GradientHandler,
    make_plan,
)
from pipegrad.gradients.norm import global_norm
from pipegrad.plan.options import GradientOptions
from pipegrad_handlers.data_parallel import DataParallel
from pipegrad_handlers.pipeline_shared import PipelineShared
from tests.support.gradients.cases import (
    SHARED,
    Case,
    NewStorage,
    bits,
    give,
    grads,
    in_float32,
    on,
    outcome,
    rank,
    replies,
    stage,
    step,
    tied,
)
from tests.support.rounding import rounding

TWO: list[Case] = []
FOUR: list[Case] = []


two = replies(2, TWO)
four = replies(4, FOUR)


@on(TWO)
def steady() -> Any:
    torch.manual_seed(0)
    last = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    module = stage(a=(7,), image=last, t=torch.zeros(3, 5).t(), s=(), e=(0, 3), own=(4,))
    sync = tied(module, "a", "image", "t", "s", "e")
    strides: dict[str, tuple[int, ...]] = {}
    found: dict[str, list[Any]] = {"pointers": [], "bytes": [], "copies": [], "early": []}
    for number in range(7):
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
        # After zeroing in place one read of the bucket: its least and largest value, and a bool.
        # The second step and the fourth compare copies.
        assert found["bytes"][2] == 17
        assert found["bytes"][4:] == [17, 0, 17]
        assert found["copies"] == [0] * 7
        # "own" is on one rank alone, so nobody reduces it.
        assert found["early"] == [0] + [5] * 6


@on(TWO)
def shapes() -> Any:
    """Strided, 0-d, empty and sparse gradients; create_graph; the empty alone in its bucket."""
    table = nn.Parameter(torch.zeros(4, 2))
    module = stage(
        t=torch.zeros(2, 3).t(), s=(), e=(0, 3), table=table, gaps=torch.zeros(2, 6)[:, ::2]
    )
    ties = list(dict(module.named_parameters()))
    found = []
    for options in ({}, {"bucket_bytes": 0, "comm_streams": 3}, {"reduce_dtype": torch.float64}):
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
            assert norm == pytest.approx(math.sqrt(squares), rel=rounding(20))
            assert (graph, dense) == (False, True)


@on(TWO)
def replaced() -> Any:
    """Parameters are looked up anew in every step."""
    module = stage(a=torch.zeros(2, dtype=torch.bfloat16), b=(1,))
    found = []
    sync = tied(module, "a", "b")
    for is_high in (False, True):
        sync = tied(in_float32(module) if is_high else module, "a", "b")
        step(sync, module, a=1.0, b=1.0)
        module.a = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        if is_high:
            in_float32(module)
        module.zero_grad()
        found.append(step(sync, module, a=2.0, b=2.0))
        kept = sync.records()[0]
        assert sync.parameter(kept) is module.a
        module.zero_grad()
    module.a = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    in_float32(module)
    said = [outcome(sync.prepare)]
    module.a = nn.Parameter(torch.ones(2))
    said += [outcome(sync.prepare)]
    module.a = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    in_float32(module)
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
    module = in_float32(stage(low=low, high=torch.zeros(300)))
    sync = tied(module, "low", "high")
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
            assert value == pytest.approx(norms[name], rel=rounding(20))
            assert (same, single) == (four[0]["clipped"][0][name][1], True)
            assert gradients["tie"] == pytest.approx([tie * factors[name]] * 4, rel=rounding(20))
            assert gradients["own"] == pytest.approx([local * factors[name]] * 4, rel=rounding(20))
    assert [reply["clipped"][0]["two"][2]["tie"] for reply in four] == [
        four[0]["clipped"][0]["two"][2]["tie"]
    ] * 4


@on(FOUR)
def replicas() -> Any:
    """All ranks begin with other values, but in the tie; then one bit of one copy flips."""
    torch.manual_seed(0)
    tie = torch.randn(5)
    torch.manual_seed(rank())
    counts = nn.Parameter(torch.full((2,), rank()), requires_grad=False)
    module = stage(tie=tie, own=torch.randn(3), empty=(0,), counts=counts)
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
    assert text.startswith("DriftError: copies of one parameter have drifted apart")
    tie = "'0.tie' on ranks [3], of the copies on ranks [0, 1, 2, 3]"
    assert f": '0.own' over ranks [0, 1]; {tie}. " in text
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
    sync = tied(module, "tie", comm_streams=1)
    found = step(sync, module, tie=float(10 ** rank()), own=float(rank()))
    handlers: list[tuple[str, GradientHandler]] = [
        (SHARED, PipelineShared()),
        ("pipegrad_handlers.data_parallel:DataParallel", DataParallel()),
    ]
    plans = [
        make_plan(sync.manifest, sync.topology.at(r), handlers, GradientOptions(comm_streams=1))
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


def test_the_norm_of_float64_gradients_and_of_mixed_ones() -> None:
    gradients = [torch.full((4,), 3.0, dtype=dtype) for dtype in (torch.float64, torch.bfloat16)]
    for number in (1, 2):
        norm = global_norm(gradients[:number], 2.0, group=None, device=torch.device("cpu"))
        assert norm.dtype == torch.float32
        assert norm.item() == pytest.approx(6.0 * number**0.5)
