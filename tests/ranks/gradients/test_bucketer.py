"""Bucketer: what leaves when, and what stays in memory."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from pipegrad import Bucketer
from pipegrad.comm import messages
from tests.support.gradients.cases import Case, on, replies
from tests.support.gradients.sums import Calls, spied

FOUR: list[Case] = []


four = replies(4, FOUR)


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
        mock.patch.object(messages, "backend_of", return_value="other"),
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
