"""Sums in a wider dtype than that of the wire: each is rounded once, and sent narrow."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipegrad import GradientSync, MainGrad, Placement
from pipegrad.comm import messages, shard_sums
from pipegrad_handlers.data_parallel import DataParallel
from tests.support.gradients.cases import Case, bits, give, on, outcome, rank, replies, stage
from tests.support.gradients.placements import (
    OWNER,
    REPLICATE,
    SHARD,
    By,
    alone,
    compute,
    mesh,
    stepped,
    update,
)

TWO: list[Case] = []
FOUR: list[Case] = []


two = replies(2, TWO)
four = replies(4, FOUR)

WIDE = {"sum_dtype": torch.float32}
SIZES = {"large": 70_001, "few": 3, "one": 1, "none": 0}
WIRES = (torch.bfloat16, torch.float16)


def gradient_of(rank: int, name: str, dtype: torch.dtype) -> torch.Tensor:
    """The gradient of a rank: values of many sizes, so that a narrow sum rounds often."""
    generator = torch.Generator().manual_seed(100 * rank + len(name))
    values = torch.randn(SIZES[name], generator=generator)
    return (values * 2.0 ** torch.randint(-4, 4, values.shape, generator=generator)).to(dtype)


def expected(name: str, dtype: torch.dtype, op: str) -> torch.Tensor:
    """What one process computes: the sum in float32, divided, and then rounded."""
    parts = [gradient_of(r, name, dtype).float() for r in range(4)]
    total = parts[0] + parts[1] + parts[2] + parts[3]
    return (total / (4 if op == "mean" else 1)).to(dtype)


def reduced(placed: Placement, op: Any, dtype: torch.dtype, **options: Any) -> dict[str, Any]:
    """Name -> (first element, gradient) of what this rank steps."""
    module = stage(**{name: torch.zeros(n, dtype=dtype) for name, n in SIZES.items()})
    sync = alone(module, By("dp", placed, op), **WIDE, **options)
    mine = {name: gradient_of(rank(), name, dtype) for name in SIZES}
    optimizer = torch.optim.SGD(sync.optimizer_parameters(), lr=0.0)
    compute(sync, lambda: give(module, **mine))
    update(sync, optimizer)
    compute(sync, lambda: give(module, **mine))  # in the same memory
    return {one.record.name: (one.begin, one.tensor.grad) for one in sync.main_parameters()}


def wrong_elements(found: dict[str, Any], dtype: torch.dtype, op: str) -> dict[str, int]:
    """Name -> number of elements that do not have the bits of one process."""
    wrong = {}
    for name, (begin, part) in found.items():
        right = expected(name, dtype, op)[begin : begin + part.numel()]
        wrong[name] = int((part.flatten().float() != right.float()).sum())
    return wrong


@on(FOUR)
def rounded_once() -> Any:
    return {
        f"{placed.value} {op} {dtype} {pieces}": wrong_elements(found, dtype, op)
        for placed in (REPLICATE, SHARD)
        for op in ("sum", "mean")
        for dtype in WIRES
        for pieces in (2**23, 1000)
        if (found := _in_pieces(pieces, lambda: reduced(placed, op, dtype)))  # noqa: B023
    }


def _in_pieces(nbytes: int, function: Any) -> Any:
    with mock.patch.object(shard_sums, "_PIECE_BYTES", nbytes):
        return function()


def test_each_sum_is_rounded_once(four: list[dict[str, Any]]) -> None:
    for reply in four:
        cases = reply["rounded_once"]
        assert len(cases) == 16
        assert {sum(wrong.values()) for wrong in cases.values()} == {0}


def test_a_narrow_sum_would_round_otherwise() -> None:
    """What the tests above compare with differs from sums in the dtype of the wire."""
    for dtype in WIRES:
        parts = [gradient_of(r, "large", dtype) for r in range(4)]
        narrow = parts[0] + parts[1] + parts[2] + parts[3]
        assert int((narrow != expected("large", dtype, "sum")).sum()) > 1000


@on(FOUR)
def other_backends() -> Any:
    """The way of NCCL, which exchanges whole shards, on gloo."""
    with mock.patch.object(messages, "is_gloo", return_value=False):
        return {
            f"{placed.value} {op}": wrong_elements(
                reduced(placed, op, torch.bfloat16), torch.bfloat16, op
            )
            for placed in (REPLICATE, SHARD)
            for op in ("sum", "mean")
        }


def test_other_backends_have_the_same_bits(four: list[dict[str, Any]]) -> None:
    for reply in four:
        assert {sum(wrong.values()) for wrong in reply["other_backends"].values()} == {0}


@on(FOUR)
def on_the_wire() -> Any:
    """Bytes that this rank sends for a gradient of 2**16 elements of float32, by options."""
    sent = []

    def isend(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor.nbytes)
        return real(tensor, *args, **kwargs)

    real, found = dist.isend, {}
    for placed in (REPLICATE, SHARD):
        module = stage(w=(2**16,))
        options = {"reduce_dtype": torch.bfloat16, **WIDE}
        sync = alone(module, By("dp", placed, "mean"), **options)
        sent.clear()
        with mock.patch.object(dist, "isend", isend):
            compute(sync, lambda: give(module, w=1.0))  # noqa: B023
        parts = [part for _, part in stepped(sync).values()]
        found[placed.value] = (sum(sent), [(part.dtype, part.unique().tolist()) for part in parts])
    return found


def test_the_bytes_are_those_of_the_wire(four: list[dict[str, Any]]) -> None:
    """A ring's 2 * 3/4 of bf16 for an all-reduce, half of it for a reduce-scatter; and the flag."""
    shards = 3 * (2**16 // 4) * 2
    for reply in four:
        found = reply["on_the_wire"]
        # The flag, and the one element that four ranks cannot share, go to each other rank.
        assert found["replicate"] == (2 * shards + 3 * 2, [(torch.float32, [1.0])])
        assert found["shard"] == (shards + 3 * 2, [(torch.float32, [1.0])])


@on(FOUR)
def large_halves() -> Any:
    module = stage(w=torch.zeros(40, dtype=torch.float16))
    sync = alone(module, By("dp", REPLICATE, "mean"), **WIDE)
    compute(sync, lambda: give(module, w=torch.full((40,), 60_000.0 + 32 * rank()).half()))
    gradient = module.get_parameter("w").grad
    assert gradient is not None
    return gradient.unique().tolist()


def test_a_mean_of_float16_does_not_overflow(four: list[dict[str, Any]]) -> None:
    assert [reply["large_halves"] for reply in four] == [[60_032.0]] * 4  # 60,048, to even


@on(FOUR)
def two_dimensions() -> Any:
    """Shards of a mean, averaged over an outer dimension: each of the two is rounded once."""
    topology = mesh(dp=2, outer=2)
    module = stage(w=torch.zeros(64, dtype=torch.bfloat16))
    handlers = [By("dp", SHARD, "mean"), By("outer", REPLICATE, "sum")]
    sync = GradientSync({0: module}, topology, handlers=handlers, sum_dtype=torch.float32)
    compute(sync, lambda: give(module, w=1 + 2.0**-7 * (rank() % 2)))
    return [part.unique().tolist() for _, part in stepped(sync).values()]


def test_two_dimensions(four: list[dict[str, Any]]) -> None:
    right = float(2 * torch.tensor(1 + 2.0**-8).bfloat16())
    assert [reply["two_dimensions"] for reply in four] == [[[right]]] * 4


@on(FOUR)
def accumulated_in_main_grad() -> Any:
    module = stage(w=torch.zeros(40, dtype=torch.bfloat16))
    options: dict[str, Any] = {"accessor": MainGrad(), "reduce_dtype": torch.bfloat16, **WIDE}
    sync = alone(module, By("dp", REPLICATE, "sum"), **options)
    compute(sync, lambda: give(module, w=1.0 + rank()))
    return bits(getattr(module.get_parameter("w"), "main_grad"))[:2]  # noqa: B009


def test_with_main_grad(four: list[dict[str, Any]]) -> None:
    right = bits(torch.tensor([10.0, 10.0]))
    assert [reply["accumulated_in_main_grad"] for reply in four] == [right] * 4


@on(FOUR)
def refused() -> Any:
    low = torch.zeros(40, dtype=torch.bfloat16)
    mixed = (None, torch.float32)[rank() % 2]
    return [
        outcome(lambda: alone(stage(w=low), DataParallel(hook="fp16_compress_hook"), **WIDE)),
        outcome(lambda: alone(stage(w=low), By("dp", OWNER), **WIDE)),
        outcome(lambda: alone(stage(w=low), "data-parallel", sum_dtype=torch.int32)),
        outcome(lambda: alone(stage(w=low), "data-parallel", sum_dtype="float32")),
        outcome(lambda: alone(stage(w=low), "data-parallel", sum_dtype=mixed)),
    ]


def test_what_cannot_add_in_a_wider_dtype_is_refused(four: list[dict[str, Any]]) -> None:
    for reply in four:
        hooked, chained, integer, text, differing = reply["refused"]
        assert "reduces 0.w by a communication hook" in hooked
        assert "along a chain of 4 ranks" in chained
        assert "PlanError: sum_dtype is torch.int32, expected one of floats" in integer
        assert "PlanError: sum_dtype is 'float32', expected one of floats" in text
        assert "ranks disagree on sum_dtype" in differing


@on(FOUR)
def complex_numbers() -> Any:
    found = []
    for placed in (REPLICATE, SHARD):
        module = stage(w=torch.zeros(64, dtype=torch.complex64))
        sync = alone(module, By("dp", placed, "mean"), sum_dtype=torch.float64)
        compute(sync, lambda: give_complex(module, 1 + rank() * (1 + 2j)))  # noqa: B023
        found.append([sorted(set(part.tolist()), key=abs) for _, part in stepped(sync).values()])
    return found


def give_complex(module: nn.Module, value: complex) -> None:
    parameter = module.get_parameter("w")
    (parameter * value).sum().backward(torch.ones((), dtype=parameter.dtype))


def test_complex_numbers(four: list[dict[str, Any]]) -> None:
    for reply in four:
        assert reply["complex_numbers"] == [[[2.5 - 3j]], [[2.5 - 3j]]]


@on(TWO)
def without_effect() -> Any:
    """Gradients of float32 on a wire of float32, a chain of two ranks, and a narrower dtype."""
    found = []
    for dtype, placed, chosen in (
        (torch.float32, REPLICATE, torch.float32),
        (torch.bfloat16, OWNER, torch.float32),
        (torch.float32, SHARD, torch.bfloat16),
    ):
        module = stage(w=torch.zeros(40, dtype=dtype))
        sync = alone(module, By("dp", placed), sum_dtype=chosen)
        compute(sync, lambda: give(module, w=1.0 + rank()))  # noqa: B023
        found.append([part.unique().tolist() for _, part in stepped(sync).values()])
    return found


def test_without_effect(two: list[dict[str, Any]]) -> None:
    assert two[0]["without_effect"] == [[[3.0]]] * 3
    assert two[1]["without_effect"] == [[[3.0]], [], [[3.0]]]


@pytest.mark.parametrize("dtype", WIRES)
def test_a_wide_sum_may_be_written_over_one_of_its_parts(dtype: torch.dtype) -> None:
    parts = [torch.tensor([2.0**-9, 1.0], dtype=dtype) for _ in range(4)]
    shard_sums.WideSum(torch.float32, 2.0).write(iter(parts), parts[2])
    assert parts[2].tolist() == [2.0**-8, 2.0]
