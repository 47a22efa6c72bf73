"""Sums in a wider dtype than that of the wire: each is rounded once, and sent narrow."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from pipegrad import GradientSync, MainGrad, Placement
from pipegrad.comm import collectives
from pipegrad_handlers.data_parallel import DataParallel
from tests.support.gradients.cases import bits, give, grads, in_float32, outcome, rank, stage
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
from tests.support.pairwise import pairwise
from tests.support.ranked import gathered

WIDE: dict[str, Any] = {"sum_dtype": torch.float32}
SIZES = {"large": 70_001, "few": 3, "one": 1, "none": 0}
WIRES = (torch.bfloat16, torch.float16)
either_way = pytest.mark.parametrize("placed", [REPLICATE, SHARD])


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


def reduced(dtype: torch.dtype, value: Any, *, placed: Any, op: Any = "sum", **options: Any) -> Any:
    """Key -> (first element, gradient) of what this rank steps, of 64 elements."""
    module = stage(w=torch.zeros(64, dtype=dtype))
    sync = alone(module, By("dp", placed, op), **{**WIDE, **options})
    compute(sync, partial(give, module, w=value))
    return stepped(sync)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "row",
    pairwise((REPLICATE, SHARD), ("sum", "mean"), WIRES, (2**23, 1000), ("gloo", "others")),
    ids=str,
)
def test_each_sum_is_rounded_once(row: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other backends, as NCCL, exchange whole shards; here on gloo."""
    placed, op, dtype, piece_bytes, backend = row
    monkeypatch.setattr(collectives, "_PIECE_BYTES", piece_bytes)
    if backend == "others":
        monkeypatch.setattr(collectives, "is_gloo", lambda *_: False)
    module = stage(**{name: torch.zeros(n, dtype=dtype) for name, n in SIZES.items()})
    sync = alone(module, By("dp", placed, op), **WIDE)
    optimizer = torch.optim.SGD(sync.optimizer_parameters(), lr=0.0)
    mine = {name: gradient_of(rank(), name, dtype) for name in SIZES}
    compute(sync, partial(give, module, **mine))
    update(sync, optimizer)
    compute(sync, partial(give, module, **mine))  # in the same memory
    for key, (begin, part) in stepped(sync).items():
        right = expected(key.removeprefix("0."), dtype, op)[begin : begin + part.numel()]
        assert torch.equal(part.flatten().float(), right.float()), key


@pytest.mark.ranks(4)
def test_wide_sums_go_with_halves_dimensions_and_main_grad_or_are_refused() -> None:
    value = torch.full((64,), 60_000.0 + 32 * rank()).half()
    [(_, part)] = reduced(torch.float16, value, placed=REPLICATE, op="mean").values()
    assert part.unique().tolist() == [60_032.0]  # 60,048, to even
    # Two dimensions. Shards of a mean, averaged over an outer dimension: each of the two is rounded
    # once.
    module = stage(w=torch.zeros(64, dtype=torch.bfloat16))
    handlers = [By("dp", SHARD, "mean"), By("outer", REPLICATE, "sum")]
    sync = GradientSync({0: module}, mesh(dp=2, outer=2), handlers=handlers, **WIDE)
    compute(sync, partial(give, module, w=1 + 2.0**-7 * (rank() % 2)))
    [(_, part)] = stepped(sync).values()
    assert part.unique().tolist() == [float(2 * torch.tensor(1 + 2.0**-8).bfloat16())]
    # With main grad.
    module = stage(w=torch.zeros(40, dtype=torch.bfloat16))
    options: dict[str, Any] = {"accessor": MainGrad(), "reduce_dtype": torch.bfloat16, **WIDE}
    sync = alone(module, By("dp", REPLICATE, "sum"), **options)
    compute(sync, partial(give, module, w=1.0 + rank()))
    main_grad = getattr(module.get_parameter("w"), "main_grad")  # noqa: B009
    assert bits(main_grad) == bits(torch.full((40,), 10.0))
    # What cannot add in a wider dtype is refused.
    low = torch.zeros(40, dtype=torch.bfloat16)
    hooked = DataParallel(hook="fp16_compress_hook")
    for handler, dtype, words in (
        (hooked, torch.float32, "reduces 0.w by a communication hook"),
        (By("dp", OWNER), torch.float32, "along a chain of 4 ranks"),
        ("data-parallel", "float32", "PlanError: sum_dtype is 'float32', expected one of floats"),
    ):
        assert words in outcome(lambda: alone(stage(w=low), handler, sum_dtype=dtype))  # noqa: B023


@pytest.mark.ranks(4)
@either_way
def test_complex_numbers_and_wire_bytes(placed: Placement, monkeypatch: pytest.MonkeyPatch) -> None:
    module = stage(w=torch.zeros(64, dtype=torch.complex64))
    sync = alone(module, By("dp", placed, "mean"), sum_dtype=torch.float64)
    total = (module.get_parameter("w") * (1 + rank() * (1 + 2j))).sum()
    compute(sync, partial(total.backward, torch.ones((), dtype=total.dtype)))
    [(_, part)] = stepped(sync).values()
    assert set(part.tolist()) == {2.5 - 3j}
    # The bytes are those of the wire. A ring's 2 * 3/4 of bf16 for an all-reduce, half of it for a
    # reduce-scatter; and the flag.
    sent, isend = [], dist.isend

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor.nbytes)
        return isend(tensor, *args, **kwargs)

    module = stage(w=(2**16,))
    sync = alone(module, By("dp", placed, "mean"), reduce_dtype=torch.bfloat16, **WIDE)
    monkeypatch.setattr(dist, "isend", counted)
    compute(sync, partial(give, module, w=1.0))
    shards = 3 * (2**16 // 4) * 2
    # The flag, and the one element that four ranks cannot share, go to each other rank.
    assert sum(sent) == (2 if placed is REPLICATE else 1) * shards + 3 * 2
    [(_, part)] = stepped(sync).values()
    assert (part.dtype, part.unique().tolist()) == (torch.float32, [1.0])


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("dtype", "placed", "chosen"),
    [
        (torch.float32, REPLICATE, torch.float32),
        (torch.bfloat16, OWNER, torch.float32),  # a chain of two ranks
        (torch.float32, SHARD, torch.bfloat16),
    ],
)
def test_without_effect(dtype: torch.dtype, placed: Placement, chosen: torch.dtype) -> None:
    found = reduced(dtype, 1.0 + rank(), placed=placed, sum_dtype=chosen)
    has = placed is not OWNER or rank() == 0
    assert [part.unique().tolist() for _, part in found.values()] == [[3.0]] * has


@pytest.mark.parametrize("dtype", WIRES)
def test_a_wide_sum_may_be_written_over_one_of_its_parts(dtype: torch.dtype) -> None:
    parts = [torch.tensor([2.0**-9, 1.0], dtype=dtype) for _ in range(4)]
    collectives.WideSum(torch.float32, 2.0).write(iter(parts), parts[2])
    assert parts[2].tolist() == [2.0**-8, 2.0]


# float16: means that are finite stay finite, as those of DistributedDataParallel do.


LARGE = 4e4  # two of them are more than float16 has


def half(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float16)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("placement", [REPLICATE, OWNER, SHARD])
def test_means_do_not_overflow(placement: Placement) -> None:
    module = stage(w=half(40), unused=half(3))
    sync = alone(module, By("dp", placement, "mean"))
    compute(sync, lambda: give(module, w=LARGE))
    gradients = {key: gradient for key, (_, gradient) in stepped(sync).items()}
    assert "0.w" not in gradients or (gradients["0.w"] == LARGE).all()
    assert gradients.get("0.unused") is None
    assert {key for keys in gathered(list(gradients)) for key in keys} == {"0.w", "0.unused"}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("placed", [REPLICATE, OWNER, SHARD])
def test_gradients_of_bf16_that_accumulate_in_fp32_travel_so(placed: Placement) -> None:
    module = in_float32(stage(w=torch.ones(40, dtype=torch.bfloat16)))
    weight, sync = module.get_parameter("w"), alone(module, By("dp", placed))
    compute(sync, lambda: [(weight * part).sum().backward() for part in (1.0, 2**-9)])
    parts = [part for _, part in stepped(sync).values()]
    assert {(part.dtype, x) for part in parts for x in part.tolist()} <= {
        (torch.float32, 2 * (1 + 2**-9))
    }
    assert sum(gathered(sum(map(len, parts)))) == (80 if placed is REPLICATE else 40)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("placed", [REPLICATE, OWNER, SHARD])
def test_a_wire_of_bf16_rounds_and_master_copies_add_small_steps(placed: Placement) -> None:
    high = stage(w=(40,))
    sync = alone(high, By("dp", placed), reduce_dtype=torch.bfloat16)
    compute(sync, partial(give, high, w=1 + 2**-9 + rank()))
    rounded = float(torch.tensor(1 + 2**-9).bfloat16() + torch.tensor(2 + 2**-9).bfloat16())
    parts = [part for _, part in stepped(sync).values()]
    assert {(part.dtype, x) for part in parts for x in part.tolist()} <= {(torch.float32, rounded)}
    assert rounded != 3 + 2**-8
    # Steps of 2**-11 are too small for bf16 parameters near 1, eight of them are one spacing.
    low = stage(w=torch.ones(40, dtype=torch.bfloat16))
    sync = alone(low, By("dp", placed), master_dtype=torch.float32)
    optimizer, values = torch.optim.SGD(sync.optimizer_parameters(), lr=2**-12), list[float]()
    for _ in range(8):
        compute(sync, partial(give, low, w=1.0))
        update(sync, optimizer)
        sync.wait_parameters()
        values += low.get_parameter("w").unique().tolist()
    assert (len(values), values[0], values[-1]) == (8, 1.0, 1 - 2**-8)
    assert {main.tensor.dtype for main in sync.main_parameters()} <= {torch.float32}
    sync.check_replicas()


@pytest.mark.ranks(2)
def test_means_have_the_bits_of_ddp() -> None:
    drawn = torch.Generator().manual_seed(rank())
    gradient = torch.randn(64, generator=drawn).half() * torch.logspace(-7, 4, 64).half()
    ours, theirs = stage(w=half(64)), stage(w=half(64))
    theirs.forward = lambda g: (theirs.get_parameter("w") * g).sum()
    compute(alone(ours, By("dp", REPLICATE, "mean")), lambda: give(ours, w=gradient))
    wrapped = DistributedDataParallel(theirs)  # which reduces while it is there
    wrapped(gradient).backward()
    assert grads(ours) == grads(theirs)
