"""Bucketer: what leaves when, and what stays in memory."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from pipegrad import Bucketer
from pipegrad.comm import messages
from tests.support.gradients.cases import rank
from tests.support.gradients.sums import Calls, spied

pytestmark = pytest.mark.ranks(2)


@pytest.mark.parametrize(
    ("capacity", "numels", "callbacks", "order", "collectives"),
    [
        (10, [3, 3, 3], [0, 0, 0], [1, 2, 3], [9]),  # small ones wait for flush
        # Exactly full buckets leave at once: seen by callbacks that three in flight bring about.
        (4, [2] * 6, [0, 0, 0, 0, 0, 2], [1, 2, 3, 4, 5, 6], [4, 4, 4]),
        (5, [3] * 5, [0, 0, 0, 1, 2], [1, 2, 3, 4, 5], [3] * 5),  # before what does not fit
        (4, [1, 5, 1], [0, 0, 0], [2, 1, 3], [5, 2]),  # larger than the capacity: overtakes
        (0, [1, 2, 0, 3, 4], [0, 0, 1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 3, 4]),  # all alone
        (4, [0, 0], [0, 0], [1, 2], []),  # empty ones alone send nothing
        (4, [0, 1], [0, 0], [1, 2], [1]),
        (4, [1, 0], [0, 0], [1, 2], [1]),
        (4, [5, 0], [0, 0], [1, 2], [5]),
    ],
)
def test_what_leaves_when(
    capacity: int,
    numels: list[int],  # of each call
    callbacks: list[int],  # that have run when each call returns
    order: list[int],  # of the callbacks
    collectives: list[int],
) -> None:
    calls = Calls(capacity)
    with spied() as log:
        counts = [calls.add(numel, float(number)) for number, numel in enumerate(numels, 1)]
        sums = calls.flush()
    assert sums == [(n, float(at)) if (n := numels[at - 1]) else (0,) for at in order]
    assert log == [("reduce_scatter", numel, "torch.float32", (0, 1)) for numel in collectives]
    assert counts == callbacks


def test_an_empty_input_has_its_shape() -> None:
    bucketer, shapes = Bucketer(), list[torch.Size]()
    bucketer.all_reduce(torch.zeros(3, 0, 2), callback=lambda view: shapes.append(view.shape))
    bucketer.flush()
    assert shapes == [(3, 0, 2)]


def test_a_changed_capacity_counts_from_the_next_call() -> None:
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
        assert [numel for numel, *_ in calls.flush()] == [3, 3, 3, 3, 2, 1, 0, 2, 3]
    assert [numel for _, numel, _, _ in log] == [3, 6, 3, 2, 1, 2, 3]


@pytest.mark.ranks(4)
def test_no_more_than_two_buckets_are_in_flight_when_a_call_returns() -> None:
    calls, counts, allocated, row = Calls(4), list[int](), list[int](), 4 * 4
    for value in range(20):
        counts.append(calls.add(4, float(value)))
        allocated.append(calls.bucketer.allocated_bytes)
    calls.flush()
    assert counts == [0, 0, *range(1, 19)]
    # Each with four rows of staging and one of result; one more was in use during the call.
    assert max(allocated) == (3 * 4 + 2) * row
    assert calls.bucketer.allocated_bytes == 3 * 4 * row


def test_only_inputs_of_one_kind_dtype_and_group_share_a_bucket() -> None:
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
        mock.patch.object(messages, "backend_of", return_value="other"),
        mock.patch.object(torch, "cat", copies),
    ):
        for numel in (4, 3, 5):  # full, not full, alone
            calls.add(numel, 1.0)
        imaginary = [torch.full((2,), 1.0 + 1j * r) for r in range(4)]
        calls.bucketer.reduce_scatter(imaginary, callback=lambda view: sums.append(view.tolist()))
        assert calls.flush() == [(4, 1.0), (5, 1.0), (3, 1.0)]
    assert sums == [[4.0 + 4j * rank()] * 2]
    assert copies.call_count == 1
