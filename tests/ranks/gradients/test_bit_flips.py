"""One flipped bit in one copy: an error with parameter, ranks and step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from pipegrad import GradientSync, Placement, Topology
from pipegrad.model.dtensor import local
from tests.support.gradients.cases import DATA, SHARED, give, outcome, rank, replicated, stage, tied
from tests.support.gradients.placements import OWNER, SHARD, By, alone, compute
from tests.support.ranked import gathered

pytestmark = pytest.mark.ranks(4)

LOWEST, EXPONENT, SIGN = 0, 27, 31
AT = 8  # the step in which it flips, before the comparison
Trained = tuple[GradientSync, nn.Module]


def flip(tensor: torch.Tensor, bit: int, *, on: int) -> Callable[[], None]:
    """Returns what flips one bit of one element on a rank, as a fault of the memory does."""
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    word = torch.tensor([1], dtype=torch.int64).bitwise_left_shift(bit).to(kind)

    def flips() -> None:
        if rank() == on:
            tensor.data.view(-1)[2:3].view(kind).bitwise_xor_(word)

    return flips


def train(trained: Trained, flips: Callable[[], object]) -> list[str]:
    """Trains, with the flip in step `AT`; returns what each step raised."""
    sync, module = trained
    optimizer = sync.optimizer(torch.optim.AdamW, lr=1e-2)
    before = steps(sync, module, optimizer, num=AT - 1)
    return before + steps(sync, module, optimizer, num=1, first=flips)


def steps(
    sync: GradientSync,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    num: int = 2,
    first: Callable[[], object] = lambda: None,
    behind: Callable[[], object] = lambda: None,
    accumulate: int = 1,
) -> list[str]:
    """Trains; `first` is in each backward, `behind` after each step. Returns what they raised."""

    def backward() -> None:
        first()
        give(module, **{name: 1.0 for name, p in module.named_parameters() if p.requires_grad})

    outcomes = []
    for _ in range(num):
        for _ in range(accumulate - 1):
            with sync.accumulate():
                sync.prepare()
                backward()
                sync.finish()
        outcomes.append(outcome(lambda: compute(sync, backward)))
        optimizer.step()
        sync.publish()
        behind()
        optimizer.zero_grad()
    return outcomes


def seeded(**shapes: tuple[int, ...]) -> nn.Module:
    torch.manual_seed(3)
    return stage(**{name: torch.randn(shape) for name, shape in shapes.items()})


def replicas(**options: Any) -> Trained:
    module = seeded(w=(33, 31), v=(5,))
    return replicated(module, **options), module


def ties(**options: Any) -> Trained:
    """Two stages with a tied weight on ranks (0, 1) and (2, 3), each in two replicas."""
    at = rank() // 2
    module = seeded(w=(33, 31), **{"ab"[at]: (7 + at,)})
    return tied(module, "w", handlers=[SHARED, DATA], **options), module


def placed(placement: Placement, **options: Any) -> Trained:
    module = seeded(w=(33, 31))
    return alone(module, By("dp", placement, "mean"), **options), module


def masters(**options: Any) -> Trained:
    module = seeded(w=(64,)).bfloat16()
    return replicated(module, master_dtype=torch.float32, **options), module


# With SHARD and OWNER each rank still has a whole copy, of which others step parts.
COPIES = pytest.mark.parametrize(
    ("make", "odd"),
    [(replicas, 2), (ties, 3), (partial(placed, SHARD), 1), (partial(placed, OWNER), 1)],
    ids=["replicas", "ties", "sharded", "owner"],
)


@COPIES
def test_one_bit_is_an_error_on_all_ranks(make: Callable[[], Trained], odd: int) -> None:
    sync, module = make()
    bit = (LOWEST, LOWEST, EXPONENT, SIGN)[odd]
    *before, last = train((sync, module), flip(module.get_parameter("w"), bit, on=odd))
    assert before == ["None"] * (AT - 1)
    assert last.startswith(
        f"DriftError: copies of one parameter have drifted apart: '0.w' on ranks [{odd}], of the "
        f"copies on ranks [0, 1, 2, 3]. They differ in step 8, and were equal in step 4. "
    )


def test_each_kind_of_copy_is_compared_in_its_step() -> None:
    sync, module = ties()
    own = module.get_parameter("ab"[sync.topology.coordinate("pp")])
    last = train((sync, module), flip(own, SIGN, on=3))[-1]
    assert ": '1.b' over ranks [2, 3]. They differ in step 8" in last
    # Master copies and frozen parameters are compared.
    sync, module = masters()  # no bf16 parameter shows the lowest bit of its master copy
    last = train((sync, module), flip(sync.main_parameters()[0].tensor, LOWEST, on=0))[-1]
    assert ": the master copy of '0.w' on ranks [0], of the" in last
    module = seeded(w=(33, 31), v=(5,))
    frozen = module.get_parameter("w").requires_grad_(False)
    last = train((replicated(module), module), flip(frozen, LOWEST, on=2))[-1]
    assert ": '0.w' on ranks [2], of the" in last
    # Every 0 is never.
    sync, module = replicas(check_every=0)
    flips = flip(module.get_parameter("w"), SIGN, on=2)
    assert train((sync, module), flips) == ["None"] * AT


def test_shards_of_dtensors_are_compared_part_by_part() -> None:
    # A tied weight that both stages cut over "dp": copies are on (0, 2) and on (1, 3).
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    topology = Topology.from_mesh(mesh)
    whole = seeded(w=(33, 31)).get_parameter("w").detach()
    module = stage(w=distribute_tensor(whole, mesh["dp"], [Shard(0)]))
    stages = {topology.coordinate("pp"): module}
    sync = GradientSync(stages, topology, tied=[["w"]], handlers=[SHARED])
    own = local(module.get_parameter("w"))
    assert len(own) == 17 - rank() % 2
    last = train((sync, module), flip(own, SIGN, on=3))[-1]
    assert ": '0.w' over ranks [1, 3]. They differ in step 8" in last


# Copies that are stepped differently: an error on all ranks, where machines round alike.


def tie() -> nn.Module:
    """A copy of one parameter on each rank, and one of its own that is larger on the second."""
    return stage(w=torch.randn(64), **{"ab"[rank()]: torch.ones(4 + 1000 * rank())})


@pytest.mark.ranks(2)
def test_copies_that_are_changed_differently_are_an_error() -> None:
    module = tie()
    groups = [{"params": [p], "weight_decay": 0.1 * rank()} for p in module.parameters()]
    first, second = steps(tied(module, "w"), module, torch.optim.AdamW(groups, lr=1e-3))
    assert first == "None"
    assert second.startswith("DriftError: copies of one parameter have drifted apart: ")
    assert "over ranks [0, 1]. They differ in step 2. Something changed them diff" in second


@pytest.mark.ranks(2)
def test_copies_are_compared_seldom_and_not_on_machines_of_several_kinds() -> None:
    module, kind = tie(), f"kind {rank()}"  # of machine
    with (
        mock.patch("pipegrad.gradients.set_up.kind_of_machine", return_value=kind),
        warnings.catch_warnings(record=True) as told,
    ):
        sync = tied(module, "w")
    words = [one for said in gathered([str(x.message) for x in told]) for one in said]
    assert len(words) == 1
    assert words[0].startswith("copies of parameters are not compared")
    adam = torch.optim.AdamW(module.parameters(), lr=1e-3, weight_decay=0.1)

    def round_up() -> None:
        with torch.no_grad():
            w = module.get_parameter("w")
            w.copy_(torch.nextafter(w, torch.full_like(w, float("inf") * (2 * rank() - 1))))

    assert steps(sync, module, adam, num=8, behind=round_up) == ["None"] * 8
    assert outcome(sync.check_replicas).startswith("DriftError: ")
    sync.synchronize_parameters()
    assert outcome(sync.check_replicas) == "None"
    # Copies are compared seldom.
    module = stage(w=(4,))
    sync = replicated(module, check_every=6)
    drift = sync._drift
    look, compared = drift.look, list[int]()

    def count() -> None:
        compared.append(sync.statistics().steps)
        look()

    drift.look = count  # type: ignore[method-assign]
    steps(sync, module, torch.optim.SGD(module.parameters(), lr=1.0), num=13, accumulate=2)
    assert compared == [2, 4, 6, 12]  # steps that only accumulate do not count
