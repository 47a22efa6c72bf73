"""Bucketer: what leaves when, what callbacks get, and what is left behind when something fails."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from pipegrad import Bucketer
from pipegrad.gradients import bucketer as module
from pipegrad.gradients import collective
from pipegrad.gradients.buffer import FlatBuffer
from tests.gradients.cases import Case, bits, on, outcome, rank, run_world

TWO: list[Case] = []
FOUR: list[Case] = []
Collective = tuple[str, int, str, tuple[int, ...]]  # kind, elements a rank gets, dtype, ranks


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run_world(2, TWO)


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    return run_world(4, FOUR)


@contextlib.contextmanager
def spied() -> Iterator[list[Collective]]:
    """Writes down every collective, in the order in which this rank issues them."""
    log: list[Collective] = []
    scatter, reduce = collective.reduce_scatter, dist.all_reduce

    def note(kind: str, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        ranks = tuple(dist.get_process_group_ranks(group))
        log.append((kind, tensor.numel(), str(tensor.dtype), ranks))

    def reduce_scatter(output: Any, rows: Any, group: Any) -> None:
        note("reduce_scatter", output, group)
        scatter(output, rows, group)

    def all_reduce(tensor: Any, *, group: Any) -> None:
        note("all_reduce", tensor, group)
        reduce(tensor, group=group)

    with (
        mock.patch.object(collective, "reduce_scatter", reduce_scatter),
        mock.patch.object(dist, "all_reduce", all_reduce),
    ):
        yield log


def inputs(numel: int, value: float = 1.0) -> list[torch.Tensor]:
    """One tensor for each rank r, which sums to ``num_ranks * (value + 100 r)``."""
    return [torch.full((numel,), value + 100.0 * r) for r in range(dist.get_world_size())]


class Calls:
    """A bucketer whose callbacks write down the value they got, less what is due to the rank."""

    def __init__(self, capacity_floats: int) -> None:
        """Capacity in elements of a row of fp32."""
        self.num_ranks = dist.get_world_size()
        self.bucketer = Bucketer(capacity_bytes=self.num_ranks * 4 * capacity_floats)
        self.got: list[Any] = []

    def add(self, numel: int, value: float) -> int:
        """Returns how many callbacks have run when the call returns."""
        self.bucketer.reduce_scatter(inputs(numel, value), callback=self.note)
        return len(self.got)

    def note(self, view: torch.Tensor) -> None:
        values = [x / self.num_ranks - 100 * rank() for x in view.unique().tolist()]
        self.got.append((view.numel(), *values))

    def flush(self) -> list[Any]:
        """Returns what callbacks got since the last time: ``(numel, value)``."""
        self.bucketer.flush()
        got, self.got = self.got, []
        return got


# --- what leaves when


@on(FOUR)
def queued() -> Any:
    calls = Calls(10)
    with spied() as log:
        counts = [calls.add(3, value) for value in (1.0, 2.0, 3.0)]
        return counts, calls.flush(), log


def test_small_inputs_wait_for_flush_and_share_a_collective(four: list[dict[str, Any]]) -> None:
    sent = [("reduce_scatter", 9, "torch.float32", (0, 1, 2, 3))]
    right = ([0, 0, 0], [(3, 1.0), (3, 2.0), (3, 3.0)], sent)
    assert [reply["queued"] for reply in four] == [right] * 4


@on(FOUR)
def exact_fit() -> Any:
    """Full buckets leave at once: seen by the callbacks that three in flight bring about."""
    calls = Calls(4)
    with spied() as log:
        counts = [calls.add(2, value) for value in range(1, 7)]
        return counts, len(calls.flush()), [numel for _, numel, _, _ in log]


def test_a_bucket_that_is_exactly_full_leaves_at_once(four: list[dict[str, Any]]) -> None:
    assert [reply["exact_fit"] for reply in four] == [([0, 0, 0, 0, 0, 2], 6, [4, 4, 4])] * 4


@on(FOUR)
def overflow() -> Any:
    calls = Calls(5)
    with spied() as log:
        counts = [calls.add(3, value) for value in range(1, 6)]
        return counts, calls.flush(), [numel for _, numel, _, _ in log]


def test_a_bucket_leaves_before_an_input_that_does_not_fit(four: list[dict[str, Any]]) -> None:
    got = [(3, float(value)) for value in range(1, 6)]
    assert [reply["overflow"] for reply in four] == [([0, 0, 0, 1, 2], got, [3] * 5)] * 4


@on(FOUR)
def oversized() -> Any:
    calls = Calls(4)
    with spied() as log:
        for numel, value in ((1, 1.0), (5, 2.0), (1, 3.0)):
            calls.add(numel, value)
        return calls.flush(), [numel for _, numel, _, _ in log]


def test_what_is_larger_than_the_capacity_overtakes_what_is_queued(
    four: list[dict[str, Any]],
) -> None:
    right = ([(5, 2.0), (1, 1.0), (1, 3.0)], [5, 2])
    assert [reply["oversized"] for reply in four] == [right] * 4


@on(FOUR)
def unbucketed() -> Any:
    calls = Calls(0)
    with spied() as log:
        counts = [calls.add(numel, 1.0) for numel in (1, 2, 0, 3, 4)]
        return counts, calls.flush(), [numel for _, numel, _, _ in log]


def test_capacity_zero_makes_every_call_a_collective(four: list[dict[str, Any]]) -> None:
    got = [(1, 1.0), (2, 1.0), (0,), (3, 1.0), (4, 1.0)]
    assert [reply["unbucketed"] for reply in four] == [([0, 0, 1, 2, 3], got, [1, 2, 3, 4])] * 4


@on(FOUR)
def empty() -> Any:
    calls = Calls(4)
    found = []
    for numels in ((0, 0), (0, 1), (1, 0), (5, 0)):
        with spied() as log:
            for numel in numels:
                calls.add(numel, 1.0)
            found.append((calls.flush(), [numel for _, numel, _, _ in log]))
    shapes: list[Any] = []
    calls.bucketer.all_reduce(torch.zeros(3, 0, 2), callback=lambda view: shapes.append(view.shape))
    calls.bucketer.flush()
    return found, [tuple(shape) for shape in shapes]


def test_empty_inputs_call_back_in_order_and_alone_send_nothing(four: list[dict[str, Any]]) -> None:
    right = [
        ([(0,), (0,)], []),
        ([(0,), (1, 1.0)], [1]),
        ([(1, 1.0), (0,)], [1]),
        ([(5, 1.0), (0,)], [5]),
    ]
    assert [reply["empty"] for reply in four] == [(right, [(3, 0, 2)])] * 4


@on(FOUR)
def resized() -> Any:
    """Capacity 4, 8 and 2, with inputs queued at each change."""
    calls = Calls(4)
    unit = 4 * calls.num_ranks
    with spied() as log:
        calls.add(3, 1.0)
        calls.bucketer.capacity_bytes = 8 * unit
        for value in (2.0, 3.0, 4.0):  # the first does not fit into what was begun before
            calls.add(3, value)
        calls.bucketer.capacity_bytes = 2 * unit
        for numel in (2, 1, 0, 2, 3):  # the last alone, as all above the capacity are
            calls.add(numel, 5.0)
        got = calls.flush()
    return [numel for numel, *_ in got], [numel for _, numel, _, _ in log]


def test_a_changed_capacity_counts_from_the_next_call(four: list[dict[str, Any]]) -> None:
    right = ([3, 3, 3, 3, 2, 1, 0, 2, 3], [3, 6, 3, 2, 1, 2, 3])
    assert [reply["resized"] for reply in four] == [right] * 4


@on(FOUR)
def bounded() -> Any:
    calls = Calls(4)
    seen, counts = [], []
    for value in range(20):
        counts.append(calls.add(4, float(value)))
        seen.append(calls.bucketer.allocated_bytes)
    calls.flush()
    return counts, max(seen), calls.bucketer.allocated_bytes


def test_no_more_than_two_buckets_are_in_flight_when_a_call_returns(
    four: list[dict[str, Any]],
) -> None:
    """Each with four rows of staging and one of result; one more was in use during the call."""
    counts = [0, 0, *range(1, 19)]
    row = 4 * 4
    assert [reply["bounded"] for reply in four] == [(counts, (3 * 4 + 2) * row, 3 * 4 * row)] * 4


@on(FOUR)
def keys() -> Any:
    """Kinds, dtypes and groups apart, also groups of the same ranks; each in its own bucket."""
    bucketer, got = Bucketer(), list[Any]()
    again = dist.new_group([0, 1, 2, 3])
    ones = [torch.ones(2) for _ in range(4)]
    with spied() as log:
        for _ in range(2):
            bucketer.reduce_scatter(ones, callback=got.append)
            bucketer.reduce_scatter([x.double() for x in ones], callback=got.append)
            bucketer.reduce_scatter(ones, callback=got.append, group=again)
            bucketer.reduce_scatter(ones, callback=got.append, group=dist.group.WORLD)
            bucketer.all_reduce(ones[0], callback=got.append)
            bucketer.all_reduce(ones[0].to(torch.int32), callback=got.append)
        bucketer.flush()
    return log, [view.tolist() for view in got]


def test_only_inputs_of_one_kind_dtype_and_group_share_a_bucket(four: list[dict[str, Any]]) -> None:
    world = (0, 1, 2, 3)
    log = [
        ("reduce_scatter", 8, "torch.float32", world),
        ("reduce_scatter", 4, "torch.float64", world),
        ("reduce_scatter", 4, "torch.float32", world),
        ("all_reduce", 4, "torch.float32", world),
        ("all_reduce", 4, "torch.int32", world),
    ]
    assert [reply["keys"] for reply in four] == [(log, [[4, 4]] * 12)] * 4


# --- what goes in and comes out


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


# --- any mixture of calls


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


# --- callbacks


def raising(calls: Calls, value: float) -> Callable[[torch.Tensor], None]:
    def use(view: torch.Tensor) -> None:
        calls.note(view)
        raise ValueError(f"callback {value}")

    return use


def run_raising(raises: bool) -> Any:
    calls = Calls(4)
    with spied() as log:
        for value in (1.0, 2.0, 3.0, 4.0):
            bad = raises and value in (2.0, 3.0)
            callback = raising(calls, value) if bad else calls.note
            calls.bucketer.reduce_scatter(inputs(2, value), callback=callback)
        notes = None
        try:
            calls.bucketer.flush()
        except ValueError as error:
            notes = [str(error), *error.__notes__]
        again = outcome(calls.bucketer.flush)
        sent = len(log)
    return notes, again, [value for _, value in calls.got], sent


@on(FOUR)
def raising_on_one() -> Any:
    return run_raising(rank() == 1)


@on(FOUR)
def raising_on_all() -> Any:
    return run_raising(True)


def test_a_callback_that_raises_stops_no_other_and_sends_nothing_again(
    four: list[dict[str, Any]],
) -> None:
    fine = (None, "None", [1.0, 2.0, 3.0, 4.0], 2)
    notes = ["callback 2.0", "A callback also raised ValueError: callback 3.0"]
    raised = (notes, *fine[1:])
    assert [reply["raising_on_one"] for reply in four] == [fine, raised, fine, fine]
    assert [reply["raising_on_all"] for reply in four] == [raised] * 4


@on(FOUR)
def raising_in_a_call() -> Any:
    """The first callback runs inside the third call."""
    calls = Calls(0)
    calls.bucketer.reduce_scatter(inputs(1), callback=raising(calls, 1.0))
    later = [outcome(partial(calls.add, 1, value)) for value in (2.0, 3.0, 4.0)]
    held = outcome(calls.bucketer.release)
    raised = outcome(calls.bucketer.flush)
    return later, held, raised, len(calls.got), outcome(calls.bucketer.release)


def test_what_a_callback_raises_inside_a_call_waits_for_flush(four: list[dict[str, Any]]) -> None:
    held = (
        "StepError: release() with 0 buckets queued, 2 in flight and 1 callbacks' errors not "
        "raised yet: flush() first"
    )
    right = (["0", "1", "2"], held, "ValueError: callback 1.0", 4, "None")
    assert [reply["raising_in_a_call"] for reply in four] == [right] * 4


@on(FOUR)
def chained() -> Any:
    """What hybrid sharding does: the sum within a node is summed between nodes."""
    world = dist.get_world_size()
    calls = Calls(6)
    sums: list[Any] = []

    def on_to_all(view: torch.Tensor) -> None:
        calls.bucketer.all_reduce(view, callback=lambda total: sums.append(total.tolist()))

    with spied() as log:
        for value in range(9):
            calls.bucketer.reduce_scatter(inputs(2, float(value)), callback=on_to_all)
        calls.bucketer.flush()
    one = [[world * (world * value + 600.0)] * 2 for value in range(9)]
    return sums == one, [kind for kind, *_ in log].count("all_reduce") < 9


def test_callbacks_may_add_and_flush_runs_theirs_too(four: list[dict[str, Any]]) -> None:
    assert [reply["chained"] for reply in four] == [(True, True)] * 4


@on(FOUR)
def nested() -> Any:
    calls = Calls(4)
    words: list[str] = []

    def use(view: torch.Tensor) -> None:
        calls.note(view)
        words.append(outcome(calls.bucketer.flush))
        words.append(outcome(calls.bucketer.release).split(":")[0])

    calls.bucketer.reduce_scatter(inputs(1), callback=use)
    return calls.flush(), words


def test_flush_and_release_in_a_callback_are_refused(four: list[dict[str, Any]]) -> None:
    words = [
        "StepError: flush() in a callback: whoever runs it sends what callbacks add",
        "StepError",
    ]
    assert [reply["nested"] for reply in four] == [([(1, 1.0)], words)] * 4


# --- memory and failure


@on(FOUR)
def steady() -> Any:
    """How many buffers each of four rounds makes; each fills three buckets of eight floats."""
    bucketer = Bucketer(capacity_bytes=4 * 4 * 8)
    made = []
    for _ in range(4):
        with mock.patch.object(module, "FlatBuffer", wraps=FlatBuffer) as counter:
            for _ in range(6):
                bucketer.reduce_scatter([torch.ones(4)] * 4, callback=lambda view: None)
            bucketer.flush()
        made.append(counter.call_count)
    return made, bucketer.allocated_bytes


def test_staging_is_used_again(four: list[dict[str, Any]]) -> None:
    """Three results a round, which belong to who holds a view; stagings in the first one only."""
    assert [reply["steady"] for reply in four] == [([3 + 3, 3, 3, 3], 3 * 4 * 4 * 8)] * 4


@on(FOUR)
def released() -> Any:
    calls = Calls(4)
    others = set(threading.enumerate())
    found: list[Any] = []
    for _ in range(2):
        calls.add(1, 1.0)
        found.append(outcome(calls.bucketer.release).split(",")[0])
        calls.add(4, 1.0)  # does not fit, and fills a bucket of its own
        calls.bucketer.capacity_bytes //= 2  # leaves no use for the staging
        found.append(calls.flush())
        calls.add(1, 1.0)
        calls.flush()
        calls.bucketer.release()
        calls.bucketer.capacity_bytes *= 2
        found.append(calls.bucketer.allocated_bytes)
    calls.bucketer.release()  # with nothing there
    for thread in set(threading.enumerate()) - others:
        thread.join(5)
    return found, set(threading.enumerate()) <= others


def test_release_frees_everything_and_the_bucketer_goes_on(four: list[dict[str, Any]]) -> None:
    refused = "StepError: release() with 1 buckets queued"
    right = ([refused, [(1, 1.0), (4, 1.0)], 0] * 2, True)
    assert [reply["released"] for reply in four] == [right] * 4


@on(FOUR)
def broken() -> Any:
    """The second collective fails, on all ranks so that none hangs; a third is on its way."""
    calls = Calls(4)
    calls.bucketer.reduce_scatter(inputs(4), callback=raising(calls, 1.0))
    send = collective.reduce_scatter
    fails = iter([False, True, False])

    def sometimes(output: Any, rows: Any, group: Any) -> None:
        if next(fails):
            raise RuntimeError("cable pulled")
        send(output, rows, group)

    found: list[Any] = [outcome(calls.bucketer.flush)]
    with mock.patch.object(collective, "reduce_scatter", sometimes):
        calls.bucketer.reduce_scatter(inputs(4, 1.0), callback=raising(calls, 1.0))
        calls.add(4, 2.0)
        found.append(outcome(lambda: calls.add(4, 3.0)))
        try:
            calls.bucketer.flush()
        except Exception as error:  # noqa: BLE001 - whatever it is, is asserted
            found.append((f"{type(error).__name__}: {error}", getattr(error, "__notes__", [])))
    found.append([value for _, value in calls.got])
    words = [
        outcome(calls.bucketer.flush),
        outcome(lambda: calls.add(1, 1.0)),
        outcome(lambda: calls.bucketer.all_reduce(torch.ones(1), callback=calls.note)),
    ]
    held = calls.bucketer.allocated_bytes > 0
    calls.bucketer.release()
    words.append(outcome(calls.bucketer.flush))
    return found, words, held, calls.bucketer.allocated_bytes


def test_after_a_failed_collective_the_bucketer_says_so_and_can_only_be_released(
    four: list[dict[str, Any]],
) -> None:
    failure = (
        "reduce_scatter of 64 bytes of torch.float32 on cpu over ranks [0, 1, 2, 3] failed: "
        "cable pulled"
    )
    first = ["ValueError: callback 1.0", "2", (
        f"ReduceError: {failure}", ["A callback also raised ValueError: callback 1.0"]
    ), [1.0, 1.0]]  # fmt: skip
    ever_after = (
        "ReduceError: this Bucketer is of no use since a collective failed, its groups are out of "
        f"step; release() it, then make new groups and a new Bucketer: {failure}"
    )
    assert [reply["broken"] for reply in four] == [(first, [ever_after] * 4, True, 0)] * 4


# --- refusals


@on(TWO)
def refusals() -> Any:
    bucketer = Bucketer()
    one = torch.ones(2)
    spoilt: dict[str, Any] = {
        "number": [one],
        "shapes": [one, torch.ones(3)],
        "dtypes": [one, one.double()],
        "devices": [one, one.to("meta")],
        "sparse": [one.to_sparse()] * 2,
        "bool": [one.bool()] * 2,
    }
    words = {
        name: outcome(partial(bucketer.reduce_scatter, rows, callback=print))
        for name, rows in spoilt.items()
    }
    some: Any = "print"
    words["callback"] = outcome(lambda: bucketer.all_reduce(one, callback=some))
    untouched = bucketer.allocated_bytes
    for wrong in (-1, 1e6):
        given: Any = wrong
        words[f"made with {wrong}"] = outcome(partial(Bucketer, capacity_bytes=given))
        bucketer.capacity_bytes = given
        words[f"set to {wrong}"] = outcome(partial(bucketer.all_reduce, one, callback=print))
    return words, untouched


def test_what_cannot_be_summed_is_refused_before_anything_is_touched(
    two: list[dict[str, Any]],
) -> None:
    one = "(2,) torch.float32 cpu torch.strided"
    differ = "reduce_scatter: expected inputs of one shape, dtype and device, found"
    right = {
        "number": "reduce_scatter: 1 inputs, expected 2: one for each of the ranks [0, 1]",
        "shapes": f"{differ} {one}; (3,) torch.float32 cpu torch.strided",
        "dtypes": f"{differ} {one}; (2,) torch.float64 cpu torch.strided",
        "devices": f"{differ} {one}; (2,) torch.float32 meta torch.strided",
        "sparse": "reduce_scatter: inputs are torch.sparse_coo, expected torch.strided: use "
        "to_dense()",
        "bool": "reduce_scatter: inputs are torch.bool, which has no sum: use an integer dtype",
        "callback": "all_reduce: callback is 'print', expected a function of the sum",
        "made with -1": "capacity_bytes is -1, expected an int from 0 on",
        "set to -1": "capacity_bytes is -1, expected an int from 0 on",
        "made with 1000000.0": "capacity_bytes is 1000000.0, expected an int from 0 on",
        "set to 1000000.0": "capacity_bytes is 1000000.0, expected an int from 0 on",
    }
    expected = {name: f"PlanError: {words}" for name, words in right.items()}
    assert [reply["refusals"] for reply in two] == [(expected, 0)] * 2


# --- other backends


@on(FOUR)
def elsewhere() -> Any:
    """The way of backends that reduce-scatter themselves; gloo stands in for them."""
    calls = Calls(4)
    got: list[Any] = []
    copies: list[int] = []
    join = torch.cat

    def cat(tensors: Any) -> torch.Tensor:
        copies.append(len(tensors))
        return join(tensors)

    with (
        mock.patch.object(collective, "backend_of", return_value="other"),
        mock.patch.object(torch, "cat", cat),
    ):
        for numel in (4, 3, 5):  # full, not full, alone
            calls.add(numel, 1.0)
        imaginary = [torch.full((2,), 1.0 + 1j * r) for r in range(4)]
        calls.bucketer.reduce_scatter(imaginary, callback=lambda view: got.append(view.tolist()))
        return calls.flush(), got, len(copies)


def test_other_backends_get_one_tensor_and_full_buckets_are_not_copied(
    four: list[dict[str, Any]],
) -> None:
    for number, reply in enumerate(four):
        sums = [(4, 1.0), (5, 1.0), (3, 1.0)]
        assert reply["elsewhere"] == (sums, [[4.0 + 4j * number] * 2], 1)
