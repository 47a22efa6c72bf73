"""OWNER and SHARD on real ranks: dtypes, optimizers, ways back, and what once went wrong."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from pipegrad import GradientSync, ParameterRecord, Placement
from pipegrad_handlers.sharded import Sharded
from tests.support.gradients.cases import (
    Case,
    bits,
    give,
    in_float32,
    on,
    outcome,
    rank,
    replies,
    stage,
)
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
from tests.support.pipeline.schedulers import error
from tests.support.rounding import rounding

TWO: list[Case] = []
FOUR: list[Case] = []


two = replies(2, TWO)
four = replies(4, FOUR)


# --- dtypes, layouts, accumulation


PLACES = (OWNER, SHARD, REPLICATE)


def rows(module: nn.Module, placed: Placement, **options: Any) -> GradientSync:
    """All of a module along "dp"; buckets small enough for several."""
    return alone(module, By("dp", placed), **{"bucket_bytes": 64, **options})


def joined(found: list[dict[str, Any]], key: str) -> list[float]:
    """Puts the parts of a gradient that the ranks stepped in order; each element once."""
    parts = {begin: part for one in found for k, (begin, part) in one.items() if k == key}
    return [x for begin in sorted(parts) for x in parts[begin].float().tolist()]


def give_both(module: nn.Module, *parts: float) -> None:
    for part in parts:
        give(module, w=part)


@on(TWO)
def dtypes() -> Any:
    """Wires of bf16, gradients of fp32, copies of fp32, for parameters of bf16."""
    found: dict[str, Any] = {}
    for placed in PLACES:
        high = stage(w=(40,))
        sync = rows(high, placed, reduce_dtype=torch.bfloat16)
        compute(sync, partial(give, high, w=1 + 2**-9 + rank()))
        wire = (stepped(sync), sync.plan.reduced_bytes)
        low = stage(w=torch.ones(40, dtype=torch.bfloat16))
        sync = rows(in_float32(low), placed)
        compute(sync, partial(give_both, low, 1.0, 2**-9))
        single = stepped(sync)
        kept = stage(w=torch.ones(40, dtype=torch.bfloat16))
        sync = rows(kept, placed, master_dtype=torch.float32)
        optimizer = torch.optim.SGD(sync.optimizer_parameters(), lr=2**-12, momentum=0.0)
        values = []
        for _ in range(8):
            compute(sync, partial(give, kept, w=1.0))
            update(sync, optimizer)
            sync.wait_parameters()
            values.append(kept.get_parameter("w").unique().tolist())
        stored = [(str(one.tensor.dtype), one.tensor.numel()) for one in sync.main_parameters()]
        found[placed.value] = (wire, single, values, stored, outcome(sync.check_replicas))
    return found


def test_dtypes_on_the_wire_of_gradients_and_of_copies(two: list[dict[str, Any]]) -> None:
    """Steps of 2**-11 are too small for bf16 parameters near 1, eight of them are one spacing."""
    for placed in ("owner", "shard", "replicate"):
        found = [reply["dtypes"][placed] for reply in two]
        rounded = float(torch.tensor(1 + 2**-9).bfloat16() + torch.tensor(2 + 2**-9).bfloat16())
        wires = [wire for (wire, _), *_ in found]
        assert joined(wires, "0.w") == [rounded] * 40 != [3 + 2**-8] * 40
        assert {part.dtype for wire in wires for _, part in wire.values()} == {torch.float32}
        singles = [single for _, single, *_ in found]
        assert joined(singles, "0.w") == [2 * (1 + 2**-9)] * 40
        assert {part.dtype for one in singles for _, part in one.values()} == {torch.float32}
        for _, _, values, _, drift in found:
            assert values[0] == [1.0]
            assert values[-1] == [1 - 2**-8]
            assert all(len(value) == 1 for value in values)
            assert drift == "None"
        sizes = {"owner": [[40], []], "shard": [[32], [8]], "replicate": [[40], [40]]}[placed]
        assert [[n for _, n in stored] for *_, stored, _ in found] == sizes
        assert {dtype for *_, stored, _ in found for dtype, _ in stored} == {"torch.float32"}
    # A bucket of 128 bytes, its flag of 2, and what it is padded to.
    assert two[0]["dtypes"]["replicate"][0][1] == 2 * (64 + 1)


@on(TWO)
def sparse() -> Any:
    found = {}
    for placed in PLACES:
        table = nn.Parameter(torch.zeros(4, 2))
        sync = rows(stage(table=table), placed)

        def look(table: nn.Parameter = table) -> None:
            nn.functional.embedding(torch.tensor([rank(), 3]), table, sparse=True).sum().backward()

        compute(sync, look)
        found[placed.value] = stepped(sync)
    return found


def test_sparse_gradients_become_dense(two: list[dict[str, Any]]) -> None:
    right = [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 2.0, 2.0]
    for placed in ("owner", "shard", "replicate"):
        found = [{k: (b, g.flatten()) for k, (b, g) in r["sparse"][placed].items()} for r in two]
        assert joined(found, "0.table") == right


@on(TWO)
def accumulated() -> Any:
    """Gradients of 1, 2, and half of 4 and of 8; then a step that begins anew."""
    found = []
    for placed in PLACES:
        module = stage(w=(20,), late=(3,))
        sync = rows(module, placed)
        optimizer = torch.optim.SGD(sync.optimizer_parameters(), lr=1.0)
        quiet = []
        with sync.accumulate():
            for part in (1.0, 2.0):
                compute(sync, partial(give, module, w=part))
                quiet.append((sync.statistics().steps, [g for _, g in stepped(sync).values()][1:]))
        sync.prepare(divisor=2.0)
        give(module, w=4.0, late=8.0)
        sync.stage_final(0)
        sync.finish()
        sums = stepped(sync)
        update(sync, optimizer)
        compute(sync, partial(give, module, w=1.0))
        again = stepped(sync)
        update(sync, optimizer)
        sync.wait_parameters()
        values = [module.get_parameter(name).unique().tolist() for name in ("w", "late")]
        found.append(([steps for steps, _ in quiet], sums, again, values))
    return found


def test_accumulated_gradients_travel_once(two: list[dict[str, Any]]) -> None:
    for found in zip(*(reply["accumulated"] for reply in two), strict=True):
        sums, again = [one[1] for one in found], [one[2] for one in found]
        assert joined(sums, "0.w") == [10.0] * 20
        assert joined(sums, "0.late") == [8.0] * 3
        assert joined(again, "0.w") == [2.0] * 20
        assert all(
            gradient is None for one in again for k, (_, gradient) in one.items() if "late" in k
        )
        assert [(steps, values) for steps, _, _, values in found] == [
            ([0, 0], [[-12.0], [-8.0]])
        ] * 2


# --- the optimizer

ELEMENTWISE: dict[str, dict[str, Any]] = {
    "ASGD": {}, "Adadelta": {}, "Adagrad": {}, "Adam": {"amsgrad": True},
    "AdamW": {"weight_decay": 0.1}, "Adamax": {}, "NAdam": {}, "RAdam": {}, "RMSprop": {},
    "Rprop": {}, "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
}  # fmt: skip


def small() -> nn.Module:
    torch.manual_seed(5)
    return stage(a=torch.randn(5, 3), b=torch.randn(67), never=torch.randn(3))


def noise(name: str, at: int, number: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(1000 * at + 10 * number + ord(name))
    return torch.randn({"a": (5, 3), "b": (67,)}[name], generator=made)


@on(TWO)
def optimizers() -> Any:
    found = {}
    for name, options in ELEMENTWISE.items():
        module = small()
        sync = alone(module, By("dp", {"a": SHARD, "b": SHARD, "never": OWNER}), bucket_bytes=128)
        kind = getattr(torch.optim, name)
        sync.check_optimizer(kind)
        optimizer = kind(sync.optimizer_parameters(), lr=0.05, **options)
        for number in range(3):
            given = {p: noise(p, rank(), number) for p in ("a", "b")}
            compute(sync, partial(give, module, **given))
            update(sync, optimizer)
        sync.wait_parameters()
        found[name] = {key: p.detach().clone() for key, p in module.named_parameters()}
        sync.close()
    return found


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_rows_are_stepped_as_the_whole_is(name: str, two: list[dict[str, Any]]) -> None:
    module = small()
    begun = module.get_parameter("never").detach().clone()
    kind = getattr(torch.optim, name)
    optimizer = kind(module.parameters(), lr=0.05, **ELEMENTWISE[name])
    for number in range(3):
        for key in ("a", "b"):
            module.get_parameter(key).grad = noise(key, 0, number) + noise(key, 1, number)
        optimizer.step()
    for reply in two:
        found = reply["optimizers"][name]
        for key, p in module.named_parameters():
            assert error(found[key], p.detach()) <= rounding(3 * 10)  # operations of three steps
        assert torch.equal(found["never"], begun)


@on(TWO)
def groups() -> Any:
    """Rank 1 steps rows of `w` alone: its group of `b` and `c` is empty, and stays in its place."""
    module = stage(b=(3,), w=(40, 2), c=(3,), frozen=nn.Parameter(torch.ones(2), False))
    sync = alone(module, By("dp", {"b": OWNER, "w": SHARD, "c": OWNER}))

    def group_of(record: ParameterRecord) -> dict[str, Any]:
        return {"lr": 0.5, "weight_decay": 0.0} if record.name in "bc" else {"weight_decay": 0.1}

    asked = sync.optimizer_parameters(group_of)
    made = [{**g, "params": [tuple(p.shape) for p in g["params"]]} for g in asked]
    optimizer = torch.optim.AdamW(asked, lr=0.25)
    compute(sync, partial(give, module, b=1.0, w=1.0, c=-1.0))
    update(sync, optimizer)
    sync.wait_parameters()
    values = {n: round(p.unique().item(), 4) for n, p in module.named_parameters()}
    one = [len(group["params"]) for group in sync.optimizer_parameters()]
    return made, values, one


def test_all_ranks_have_the_same_parameter_groups(two: list[dict[str, Any]]) -> None:
    no_decay, decay = {"lr": 0.5, "weight_decay": 0.0}, {"weight_decay": 0.1}
    values = {"b": -0.5, "w": -0.25, "c": 0.5, "frozen": 1.0}
    assert [reply["groups"] for reply in two] == [
        ([{"params": [(3,), (3,)], **no_decay}, {"params": [(48,)], **decay}], values, [3]),
        ([{"params": [], **no_decay}, {"params": [(32,)], **decay}], values, [1]),
    ]


# --- ways back


@on(TWO)
def unstepped() -> Any:
    """A step without an optimizer's step, one whose publish() is forgotten, and an evaluation."""
    found = []
    for placed in PLACES:
        module = stage(w=(20,), v=(3,))
        sync = rows(module, placed)
        optimizer = torch.optim.SGD(sync.optimizer_parameters(), lr=1.0)
        values: list[Any] = []

        def note(
            sync: GradientSync = sync, module: nn.Module = module, values: list[Any] = values
        ) -> None:
            sync.stage_first_use(0)
            values.append([p.unique().tolist() for p in module.parameters()])

        def work(module: nn.Module = module) -> None:
            give(module, w=1.0, v=1.0)

        compute(sync, work)
        sync.publish()
        optimizer.zero_grad()
        note()
        compute(sync, work)
        optimizer.step()
        optimizer.zero_grad()
        sync.prepare()
        note()
        give(module, w=2.0, v=1.0)
        sync.stage_final(0)
        sync.finish()
        optimizer.step()
        sync.publish_if_due()
        sync.publish_if_due()
        note()
        found.append((values, outcome(sync.check_replicas)))
    return found


def test_what_is_published_late_or_without_a_step_arrives(two: list[dict[str, Any]]) -> None:
    right = [[[0.0], [0.0]], [[-2.0], [-2.0]], [[-6.0], [-4.0]]]
    assert [reply["unstepped"] for reply in two] == [[(right, "None")] * 3] * 2


@on(TWO)
def drifted() -> Any:
    """An element that its own rank did not step is changed on another one."""
    found = []
    for placed in PLACES:
        module = stage(w=(40,))
        sync = rows(module, placed)
        optimizer = torch.optim.SGD(sync.optimizer_parameters(), lr=1.0)
        compute(sync, partial(give, module, w=1.0))
        update(sync, optimizer)
        sync.wait_parameters()
        if rank() == 1:
            module.get_parameter("w").data[0] += 2**-20
        found.append((outcome(sync.check_replicas), outcome(sync.synchronize_parameters)))
        found.append((outcome(sync.check_replicas), str(module.get_parameter("w").unique())))
    return found


def test_a_copy_that_drifts_is_found_and_made_equal(two: list[dict[str, Any]]) -> None:
    for reply in two:
        for (said, synchronized), (repaired, value) in zip(
            *[iter(reply["drifted"])] * 2, strict=True
        ):
            assert said.startswith("DriftError: copies of one parameter have drifted apart")
            assert "'0.w' over ranks [0, 1]" in said
            assert (synchronized, repaired, value[:12]) == ("None", "None", "tensor([-2.]")


@on(TWO)
def loaded() -> Any:
    """After loading, what stands in has the loaded values, and goes on from them."""
    found = []
    for placed in PLACES:
        for stored in (None, torch.float64):
            module = stage(w=(40,))
            sync = rows(module, placed, master_dtype=stored)
            optimizer = torch.optim.SGD(sync.optimizer_parameters(), lr=1.0)
            for value in (5.0, 7.0):
                module.load_state_dict({"w": torch.full((40,), value)})
                sync.synchronize_parameters()
                compute(sync, partial(give, module, w=1.0))
                update(sync, optimizer)
                sync.wait_parameters()
                found.append(module.get_parameter("w").unique().tolist())
    return found


def test_loaded_values_are_what_is_stepped(two: list[dict[str, Any]]) -> None:
    assert [reply["loaded"] for reply in two] == [[[3.0], [5.0]] * 6] * 2


@on(FOUR)
def repeated() -> Any:
    """Normal gradients over SHARD and OWNER on three comm streams, twice."""
    runs = []
    for _ in range(2):
        module = small()
        topology = mesh(dp=2, tp=2)
        handlers = [By("dp", {"a": OWNER, "b": SHARD, "never": SHARD}), By("tp", SHARD)]
        sync = GradientSync(
            {0: module}, topology, handlers=handlers, comm_streams=3, bucket_bytes=0
        )
        optimizer = torch.optim.Adam(sync.optimizer_parameters(), lr=0.1)
        norms = []
        for number in range(3):
            given = {p: noise(p, rank(), number) for p in ("a", "b")}
            compute(sync, partial(give, module, **given))
            norms.append(bits(sync.clip_grad_norm_(1.0)))
            update(sync, optimizer)
        sync.wait_parameters()
        runs.append((norms, {name: bits(p) for name, p in module.named_parameters()}))
    return runs


def test_bits_are_the_same_from_run_to_run(four: list[dict[str, Any]]) -> None:
    first = four[0]["repeated"][0]
    assert first[1]["b"] != bits(small().get_parameter("b"))
    assert [reply["repeated"] for reply in four] == [[first, first]] * 4


# --- stories


@on(TWO)
def crossed() -> Any:
    """An owner's receive is posted when the step begins, before rows of the same ranks leave."""
    module = stage(a=(32,), b=(32,))
    handler = By("dp", {"a": OWNER, "b": SHARD})
    sync = alone(module, handler, comm_streams=1, bucket_bytes=0)
    optimizer = torch.optim.SGD(sync.optimizer_parameters())
    found = []
    for number in (1.0, 2.0):
        compute(sync, partial(give, module, a=number, b=10.0 * number))
        found.append({key: part.unique().tolist() for key, (_, part) in stepped(sync).items()})
        optimizer.zero_grad()
    return found


def test_an_owners_receive_catches_no_rows(two: list[dict[str, Any]]) -> None:
    """Without tags of their own the rows of `b` arrived in the inbox of `a`."""
    assert [reply["crossed"] for reply in two] == [
        [{"0.a": [2.0], "0.b": [20.0]}, {"0.a": [4.0], "0.b": [40.0]}],
        [{"0.b": [20.0]}, {"0.b": [40.0]}],
    ]


@on(TWO)
def flags() -> Any:
    """A parameter of 20 elements, 40 empty ones, and 10 scalars of 16 bytes."""
    empty = {f"e{i}": (0,) for i in range(40)}
    scalars = {f"s{i}": torch.zeros((), dtype=torch.complex128) for i in range(10)}
    module = stage(w=(20,), **empty, **scalars)
    sync = alone(module, Sharded())
    given = {f"s{i}": torch.tensor(1.0 + i) for i in range(9)}

    def work() -> None:
        give(module, w=torch.arange(20.0))
        for name, gradient in given.items():
            (module.get_parameter(name) * gradient).real.backward()

    compute(sync, work)
    return {
        key: (begin, None if g is None else g.real) for key, (begin, g) in stepped(sync).items()
    }


def test_more_flags_than_elements_overwrite_no_gradient(two: list[dict[str, Any]]) -> None:
    """A row smaller than its bucket's flags had them written over the next row, or past its end."""
    found = [reply["flags"] for reply in two]
    assert joined(found, "0.w") == list(range(20))
    for number in range(9):
        assert joined(found, f"0.s{number}") == [1.0 + number]
    assert [part for one in found for key, (_, part) in one.items() if key == "0.s9"] == [None]
