"""One flipped bit in one copy: named with its parameter, ranks and step, or set right."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from pipegrad import GradientSync, Topology
from pipegrad.model.dtensor import local
from tests.support.gradients.cases import (
    DATA,
    SHARED,
    Case,
    give,
    on,
    outcome,
    rank,
    replicated,
    replies,
    stage,
)
from tests.support.gradients.placements import OWNER, SHARD, By, alone, compute, update

FOUR: list[Case] = []

four = replies(4, FOUR)

BITS = {"lowest of the mantissa": 0, "exponent": 27, "sign": 31}
Flip = Callable[[], object]
AT = 8  # the step in which it flips, before the comparison


def flip(tensor: torch.Tensor, bit: int, at: int = 2) -> None:
    """Flips one bit of one element, as a fault of the memory does: nobody is told."""
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    word = torch.tensor([1], dtype=torch.int64).bitwise_left_shift(bit).to(kind)
    tensor.data.view(-1)[at : at + 1].view(kind).bitwise_xor_(word)


def trained(
    sync: GradientSync, module: nn.Module, flips: Flip, *, num: int = AT, at: int = AT
) -> list[str]:
    """Trains; flips before the step `at`; returns what each step raised or warned."""
    optimizer = sync.optimizer(torch.optim.AdamW, lr=1e-2)
    told: list[str] = []
    names = [name for name, p in module.named_parameters() if p.requires_grad]

    def backward() -> None:
        if len(told) + 1 == at:
            flips()
        give(module, **dict.fromkeys(names, 1.0))

    for _ in range(num):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            raised = outcome(lambda: compute(sync, backward))
        told.append("".join([raised, *(f" warned: {w.message}" for w in caught)]))
        update(sync, optimizer)
    return told


def seeded(**shapes: tuple[int, ...]) -> nn.Module:
    drawn = torch.Generator().manual_seed(3)
    return stage(**{name: torch.randn(shape, generator=drawn) for name, shape in shapes.items()})


def two_by_two(**options: Any) -> tuple[GradientSync, nn.Module]:
    """Two stages with a tied weight on ranks (0, 1) and (2, 3), each in two replicas."""
    topology = Topology.create(pipeline=2)
    at = topology.coordinate("pp")
    module = seeded(w=(33, 31), **{"ab"[at]: (7 + at,)})
    handlers = [SHARED, DATA]
    return GradientSync({at: module}, topology, tied=[["w"]], handlers=handlers, **options), module


@on(FOUR)
def replicas() -> Any:
    found = {}
    for name, bit in BITS.items():
        module = seeded(w=(33, 31), v=(5,))
        own = module.get_parameter("w")
        flips = lambda own=own, bit=bit: flip(own, bit) if rank() == 2 else None  # noqa: E731
        found[name] = trained(replicated(module), module, flips)
    return found


@on(FOUR)
def ties() -> Any:
    found = {}
    for name, bit in BITS.items():
        sync, module = two_by_two()
        own = module.get_parameter("w")
        flips = lambda own=own, bit=bit: flip(own, bit) if rank() == 3 else None  # noqa: E731
        found[name] = trained(sync, module, flips)
    return found


@on(FOUR)
def one_stage() -> Any:
    """A replica of a parameter that only two of four ranks hold: all ranks raise."""
    sync, module = two_by_two()
    return trained(
        sync, module, lambda: flip(module.get_parameter("b"), 31) if rank() == 3 else None
    )


@on(FOUR)
def sharded() -> Any:
    """With SHARD and OWNER each rank still has a whole copy, of which others step parts."""
    found = {}
    for placed, placement in {"sharded": SHARD, "owner": OWNER}.items():
        for name, bit in BITS.items():
            module = seeded(w=(33, 31))
            sync = alone(module, By("dp", placement, "mean"))
            own = module.get_parameter("w")
            flips = lambda own=own, bit=bit: flip(own, bit) if rank() == 1 else None  # noqa: E731
            found[placed, name] = trained(sync, module, flips)
    return found


@on(FOUR)
def master() -> Any:
    """A master copy whose lowest bit no parameter shows, of bf16 parameters."""
    drawn = torch.Generator().manual_seed(3)
    module = stage(w=torch.randn(64, generator=drawn).bfloat16())
    sync = replicated(module, master_dtype=torch.float32)

    def flips() -> None:
        if rank() == 0:
            flip(sync.main_parameters()[0].tensor, 0)

    return trained(sync, module, flips)


@on(FOUR)
def frozen() -> Any:
    module = seeded(w=(33, 31), v=(5,))
    module.get_parameter("w").requires_grad_(False)
    own = module.get_parameter("w")
    return trained(replicated(module), module, lambda: flip(own, 0) if rank() == 2 else None)


@pytest.mark.parametrize("bit", BITS)
@pytest.mark.parametrize(
    ("case", "key", "odd"),
    [
        ("replicas", "0.w", 2),
        ("ties", "0.w", 3),
        ("sharded", "0.w", 1),
        ("owner", "0.w", 1),
    ],
)
def test_one_bit_is_named_on_all_ranks(
    four: list[dict[str, Any]], case: str, key: str, odd: int, bit: str
) -> None:
    where = "sharded" if case in ("sharded", "owner") else case
    index: Any = (case, bit) if where == "sharded" else bit
    for reply in four:
        *before, last = reply[where][index]
        assert before == ["None"] * (AT - 1)
        assert last.startswith(
            f"DriftError: copies of one parameter have drifted apart: '{key}' on ranks [{odd}], of "
            f"the copies on ranks [0, 1, 2, 3]. They differ in step 8, and were equal in step 4. "
        )


def test_two_copies_have_no_majority_and_other_ranks_raise_too(
    four: list[dict[str, Any]],
) -> None:
    for reply in four:
        assert ": '1.b' over ranks [2, 3]. They differ in step 8" in reply["one_stage"][-1]


def test_master_copies_and_frozen_parameters_are_compared(four: list[dict[str, Any]]) -> None:
    for reply in four:
        assert ": the master copy of '0.w' on ranks [0], of the" in reply["master"][-1]
        assert ": '0.w' on ranks [2], of the" in reply["frozen"][-1]


@on(FOUR)
def repaired() -> Any:
    """The same runs with `repair`, beside runs in which no bit flips."""
    found: dict[Any, Any] = {}

    def run(kind: str, make: Callable[[], tuple[GradientSync, nn.Module]], at: int) -> None:
        for flips in (False, True):
            sync, module = make()
            own = module.get_parameter("w")

            def change(own: nn.Parameter = own, *, flips: bool = flips) -> None:
                if flips and rank() == at:
                    flip(own, 31)

            # With SHARD and OWNER the next parameter sync would set it right.
            said = trained(sync, module, change, num=10)
            sync.wait_parameters()
            values = own.detach().flatten().tolist()
            found[kind, flips] = (said[AT - 1], values, sync.statistics().repaired)
            found[kind, flips, "checked"] = outcome(sync.check_replicas)
            sync.close()

    def data() -> tuple[GradientSync, nn.Module]:
        module = seeded(w=(33, 31))
        return replicated(module, repair=True), module

    def placed() -> tuple[GradientSync, nn.Module]:
        module = seeded(w=(33, 31))
        return alone(module, By("dp", SHARD, "mean"), repair=True), module

    run("replicas", data, 2)
    run("ties", lambda: two_by_two(repair=True), 3)
    run("sharded", placed, 1)
    return found


@pytest.mark.parametrize(("kind", "odd"), [("replicas", 2), ("ties", 3), ("sharded", 1)])
def test_a_repaired_run_ends_as_one_without_a_flip(
    four: list[dict[str, Any]], kind: str, odd: int
) -> None:
    """The gradients here do not depend on the values, so the repaired copy is all that counts."""
    for at, reply in enumerate(four):
        said, values, count = reply["repaired"][kind, True]
        without = reply["repaired"][kind, False]
        assert without[::2] == ("None", 0)
        assert values == without[1]
        assert count == 1
        assert reply["repaired"][kind, True, "checked"] == "None"
        if at:
            assert said == "None"  # only the lowest rank warns
            continue
        assert said.startswith(
            f"None warned: copies of one parameter were different, and are equal again: '0.w' on "
            f"ranks [{odd}], of the copies on ranks [0, 1, 2, 3], now as on rank 0. They differed "
            f"in step 8, and were equal in step 4. "
        )


@on(FOUR)
def repaired_master() -> Any:
    """The lowest rank's master copy flips: the others are the majority. Parameters follow it."""
    found = []
    for flips in (False, True):
        drawn = torch.Generator().manual_seed(3)
        module = stage(w=torch.randn(64, generator=drawn).bfloat16())
        sync = replicated(module, master_dtype=torch.float32, repair=True)

        def change(sync: GradientSync = sync, *, flips: bool = flips) -> None:
            if flips and rank() == 0:
                flip(sync.main_parameters()[0].tensor, 30)

        said = trained(sync, module, change, num=10)
        sync.wait_parameters()
        main = sync.main_parameters()[0].tensor.tolist()
        found.append((said[AT - 1], main, module.get_parameter("w").tolist()))
    return found


def test_a_repaired_master_copy_goes_on(four: list[dict[str, Any]]) -> None:
    for at, reply in enumerate(four):
        without, with_flip = reply["repaired_master"]
        assert with_flip[1:] == without[1:]
        words = ": the master copy of '0.w' on ranks [0], of the copies on ranks [0, 1, 2, 3], now"
        assert (f"{words} as on rank 1. " in with_flip[0]) == (at == 0)


@on(FOUR)
def repaired_pair() -> Any:
    """Two copies: those of the lowest rank count, also if they are the wrong ones."""
    sync, module = two_by_two(repair=True)
    name = "ab"[sync.topology.coordinate("pp")]
    own = module.get_parameter(name)
    before: list[float] = []

    def change() -> None:
        if rank() == 2:
            flip(own, 31)
        before.extend(own.tolist())

    said = trained(sync, module, change, num=8)[-1]
    return said, before, sync.statistics().repaired, outcome(sync.check_replicas)


def test_of_two_copies_those_of_the_lowest_rank_count(four: list[dict[str, Any]]) -> None:
    said = [reply["repaired_pair"] for reply in four]
    assert "equal again: '1.b' over ranks [2, 3], now as on rank 2. " in said[0][0]
    assert said[2][1] != said[3][1]  # they differed
    assert [each[2:] for each in said] == [(1, "None")] * 4


@on(FOUR)
def never() -> Any:
    module = seeded(w=(33, 31))
    own = module.get_parameter("w")
    sync = replicated(module, check_every=0)
    return trained(sync, module, lambda: flip(own, 31) if rank() == 2 else None)


@on(FOUR)
def resumed() -> Any:
    module = seeded(w=(33, 31))
    own = module.get_parameter("w")
    sync = replicated(module)
    sync.continue_from(1000)
    return trained(sync, module, lambda: flip(own, 31) if rank() == 2 else None)[-1]


def test_every_0_is_never_and_a_resumed_run_goes_on_counting(four: list[dict[str, Any]]) -> None:
    for reply in four:
        assert reply["never"] == ["None"] * AT
        assert "They differ in step 1008, and were equal in step 1004. " in reply["resumed"]


@on(FOUR)
def two_kinds() -> Any:
    """Ranks that may round differently: the last bit is no error, and a high one is."""
    found = {}
    for name, bit in BITS.items():
        module = seeded(w=(33, 31))
        kind = f"kind {rank() % 2}"
        with mock.patch("pipegrad.gradients.negotiate.kind_of_machine", return_value=kind):
            sync = replicated(module)
        own = module.get_parameter("w")
        flips = lambda own=own, bit=bit: flip(own, bit) if rank() == 2 else None  # noqa: E731
        found[name] = trained(sync, module, flips)[-1]
    return found


def test_machines_of_two_kinds_may_round_differently(four: list[dict[str, Any]]) -> None:
    for reply in four:
        found = reply["two_kinds"]
        assert found["lowest of the mantissa"] == "None"
        for bit in ("exponent", "sign"):
            assert ": '0.w' on ranks [2], of the copies on ranks [0, 1, 2, 3]. " in found[bit]


@on(FOUR)
def shards_of_dtensors() -> Any:
    """A tied weight that both stages cut over "dp": copies are on (0, 2) and on (1, 3)."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    found = {}
    for repairs in (False, True):
        topology = Topology.from_mesh(mesh)
        at = topology.coordinate("pp")
        whole = seeded(w=(33, 31)).get_parameter("w").detach()
        module = stage(w=distribute_tensor(whole, mesh["dp"], [Shard(0)]))
        sync = GradientSync({at: module}, topology, tied=[["w"]], handlers=[SHARED], repair=repairs)
        own = local(module.get_parameter("w"))
        before = own.clone()

        def flips(own: torch.Tensor = own, before: torch.Tensor = before) -> None:
            if rank() == 3:
                flip(own, 31)
            before.copy_(own)

        said = trained(sync, module, flips)[-1]
        found[repairs] = (said, len(own), before.tolist(), sync.statistics().repaired)
        if repairs:
            sync.check_replicas()
    return found


def test_shards_of_dtensors_are_compared_part_by_part(four: list[dict[str, Any]]) -> None:
    said = [reply["shards_of_dtensors"] for reply in four]
    for each in said:
        assert ": '0.w' over ranks [1, 3]. They differ in step 8" in each[False][0]
        assert each[True][3] == 1
    assert [each[True][1] for each in said] == [17, 16, 17, 16]
    assert said[1][True][2] != said[3][True][2]
    assert "'0.w' over ranks [1, 3], now as on rank 1. " in said[0][True][0]
