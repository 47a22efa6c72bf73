"""Bucketer: what goes in, and what callbacks get, is what one process would compute."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from pipegrad import Bucketer
from pipegrad.comm import collectives, shard_sums
from tests.support.gradients.cases import Case, bits, on, outcome, rank, replies
from tests.support.gradients.sums import Calls, inputs, spied

TWO: list[Case] = []
FOUR: list[Case] = []


two = replies(2, TWO)
four = replies(4, FOUR)


@on(FOUR)
def layouts() -> Any:
    """0-d, transposed, with gaps, expanded, and with a graph behind them."""
    bucketer, sums, shards = Bucketer(), list[torch.Tensor](), list[torch.Tensor]()
    mine = rank() + 1.0
    matrix = torch.arange(6.0).reshape(2, 3) * mine
    leaf = torch.full((2,), mine, requires_grad=True)
    scalar = torch.tensor(mine)
    for tensor in (scalar, matrix.t(), matrix[:, ::2], scalar.expand(2), leaf, leaf * 2):
        bucketer.all_reduce(tensor, callback=sums.append)
        bucketer.reduce_scatter([tensor * r for r in range(4)], callback=shards.append)
    bucketer.flush()
    graph = any(view.requires_grad for view in (*sums, *shards))
    return [view.tolist() for view in sums], [view.tolist() for view in shards], graph


def test_inputs_of_every_layout(four: list[dict[str, Any]]) -> None:
    matrix = 10.0 * torch.arange(6.0).reshape(2, 3)
    ten = torch.full((2,), 10.0)
    sums = [torch.tensor(10.0), matrix.t(), matrix[:, ::2], ten, ten, 2 * ten]
    for number, reply in enumerate(four):
        right = [s.tolist() for s in sums], [(number * s).tolist() for s in sums], False
        assert reply["layouts"] == right


DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64,
    torch.int64, torch.int32, torch.int8, torch.uint8,
)  # fmt: skip


@on(FOUR)
def dtypes() -> Any:
    bucketer, got = Bucketer(), list[torch.Tensor]()
    for dtype in DTYPES:
        tensor = torch.tensor([1, 2]).to(dtype) * (rank() + 1)
        bucketer.all_reduce(tensor, callback=got.append)
        bucketer.reduce_scatter([tensor * r for r in range(4)], callback=got.append)
    bucketer.flush()
    return [(str(view.dtype), view.tolist()) for view in sorted(got, key=lambda v: str(v.dtype))]


def test_sums_of_every_dtype(four: list[dict[str, Any]]) -> None:
    for number, reply in enumerate(four):
        expected = [
            (str(dtype), sums)
            for dtype in sorted(DTYPES, key=str)
            for sums in ([10, 20], [10 * number, 20 * number])
        ]
        key = lambda found: (found[0], abs(found[1][0]))  # noqa: E731
        assert sorted(reply["dtypes"], key=key) == sorted(expected, key=key)


@on(FOUR)
def overwritten() -> Any:
    calls = Calls(64)
    for _ in range(2):
        mine = inputs(3, 1.0)
        calls.bucketer.reduce_scatter(mine, callback=calls.note)
        for tensor in mine:
            tensor.fill_(7e7)
        total = torch.full((3,), 5.0)
        calls.bucketer.all_reduce(total, callback=calls.got.append)
        total.fill_(7e7)
    first, second, *sums = calls.flush()
    return first, second, [view.tolist() for view in sums]


def test_inputs_may_be_overwritten_after_the_call(four: list[dict[str, Any]]) -> None:
    right = ((3, 1.0), (3, 1.0), [[20.0] * 3] * 2)
    assert [reply["overwritten"] for reply in four] == [right] * 4


@on(FOUR)
def kept() -> Any:
    """Views of a first round, looked at after later rounds and after release."""
    bucketer, views = Bucketer(capacity_bytes=64), list[torch.Tensor]()
    for round_number in range(6):
        keep = views.append if round_number == 0 else lambda view: None
        for _ in range(3):
            bucketer.reduce_scatter(inputs(2, 1.0 + round_number), callback=keep)
            bucketer.all_reduce(torch.full((3,), 1.0 + round_number), callback=keep)
        bucketer.flush()
    bucketer.release()
    return sorted(view.tolist() for view in views)


def test_views_stay_valid_as_long_as_they_are_held(four: list[dict[str, Any]]) -> None:
    for number, reply in enumerate(four):
        right = [[4.0] * 3] * 3 + [[4.0 * (1 + 100 * number)] * 2] * 3
        assert reply["kept"] == sorted(right)


def trajectory(capacity_bytes: int, kinds: str, dtype: torch.dtype) -> list[list[int]]:
    torch.manual_seed(rank())
    bucketer, got = Bucketer(capacity_bytes=capacity_bytes), dict[int, list[int]]()
    num_ranks = dist.get_world_size()

    def note(number: int) -> Callable[[torch.Tensor], None]:
        return lambda view: got.__setitem__(number, bits(view.to(torch.float32)))

    for number in range(40):
        size = (7 * number) % 23
        rows = list((torch.randn(num_ranks, size) * 10 ** (number % 5)).to(dtype))
        if kinds == "reduce_scatter" or number % 2:
            bucketer.reduce_scatter(rows, callback=note(number))
        else:
            bucketer.all_reduce(rows[0], callback=note(number))
    bucketer.flush()
    return [got[number] for number in range(40)]


CAPACITIES = (0, 100, 1000, 25 * 2**20)


@on(FOUR)
def capacities() -> Any:
    return [
        [trajectory(capacity, "reduce_scatter", dtype) for capacity in CAPACITIES]
        for dtype in (torch.float32, torch.bfloat16)
    ]


@on(TWO)
def capacities_of_two() -> Any:
    return [trajectory(capacity, "both", torch.float32) for capacity in CAPACITIES]


def test_no_bit_depends_on_the_capacity(
    two: list[dict[str, Any]], four: list[dict[str, Any]]
) -> None:
    """All-reduce for two ranks: gloo adds more in an order that depends on the place."""
    runs = [runs for reply in four for runs in reply["capacities"]]
    runs += [reply["capacities_of_two"] for reply in two]
    for first, *others in runs:
        assert others == [first] * 3


@on(FOUR)
def added_in_order() -> Any:
    """1e8, 1, -1e8, 1 by rank; in fp32 only in the order of ranks the sum is 1."""
    got: list[Any] = []
    value = [1e8, 1.0, -1e8, 1.0][rank()]
    bucketer = Bucketer()
    bucketer.reduce_scatter([torch.full((2,), value)] * 4, callback=got.append)
    bucketer.flush()
    return got[0].tolist()


def test_gloo_sums_are_added_in_the_order_of_ranks(four: list[dict[str, Any]]) -> None:
    assert [reply["added_in_order"] for reply in four] == [[1.0, 1.0]] * 4


@on(FOUR)
def in_pieces() -> Any:
    """Rows of 7 pieces, the last one shorter, and of one; in place, as a bucket's are, or not."""
    found = []
    with mock.patch.object(shard_sums, "_PIECE_BYTES", 64):
        for numel in (100, 16, 5):
            rows = [torch.arange(numel) * 10.0**row + rank() for row in range(4)]
            output, common = torch.zeros(numel), torch.ones(3)
            collectives.reduce_scatter(output, rows, None, common=common)
            collectives.reduce_scatter(rows[rank()], rows, None)
            found.append((output.tolist(), rows[rank()].tolist(), common.tolist()))
    return found


def test_gloo_sums_rows_in_pieces(four: list[dict[str, Any]]) -> None:
    for row, reply in enumerate(four):
        for numel, (out, in_place, common) in zip((100, 16, 5), reply["in_pieces"], strict=True):
            expected = [4 * i * 10.0**row + 6 for i in range(numel)]
            assert (out, in_place, common) == (expected, expected, [4.0] * 3)


@dataclass(frozen=True)
class Call:
    """One call of all ranks of a group; every rank's input follows from the number."""

    number: int
    kind: str
    ranks: list[int]
    shape: tuple[int, ...]
    dtype: torch.dtype

    def inputs(self, of: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * self.number + of)
        rows = len(self.ranks) if self.kind == "reduce_scatter" else 1
        return list(torch.randint(-9, 9, (rows, *self.shape), generator=generator).to(self.dtype))

    def expected(self) -> torch.Tensor:
        """What one process computes for this rank."""
        row = self.ranks.index(rank()) if self.kind == "reduce_scatter" else 0
        total = torch.zeros(self.shape, dtype=self.dtype)
        for other in self.ranks:
            total += self.inputs(other)[row]
        return total


class Mixture:
    """Random calls, the same on all ranks; each rank to the world or to its own pair of ranks."""

    def __init__(self, seed: int, pair: dist.ProcessGroup) -> None:
        self.random = random.Random(seed)
        self.groups = {"world": dist.group.WORLD, "pair": pair}
        self.bucketer = Bucketer(capacity_bytes=200)
        self.number = 0
        self.order: list[int] = []
        self.wrong: list[Any] = []

    def call(self) -> None:
        """Makes one call; one callback in six makes another."""
        self.number += 1
        group = self.groups[self.random.choice(["world", "pair"])]
        call = Call(
            self.number,
            self.random.choice(["reduce_scatter", "all_reduce"]),
            dist.get_process_group_ranks(group),
            self.random.choice([(), (0,), (3,), (2, 5), (4, 4), (9, 9)]),
            self.random.choice([torch.float32, torch.float64, torch.int64, torch.bfloat16]),
        )
        again = self.random.random() < 1 / 6

        def use(view: torch.Tensor) -> None:
            self.order.append(call.number)
            right = call.expected()
            if (view.dtype, view.tolist()) != (right.dtype, right.tolist()):
                self.wrong.append((call, view, right))
            if again:
                self.call()

        rows = call.inputs(rank())
        if call.kind == "reduce_scatter":
            self.bucketer.reduce_scatter(rows, group=group, callback=use)
        else:
            self.bucketer.all_reduce(rows[0], group=group, callback=use)

    def run(self, num_calls: int) -> tuple[list[int], int, list[Any]]:
        """Returns the order of callbacks, how many calls there were, and what was wrong."""
        for _ in range(num_calls):
            chance = self.random.random()
            if chance < 0.05:
                self.bucketer.flush()
            elif chance < 0.15:
                self.bucketer.capacity_bytes = self.random.choice([0, 100, 500, 3000])
            self.call()
        self.bucketer.flush()
        self.bucketer.release()
        return self.order, self.number, self.wrong


@on(FOUR)
def mixtures() -> Any:
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    found = []
    for seed in range(4):
        with spied() as log:
            order_of_calls, number, wrong = Mixture(seed, pairs[rank() % 2]).run(120)
        found.append((order_of_calls, number, wrong, [entry[:3] for entry in log]))
    return found


def test_any_mixture_of_calls_gives_the_sums_of_one_process(four: list[dict[str, Any]]) -> None:
    for order_of_calls, number, wrong, _ in four[0]["mixtures"]:
        assert number >= 120
        assert sorted(order_of_calls) == list(range(1, number + 1))  # each once
        assert wrong == []


def test_callbacks_and_collectives_have_one_order_on_all_ranks(four: list[dict[str, Any]]) -> None:
    assert [reply["mixtures"] for reply in four[1:]] == [four[0]["mixtures"]] * 3
    assert all(called != sorted(called) for called, *_ in four[0]["mixtures"])


@on(FOUR)
def subgroup() -> Any:
    """Ranks 3 and 1, in this order; the others are refused, and touch nothing."""
    group = dist.new_group([3, 1], use_local_synchronization=False)
    bucketer, got = Bucketer(), list[Any]()
    rows = [torch.full((2,), 10.0 * j + rank()) for j in range(2)]
    words = outcome(lambda: bucketer.reduce_scatter(rows, group=group, callback=got.append))
    bucketer.flush()
    ranks = dist.get_process_group_ranks(group) if rank() in (1, 3) else []
    return words, ranks, [view.tolist() for view in got], bucketer.allocated_bytes


def test_a_subgroup_without_rank_zero(four: list[dict[str, Any]]) -> None:
    refused: Any = (
        "PlanError: reduce_scatter: this rank is not in the group, only its ranks call", [], [], 0
    )  # fmt: skip
    assert four[0]["subgroup"] == four[2]["subgroup"] == refused
    ranks = four[1]["subgroup"][1]
    for number in (1, 3):
        words, _, got, _ = four[number]["subgroup"]
        at = ranks.index(number)
        assert (words, got) == ("None", [[20.0 * at + 4.0] * 2])
