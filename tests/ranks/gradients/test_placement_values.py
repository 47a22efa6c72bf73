"""OWNER and SHARD on real ranks: dtypes, optimizers, ways back, and what once went wrong."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from pipegrad import GradientSync, ParameterRecord, Placement
from pipegrad_handlers.sharded import Sharded
from tests.support.gradients.cases import give, in_float32, outcome, rank, stage
from tests.support.gradients.placements import (
    OWNER,
    REPLICATE,
    SHARD,
    By,
    Job,
    alone,
    compute,
    drawn,
    small,
    stepped,
    update,
)
from tests.support.pipeline.schedulers import error
from tests.support.ranked import gathered
from tests.support.rounding import rounding

pytestmark = pytest.mark.ranks(2)
wherever_placed = pytest.mark.parametrize("placed", [OWNER, SHARD, REPLICATE])


def made(module: nn.Module, placed: Placement, **options: Any) -> tuple[GradientSync, Any]:
    """All of a module along "dp", in buckets small enough for several, and SGD."""
    sync = alone(module, By("dp", placed), **{"bucket_bytes": 64, **options})
    return sync, torch.optim.SGD(sync.optimizer_parameters(), lr=1.0)


def joined(sync: GradientSync, key: str) -> list[float]:
    """Puts the parts of a gradient that the ranks step in order; each element once."""
    found = gathered(stepped(sync))
    parts = {begin: part for one in found for k, (begin, part) in one.items() if k == key}
    return [x for begin in sorted(parts) for x in parts[begin].flatten().float().tolist()]


@pytest.mark.smoke
@wherever_placed
def test_dtypes_on_the_wire_of_gradients_and_of_copies(placed: Placement) -> None:
    high = stage(w=(40,))
    sync, _ = made(high, placed, reduce_dtype=torch.bfloat16)
    compute(sync, partial(give, high, w=1 + 2**-9 + rank()))
    rounded = float(torch.tensor(1 + 2**-9).bfloat16() + torch.tensor(2 + 2**-9).bfloat16())
    assert joined(sync, "0.w") == [rounded] * 40 != [3 + 2**-8] * 40
    assert {part.dtype for _, part in stepped(sync).values()} <= {torch.float32}
    if placed is REPLICATE:  # a bucket of 128 bytes, its flag of 2, and what it is padded to
        assert sync.plan.reduced_bytes == 2 * (64 + 1)

    low = in_float32(stage(w=torch.ones(40, dtype=torch.bfloat16)))
    sync, _ = made(low, placed)
    weight = low.get_parameter("w")
    compute(sync, lambda: [(weight * part).sum().backward() for part in (1.0, 2**-9)])
    assert joined(sync, "0.w") == [2 * (1 + 2**-9)] * 40
    assert {part.dtype for _, part in stepped(sync).values()} <= {torch.float32}

    # Steps of 2**-11 are too small for bf16 parameters near 1, eight of them are one spacing.
    kept = stage(w=torch.ones(40, dtype=torch.bfloat16))
    sync, _ = made(kept, placed, master_dtype=torch.float32)
    optimizer = torch.optim.SGD(sync.optimizer_parameters(), lr=2**-12, momentum=0.0)
    values = []
    for _ in range(8):
        compute(sync, partial(give, kept, w=1.0))
        update(sync, optimizer)
        sync.wait_parameters()
        (value,) = kept.get_parameter("w").unique().tolist()
        values.append(value)
    assert (values[0], values[-1]) == (1.0, 1 - 2**-8)
    sizes = {OWNER: [[40], []], SHARD: [[32], [8]], REPLICATE: [[40], [40]]}[placed]
    assert [one.tensor.numel() for one in sync.main_parameters()] == sizes[rank()]
    assert {one.tensor.dtype for one in sync.main_parameters()} <= {torch.float32}
    sync.check_replicas()


@wherever_placed
def test_sparse_gradients_become_dense_and_accumulated_ones_travel_once(placed: Placement) -> None:
    table = nn.Parameter(torch.zeros(4, 2))
    sync, _ = made(stage(table=table), placed)
    rows = torch.tensor([rank(), 3])
    compute(sync, lambda: nn.functional.embedding(rows, table, sparse=True).sum().backward())
    assert joined(sync, "0.table") == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 2.0, 2.0]
    # Accumulated gradients travel once. Gradients of 1, 2, and half of 4 and of 8; then a step that
    # begins anew.
    module = stage(w=(20,), late=(3,))
    sync, optimizer = made(module, placed)
    with sync.accumulate():
        for part in (1.0, 2.0):
            compute(sync, partial(give, module, w=part))
            assert sync.statistics().steps == 0
    compute(sync, partial(give, module, w=4.0, late=8.0), divisor=2.0)
    assert joined(sync, "0.w") == [10.0] * 20
    assert joined(sync, "0.late") == [8.0] * 3
    update(sync, optimizer)
    compute(sync, partial(give, module, w=1.0))
    assert joined(sync, "0.w") == [2.0] * 20
    assert {g for key, (_, g) in stepped(sync).items() if "late" in key} <= {None}
    update(sync, optimizer)
    sync.wait_parameters()
    assert [p.unique().tolist() for p in module.parameters()] == [[-12.0], [-8.0]]


ELEMENTWISE: dict[str, dict[str, Any]] = {
    "ASGD": {}, "Adadelta": {}, "Adagrad": {}, "Adam": {"amsgrad": True},
    "AdamW": {"weight_decay": 0.1}, "Adamax": {}, "NAdam": {}, "RAdam": {}, "RMSprop": {},
    "Rprop": {}, "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
}  # fmt: skip


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_rows_are_stepped_as_the_whole_is(name: str) -> None:
    kind = getattr(torch.optim, name)
    true, module = small(), small()
    optimizer = kind(true.parameters(), lr=0.05, **ELEMENTWISE[name])
    for number in range(3):
        for key in "ab":
            true.get_parameter(key).grad = drawn(0, number)[key] + drawn(1, number)[key]
        optimizer.step()
    sync = alone(module, By("dp", {"a": SHARD, "b": SHARD, "c": OWNER}), bucket_bytes=128)
    sync.check_optimizer(kind)
    optimizer = kind(sync.optimizer_parameters(), lr=0.05, **ELEMENTWISE[name])
    for number in range(3):
        given = drawn(rank(), number)
        compute(sync, partial(give, module, a=given["a"], b=given["b"]))
        update(sync, optimizer)
    sync.wait_parameters()
    for key, p in true.named_parameters():
        found = module.get_parameter(key).detach()
        assert error(found, p.detach()) <= rounding(3 * 10)  # operations of three steps
    assert torch.equal(module.get_parameter("c"), small().get_parameter("c"))
    sync.close()


@wherever_placed
def test_what_is_published_arrives_and_a_copy_that_drifts_is_found(placed: Placement) -> None:
    """A step without an optimizer's step, one whose publish() is forgotten, and an evaluation."""
    module = stage(w=(20,), v=(3,))
    sync, optimizer = made(module, placed)

    def values() -> list[Any]:
        sync.stage_first_use(0)
        return [p.unique().tolist() for p in module.parameters()]

    compute(sync, partial(give, module, w=1.0, v=1.0))
    sync.publish()
    optimizer.zero_grad()
    assert values() == [[0.0], [0.0]]
    compute(sync, partial(give, module, w=1.0, v=1.0))
    optimizer.step()
    optimizer.zero_grad()
    sync.prepare()
    assert values() == [[-2.0], [-2.0]]
    give(module, w=2.0, v=1.0)
    sync.stage_final(0)
    sync.finish()
    optimizer.step()
    sync.publish_if_due()
    sync.publish_if_due()
    assert values() == [[-6.0], [-4.0]]
    sync.check_replicas()
    # A copy that drifts is found and made equal. An element that its own rank did not step is
    # changed on another one.
    job = Job(placed, bucket_bytes=64)
    job.step()
    assert job.arrived == [-2.0]
    if rank() == 1:
        job.module.get_parameter("w").data[0] += 2**-20
    drift = outcome(job.sync.check_replicas)
    assert drift.startswith("DriftError: copies of one parameter have drifted apart")
    assert "'0.w' over ranks [0, 1]" in drift
    job.sync.synchronize_parameters()
    job.sync.check_replicas()
    assert str(job.module.get_parameter("w").unique())[:12] == "tensor([-2.]"


@pytest.mark.parametrize("stored", [None, torch.float64])
@wherever_placed
def test_loaded_values_are_what_is_stepped(placed: Placement, stored: torch.dtype | None) -> None:
    job = Job(placed, master_dtype=stored, bucket_bytes=64)
    for value in (5.0, 7.0):
        job.load(value)
        job.sync.synchronize_parameters()
        job.step()
        assert job.arrived == [value - 2.0]


def test_what_is_placed_by_name_stays_apart() -> None:
    """It is posted when the step begins: without tags of its own, the rows of `b` arrived in it."""
    module = stage(a=(32,), b=(32,))
    handler = By("dp", {"a": OWNER, "b": SHARD})
    sync = alone(module, handler, comm_streams=1, bucket_bytes=0)
    optimizer = torch.optim.SGD(sync.optimizer_parameters())
    for number in (1.0, 2.0):
        compute(sync, partial(give, module, a=number, b=10.0 * number))
        found = {key: part.unique().tolist() for key, (_, part) in stepped(sync).items()}
        right = {"0.a": [2.0 * number], "0.b": [20.0 * number]}
        assert found == (right if rank() == 0 else {"0.b": right["0.b"]})
        optimizer.zero_grad()
    # More flags than elements overwrite no gradient. A row smaller than its bucket's flags had them
    # written over the next row, or past its end.
    empty = {f"e{i}": (0,) for i in range(40)}
    scalars = {f"s{i}": torch.zeros((), dtype=torch.complex128) for i in range(10)}
    module = stage(w=(20,), **empty, **scalars)
    sync = alone(module, Sharded())

    def work() -> None:
        give(module, w=torch.arange(20.0))
        for i in range(9):
            (module.get_parameter(f"s{i}") * torch.tensor(1.0 + i)).real.backward()

    compute(sync, work)
    assert joined(sync, "0.w") == list(range(20))
    found = {key: g for one in gathered(stepped(sync)) for key, (_, g) in one.items()}
    assert [found[f"0.s{i}"].real.tolist() for i in range(9)] == [[1.0 + i] for i in range(9)]
    assert found["0.s9"] is None
    # All ranks have the same parameter groups. Rank 1 steps rows of `w` alone: its group of `b` and
    # `c` is empty, and stays in its place.
    module = stage(b=(3,), w=(40, 2), c=(3,), frozen=nn.Parameter(torch.ones(2), False))
    sync = alone(module, By("dp", {"b": OWNER, "w": SHARD, "c": OWNER}))

    def group_of(record: ParameterRecord) -> dict[str, Any]:
        return {"lr": 0.5, "weight_decay": 0.0} if record.name in "bc" else {"weight_decay": 0.1}

    asked = sync.optimizer_parameters(group_of)
    owned, rows = ([(3,), (3,)], [(48,)]) if rank() == 0 else ([], [(32,)])
    assert [{**g, "params": [tuple(p.shape) for p in g["params"]]} for g in asked] == [
        {"params": owned, "lr": 0.5, "weight_decay": 0.0},
        {"params": rows, "weight_decay": 0.1},
    ]
    adamw = torch.optim.AdamW(asked, lr=0.25)
    compute(sync, partial(give, module, b=1.0, w=1.0, c=-1.0))
    update(sync, adamw)
    sync.wait_parameters()
    values = {n: round(p.unique().item(), 4) for n, p in module.named_parameters()}
    assert values == {"b": -0.5, "w": -0.25, "c": 0.5, "frozen": 1.0}
    assert [len(group["params"]) for group in sync.optimizer_parameters()] == [3 - 2 * rank()]
