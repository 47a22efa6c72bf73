"""Bucketer: what leaves when, what stays in memory, and the sums of one process."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from pipegrad import Bucketer
from pipegrad.comm import collectives
from pipegrad.errors import ReduceError
from tests.support.gradients.cases import bits, outcome, rank
from tests.support.ranked import gathered

pytestmark = pytest.mark.ranks(2)

Collective = tuple[str, int, str, tuple[int, ...]]  # kind, elements a rank gets, dtype, ranks


@contextlib.contextmanager
def spied() -> Iterator[list[Collective]]:
    """Writes down every collective, in the order in which this rank issues them."""
    log: list[Collective] = []
    scatter, reduce = collectives.reduce_scatter, collectives.all_reduce

    def note(kind: str, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        ranks = tuple(dist.get_process_group_ranks(group))
        log.append((kind, tensor.numel(), str(tensor.dtype), ranks))

    def reduce_scatter(output: Any, rows: Any, group: Any) -> None:
        note("reduce_scatter", output, group)
        scatter(output, rows, group)

    def all_reduce(tensor: Any, group: Any) -> None:
        note("all_reduce", tensor, group)
        reduce(tensor, group)

    with (
        mock.patch.object(collectives, "reduce_scatter", reduce_scatter),
        mock.patch.object(collectives, "all_reduce", all_reduce),
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


# Elements of each call, callbacks that have run when each returns, and their order.
@pytest.mark.parametrize(
    "row",  # with the capacity in front, and what is sent behind
    [
        (10, [3, 3, 3], [0, 0, 0], [1, 2, 3], [9]),  # small ones wait for flush
        (4, [2] * 6, [0, 2, 2, 4, 4, 6], [1, 2, 3, 4, 5, 6], [4, 4, 4]),  # full ones at once
        (5, [3] * 5, [0, 1, 2, 3, 4], [1, 2, 3, 4, 5], [3] * 5),  # before what does not fit
        (4, [1, 5, 1], [0, 1, 1], [2, 1, 3], [5, 2]),  # larger than the capacity: overtakes
        (0, [1, 2, 0, 3, 4], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [1, 2, 3, 4]),  # all alone
        (4, [0, 0], [0, 0], [1, 2], []),  # empty ones alone send nothing
        (4, [0, 1], [0, 0], [1, 2], [1]),
        (4, [5, 0], [1, 1], [1, 2], [5]),
    ],
)
def test_what_leaves_when(row: Any) -> None:
    capacity, numels, callbacks, order, collectives = row
    calls = Calls(capacity)
    with spied() as log:
        counts = [calls.add(numel, float(number)) for number, numel in enumerate(numels, 1)]
        sums = calls.flush()
    assert sums == [(n, float(at)) if (n := numels[at - 1]) else (0,) for at in order]
    assert log == [("reduce_scatter", numel, "torch.float32", (0, 1)) for numel in collectives]
    assert counts == callbacks


def test_inputs_of_one_kind_share_a_bucket_up_to_the_capacity() -> None:
    # A changed capacity counts from the next call.
    calls = Calls(4)
    unit = 4 * calls.num_ranks
    with spied() as log:
        calls.add(3, 1.0)
        calls.bucketer.capacity_bytes = 8 * unit
        for value in (2.0, 3.0, 4.0):  # what was begun before waits for flush
            calls.add(3, value)
        calls.bucketer.capacity_bytes = 2 * unit
        for numel in (2, 1, 0, 2, 3):  # the last alone, as all above the capacity are
            calls.add(numel, 5.0)
        assert [numel for numel, *_ in calls.flush()] == [3, 3, 2, 1, 0, 2, 3, 3, 3]
    assert [numel for _, numel, _, _ in log] == [6, 2, 1, 2, 3, 3, 3]
    # Only inputs of one kind dtype and group share a bucket.
    bucketer, sums = Bucketer(), list[torch.Tensor]()
    again = dist.new_group([0, 1])  # of the same ranks, and yet another group
    ones = [torch.ones(2)] * 2
    with spied() as log:
        for _ in range(2):
            bucketer.reduce_scatter(ones, callback=sums.append)
            bucketer.reduce_scatter([x.double() for x in ones], callback=sums.append)
            bucketer.reduce_scatter(ones, callback=sums.append, group=again)
            bucketer.reduce_scatter(ones, callback=sums.append, group=dist.group.WORLD)
            bucketer.all_reduce(ones[0], callback=sums.append)
            bucketer.all_reduce(ones[0].to(torch.int32), callback=sums.append)
        bucketer.flush()
    assert log == [
        ("reduce_scatter", 8, "torch.float32", (0, 1)),
        ("reduce_scatter", 4, "torch.float64", (0, 1)),
        ("reduce_scatter", 4, "torch.float32", (0, 1)),
        ("all_reduce", 4, "torch.float32", (0, 1)),
        ("all_reduce", 4, "torch.int32", (0, 1)),
    ]
    assert [view.tolist() for view in sums] == [[2, 2]] * 12


@pytest.mark.ranks(4)
def test_other_backends_get_one_tensor_and_full_buckets_are_not_copied() -> None:
    # The way of backends that reduce-scatter themselves; gloo stands in for them.
    calls, sums, copies = Calls(4), list[Any](), mock.Mock(wraps=torch.cat)
    with (
        mock.patch.object(collectives, "backend_of", return_value="other"),
        mock.patch.object(torch, "cat", copies),
    ):
        for numel in (4, 3, 5):  # full, not full, alone
            calls.add(numel, 1.0)
        imaginary = [torch.full((2,), 1.0 + 1j * r) for r in range(4)]
        calls.bucketer.reduce_scatter(imaginary, callback=lambda view: sums.append(view.tolist()))
        assert calls.flush() == [(4, 1.0), (5, 1.0), (3, 1.0)]
    assert sums == [[4.0 + 4j * rank()] * 2]
    assert copies.call_count == 1


def test_staging_of_inference_mode_is_used_outside_of_it_and_the_reverse() -> None:
    calls, sums = Calls(4), list[float]()
    for mode in (True, False, True):
        with torch.inference_mode(mode=mode):
            calls.add(2, 1.0)
            calls.bucketer.all_reduce(torch.ones(2), callback=lambda x: sums.append(x.sum().item()))
            if mode:
                calls.bucketer.flush()
    calls.add(2, 2.0)
    calls.add(2, 3.0)
    assert sorted(value for _, value in calls.flush()) == [1.0, 1.0, 1.0, 2.0, 3.0]
    assert sums == [4.0] * 3


# Bucketer: callbacks that raise or call, collectives that fail, memory, refusals.


def raising(calls: Calls, value: float) -> Callable[[torch.Tensor], None]:
    def use(view: torch.Tensor) -> None:
        calls.note(view)
        raise ValueError(f"callback {value}")

    return use


@pytest.mark.parametrize("ranks", [(1,), (0, 1)])
def test_a_callback_that_raises_loses_no_other_nor_sends_again(ranks: tuple[int, ...]) -> None:
    calls, words = Calls(4), list[str]()
    with spied() as log:
        for value in (1.0, 2.0, 3.0, 4.0):
            raises = rank() in ranks and value in (2.0, 3.0)
            callback = raising(calls, value) if raises else calls.note
            add = partial(calls.bucketer.reduce_scatter, inputs(2, value), callback=callback)
            words.append(outcome(add))
        if rank() in ranks:
            refused = "StepError: release() with 0 buckets queued and 1 callbacks not run yet"
            assert outcome(calls.bucketer.release).startswith(refused)
        calls.bucketer.flush()
    found = ["None", "ValueError: callback 2.0", "None", "ValueError: callback 3.0"]
    assert words == (found if rank() in ranks else ["None"] * 4)
    assert [value for _, value in calls.got] == [1.0, 2.0, 3.0, 4.0]
    assert len(log) == 2


def test_flush_and_release_in_a_callback_are_refused() -> None:
    calls, words = Calls(4), list[str]()

    def use(view: torch.Tensor) -> None:
        calls.note(view)
        words.extend(map(outcome, (calls.bucketer.flush, calls.bucketer.release)))

    calls.bucketer.reduce_scatter(inputs(1), callback=use)
    assert calls.flush() == [(1, 1.0)]
    flush, release = words
    assert flush == "StepError: flush() in a callback: whoever runs it sends what callbacks add"
    assert release.startswith("StepError: ")


def test_memory_is_used_again_and_released() -> None:
    calls, row = Calls(4), 2 * 4 * 4
    with mock.patch.object(torch, "empty", wraps=torch.empty) as empty:
        for _ in range(12):
            calls.add(3, 1.0)
        calls.flush()
    assert [call.args[:2] for call in empty.call_args_list].count((2, 4)) == 1
    assert calls.bucketer.allocated_bytes == row
    # Release frees everything and the bucketer goes on.
    for _ in range(2):
        calls.add(1, 1.0)
        refused = "StepError: release() with 1 buckets queued"
        assert outcome(calls.bucketer.release).startswith(refused)
        calls.add(5, 1.0)  # alone, in memory that goes
        assert calls.bucketer.allocated_bytes == row
        calls.bucketer.capacity_bytes //= 2  # leaves no use for the memory
        assert calls.flush() == [(5, 1.0), (1, 1.0)]
        assert calls.bucketer.allocated_bytes == 0
        calls.add(1, 1.0)
        calls.flush()
        calls.bucketer.release()
        calls.bucketer.capacity_bytes *= 2
        assert calls.bucketer.allocated_bytes == 0
    calls.bucketer.release()  # with nothing there


@pytest.mark.parametrize("error", [RuntimeError("cable pulled"), KeyboardInterrupt()])
def test_after_a_failed_collective_the_bucketer_can_only_be_released(error: BaseException) -> None:
    # On all ranks, so that none hangs.
    calls = Calls(4)
    calls.add(4, 1.0)
    calls.add(1, 2.0)
    words, raised = "reduce_scatter of 8 bytes of torch.float32", None
    with mock.patch.object(collectives, "reduce_scatter", side_effect=error):
        try:
            calls.add(4, 3.0)
        except (ReduceError, KeyboardInterrupt) as caught:
            raised = caught
    assert raised is error if isinstance(error, KeyboardInterrupt) else words in str(raised)
    assert [value for _, value in calls.got] == [1.0]
    ever_after = outcome(calls.bucketer.flush)
    assert ever_after.startswith("ReduceError: this Bucketer is of no use since a collective")
    assert f": {words}" in ever_after
    assert outcome(lambda: calls.add(1, 1.0)) == ever_after
    all_reduce = lambda: calls.bucketer.all_reduce(torch.ones(1), callback=calls.note)  # noqa: E731
    assert outcome(all_reduce) == ever_after
    assert calls.bucketer.allocated_bytes > 0
    calls.bucketer.release()
    assert calls.bucketer.allocated_bytes == 0
    assert outcome(calls.bucketer.flush) == ever_after


ONE = torch.ones(2)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([ONE], "1 inputs, expected 2: one for each of the ranks [0, 1]"),
        ([ONE, torch.ones(3)], "expected inputs of one shape, dtype and device, found (2,)"),
        ([ONE, ONE.double()], "expected inputs of one shape, dtype and device, found (2,)"),
        ([ONE, ONE.to("meta")], "expected inputs of one shape, dtype and device, found (2,)"),
        ([ONE.to_sparse()] * 2, "inputs are torch.sparse_coo, expected torch.strided"),
        ([ONE.bool()] * 2, "inputs are torch.bool, which has no sum"),
    ],
    ids=["number", "shapes", "dtypes", "devices", "sparse", "bool"],
)
def test_what_cannot_be_summed_is_refused_at_once(rows: list[torch.Tensor], words: str) -> None:
    bucketer = Bucketer()
    refused = outcome(lambda: bucketer.reduce_scatter(rows, callback=print))
    assert refused.startswith(f"PlanError: reduce_scatter: {words}")
    assert bucketer.allocated_bytes == 0


# Sums.


@pytest.mark.ranks(4)
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
    allocated = bucketer.allocated_bytes
    # A group calls without the others.
    group = dist.new_group([3, 1], use_local_synchronization=False)
    if rank() not in (1, 3):
        words = outcome(lambda: bucketer.reduce_scatter([ONE] * 2, group=group, callback=print))
        assert words.startswith("PlanError: reduce_scatter: this rank is not in the group")
        assert bucketer.allocated_bytes == allocated


def test_what_is_overwritten_changes_no_sum() -> None:
    calls, sums = Calls(64), list[Any]()
    for _ in range(2):
        mine, total = inputs(3, 1.0), torch.full((3,), 5.0)
        calls.bucketer.reduce_scatter(mine, callback=calls.note)
        calls.bucketer.all_reduce(total, callback=lambda view: sums.append(view.tolist()))
        for tensor in (*mine, total):
            tensor.fill_(7e7)
    assert calls.flush() == [(3, 1.0)] * 2
    assert sums == [[10.0] * 3] * 2
    # Sums stay valid as long as they are held.
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


@pytest.mark.ranks(4)
def test_no_bit_of_a_reduce_scatter_depends_on_the_capacity() -> None:
    def trajectory(capacity_bytes: int) -> list[list[int]]:
        torch.manual_seed(rank())
        bucketer, sums = Bucketer(capacity_bytes=capacity_bytes), list[torch.Tensor]()
        for number in range(40):
            rows = torch.randn(4, (7 * number) % 23) * 10 ** (number % 5)
            bucketer.reduce_scatter(list(rows.bfloat16()), callback=sums.append)
        bucketer.flush()
        return sorted(bits(view.float()) for view in sums)

    first, *others = map(trajectory, (0, 100, 1000, 25 * 2**20))
    assert others == [first] * 3


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.int64, torch.int32, torch.int8, torch.uint8),
]


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
        shape = self.random.choice([(), (0,), (3, 0, 2), (3,), (2, 5), (9, 9)])
        dtype = self.random.choice(DTYPES)
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
            assert (view.dtype, view.shape) == (dtype, shape)
            assert view.tolist() == right.tolist()
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


@pytest.mark.ranks(4)
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
