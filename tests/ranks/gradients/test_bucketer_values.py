"""Bucketer: what goes in, and what callbacks get, is what one process would compute."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from pipegrad import Bucketer
from pipegrad.comm import collectives
from tests.support.gradients.cases import bits, outcome, rank
from tests.support.gradients.sums import Calls, inputs, spied
from tests.support.ranked import gathered

pytestmark = pytest.mark.ranks(4)


def test_inputs_of_every_layout_order_and_group() -> None:
    # 0-d, transposed, with gaps, expanded, and with a graph behind them.
    bucketer, sums, shards = Bucketer(), list[torch.Tensor](), list[torch.Tensor]()

    def layouts(factor: float) -> list[torch.Tensor]:
        matrix, scalar = torch.arange(6.0).reshape(2, 3) * factor, torch.tensor(factor)
        leaf = torch.full((2,), factor, requires_grad=True)
        return [scalar, matrix.t(), matrix[:, ::2], scalar.expand(2), leaf, leaf * 2]

    for tensor in layouts(rank() + 1.0):
        bucketer.all_reduce(tensor, callback=sums.append)
        bucketer.reduce_scatter([tensor * r for r in range(4)], callback=shards.append)
    bucketer.flush()
    assert not any(view.requires_grad for view in (*sums, *shards))
    for total, shard, right in zip(sums, shards, layouts(10.0), strict=True):
        assert torch.equal(total, right)
        assert torch.equal(shard, rank() * right)
    # Gloo sums are added in the order of ranks.
    sums = list[torch.Tensor]()
    value = [1e8, 1.0, -1e8, 1.0][rank()]  # in fp32 only in the order of ranks the sum is 1
    bucketer = Bucketer()
    bucketer.reduce_scatter([torch.full((2,), value)] * 4, callback=sums.append)
    bucketer.flush()
    assert sums[0].tolist() == [1.0, 1.0]
    # A subgroup without rank zero.
    group = dist.new_group([3, 1], use_local_synchronization=False)
    bucketer, sums = Bucketer(), list[torch.Tensor]()
    rows = [torch.full((2,), 10.0 * row + rank()) for row in range(2)]
    words = outcome(lambda: bucketer.reduce_scatter(rows, group=group, callback=sums.append))
    bucketer.flush()
    if rank() in (1, 3):
        at = dist.get_process_group_ranks(group).index(rank())
        assert words == "None"
        assert [view.tolist() for view in sums] == [[20.0 * at + 4.0] * 2]
    else:
        assert words == (
            "PlanError: reduce_scatter: this rank is not in the group, only its ranks call"
        )
        assert (sums, bucketer.allocated_bytes) == ([], 0)


FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64)
INTS = (torch.int64, torch.int32, torch.int8, torch.uint8)


@pytest.mark.parametrize("dtype", FLOATS + INTS)
def test_sums_of_every_dtype(dtype: torch.dtype) -> None:
    bucketer, sums, shards = Bucketer(), list[torch.Tensor](), list[torch.Tensor]()
    tensor = torch.tensor([1, 2]).to(dtype) * (rank() + 1)
    bucketer.all_reduce(tensor, callback=sums.append)
    bucketer.reduce_scatter([tensor * r for r in range(4)], callback=shards.append)
    bucketer.flush()
    for (view,), right in ((sums, [10, 20]), (shards, [10 * rank(), 20 * rank()])):
        assert (view.dtype, view.tolist()) == (dtype, right)


@pytest.mark.ranks(2)
def test_neither_what_is_overwritten_nor_the_capacity_changes_a_sum() -> None:
    calls, sums = Calls(64), list[Any]()
    for _ in range(2):
        mine, total = inputs(3, 1.0), torch.full((3,), 5.0)
        calls.bucketer.reduce_scatter(mine, callback=calls.note)
        calls.bucketer.all_reduce(total, callback=lambda view: sums.append(view.tolist()))
        for tensor in (*mine, total):
            tensor.fill_(7e7)
    assert calls.flush() == [(3, 1.0)] * 2
    assert sums == [[10.0] * 3] * 2
    # Views stay valid as long as they are held.
    bucketer, views = Bucketer(capacity_bytes=64), list[torch.Tensor]()
    for number in range(6):
        keep = views.append if number == 0 else lambda view: None
        for _ in range(3):
            bucketer.reduce_scatter(inputs(2, 1.0 + number), callback=keep)
            bucketer.all_reduce(torch.full((3,), 1.0 + number), callback=keep)
        bucketer.flush()
    bucketer.release()
    right = [[2.0] * 3] * 3 + [[2.0 * (1 + 100 * rank())] * 2] * 3
    assert sorted(view.tolist() for view in views) == sorted(right)
    # No bit of two ranks depends on the capacity.
    # All-reduce for two ranks: gloo adds more in an order that depends on the position.
    first, *others = (trajectory(n, both_kinds=True, dtype=torch.float32) for n in CAPACITIES)
    assert others == [first] * 3


def trajectory(capacity_bytes: int, *, both_kinds: bool, dtype: torch.dtype) -> list[list[int]]:
    torch.manual_seed(rank())
    bucketer, sums = Bucketer(capacity_bytes=capacity_bytes), dict[int, list[int]]()
    num_ranks = dist.get_world_size()

    def use(number: int) -> Callable[[torch.Tensor], None]:
        return lambda view: sums.__setitem__(number, bits(view.to(torch.float32)))

    for number in range(40):
        size = (7 * number) % 23
        rows = list((torch.randn(num_ranks, size) * 10 ** (number % 5)).to(dtype))
        if both_kinds and number % 2 == 0:
            bucketer.all_reduce(rows[0], callback=use(number))
        else:
            bucketer.reduce_scatter(rows, callback=use(number))
    bucketer.flush()
    return [sums[number] for number in range(40)]


CAPACITIES = (0, 100, 1000, 25 * 2**20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_bit_of_a_reduce_scatter_depends_on_the_capacity(dtype: torch.dtype) -> None:
    first, *others = (trajectory(size, both_kinds=False, dtype=dtype) for size in CAPACITIES)
    assert others == [first] * 3


@pytest.mark.parametrize("numel", [100, 16, 5])  # 7 pieces, the last one shorter; one piece
def test_gloo_sums_rows_in_pieces(numel: int) -> None:
    # In place, as a bucket's are, or not.
    rows = [torch.arange(numel) * 10.0**row + rank() for row in range(4)]
    output, common = torch.zeros(numel), torch.ones(3)
    with mock.patch.object(collectives, "_PIECE_BYTES", 64):
        collectives.reduce_scatter(output, rows, None, common=common)
        collectives.reduce_scatter(rows[rank()], rows, None)
    right = [4 * i * 10.0 ** rank() + 6 for i in range(numel)]
    assert output.tolist() == rows[rank()].tolist() == right
    assert common.tolist() == [4.0] * 3


class Mixture:
    """Random calls, the same on all ranks; each rank to the world or to its own pair of ranks."""

    def __init__(self, seed: int, pair: dist.ProcessGroup) -> None:
        self.random = random.Random(seed)
        self.groups = {"world": dist.group.WORLD, "pair": pair}
        self.bucketer = Bucketer(capacity_bytes=200)
        self.number = 0
        self.order: list[int] = []

    def call(self) -> None:
        """Makes one call; one callback in six makes another."""
        self.number += 1
        number, group = self.number, self.groups[self.random.choice(["world", "pair"])]
        scatters = self.random.choice([True, False])
        shape = self.random.choice([(), (0,), (3,), (2, 5), (4, 4), (9, 9)])
        dtype = self.random.choice([torch.float32, torch.float64, torch.int64, torch.bfloat16])
        again = self.random.random() < 1 / 6
        ranks = dist.get_process_group_ranks(group)

        def rows(of: int) -> list[torch.Tensor]:
            generator = torch.Generator().manual_seed(1000 * number + of)
            size = (len(ranks) if scatters else 1, *shape)
            return list(torch.randint(-9, 9, size, generator=generator).to(dtype))

        def use(view: torch.Tensor) -> None:
            self.order.append(number)
            row = ranks.index(rank()) if scatters else 0
            right = torch.stack([rows(of)[row] for of in ranks]).sum(0, dtype=dtype)
            assert (view.dtype, view.tolist()) == (dtype, right.tolist())
            if again:
                self.call()

        if scatters:
            self.bucketer.reduce_scatter(rows(rank()), group=group, callback=use)
        else:
            self.bucketer.all_reduce(rows(rank())[0], group=group, callback=use)

    def run(self, num_calls: int) -> None:
        for _ in range(num_calls):
            chance = self.random.random()
            if chance < 0.05:
                self.bucketer.flush()
            elif chance < 0.15:
                self.bucketer.capacity_bytes = self.random.choice([0, 100, 500, 3000])
            self.call()
        self.bucketer.flush()
        self.bucketer.release()


@pytest.mark.parametrize("seed", range(4))
def test_any_mixture_of_calls_has_one_order_and_the_sums_of_one_process(seed: int) -> None:
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mixture = Mixture(seed, pairs[rank() % 2])
    with spied() as log:
        mixture.run(120)
    assert mixture.number >= 120
    assert sorted(mixture.order) == list(range(1, mixture.number + 1))  # each once
    assert mixture.order != sorted(mixture.order)
    first, *others = gathered((mixture.order, [entry[:3] for entry in log]))
    assert others == [first] * 3
