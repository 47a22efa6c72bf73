"""Buckets whose layout all holders share, and owners of whole matrices with similar work."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipegrad import Placement
from pipegrad.errors import PlanError
from pipegrad.model.manifest import Manifest
from pipegrad.plan.buckets import Slot, localised, share_out, step_cost
from tests.support.gradients.placements import SHARD, WHOLE, By
from tests.support.gradients.plans import (
    BOTH,
    FLOAT,
    HALF,
    TIED,
    contents,
    entry,
    grid,
    plans,
    record,
)


def test_a_plan_prints_what_matters() -> None:
    assert str(plans(TIED, grid(3, 2), comm_streams=2)[5]) == (
        "rank 5: 2 buckets, 3 collectives, 0.00 MiB a step; the optimizer steps 18 of 18 elements\n"
        "launch  bucket  stream  ready  MiB        reduction\n"
        "0       0       0       0      0.000      replicate-mean(dp) over ranks [4, 5]: "
        "2.ln\n"
        "1       3       1       2      0.000      replicate-mean(dp) over ranks [4, 5]: "
        "0.emb\n"
        "2       3       1       3      0.000      replicate-sum(pp[0,2]) over ranks [1, 5]: "
        "0.emb"
    )
    # A line feed in a name would forge a line.
    (bucket,) = plans(Manifest(((entry("a\nb", 3),),), ()), grid(1, 2))[0].buckets
    assert bucket.names == r"0.a\nb"


def test_stage_ticks_order_the_buckets() -> None:
    def order(ticks: Sequence[int] | None) -> list[tuple[int, tuple[int, ...]]]:
        found = {
            b.index: b
            for p in plans(TIED, grid(3, 2), stage_ticks=ticks).values()
            for b in p.buckets
        }
        return [(found[index].ready, found[index].holders) for index in sorted(found)]

    assert order(None) == [(0, (2,)), (1, (1,)), (2, (0,)), (2, (0, 2))]
    assert order((5, 9, 7)) == [(5, (0,)), (7, (0, 2)), (7, (2,)), (9, (1,))]


# --- layout


def test_slots_are_aligned_to_64_bytes_of_the_wire() -> None:
    model = Manifest(((entry("a", 3), entry("b", 17), entry("c"), entry("d", 0)),), ())
    (bucket,) = plans(model, grid(1, 2))[0].buckets
    assert bucket.slots == (
        Slot("0.d", 0, (0,), (1,)),
        Slot("0.c", 0, (), ()),
        Slot("0.b", 16, (17,), (1,)),
        Slot("0.a", 48, (3,), (1,)),
    )
    assert (bucket.payload_numel, bucket.numel, bucket.nbytes(0, 0)) == (64, 68, 272)
    (bucket,) = plans(model, grid(1, 2), reduce_dtype=HALF)[0].buckets
    assert [slot.offset for slot in bucket.slots] == [0, 0, 32, 64]
    assert (bucket.dtype, bucket.wire_dtype, bucket.nbytes(0, 0)) == (FLOAT, HALF, 2 * 100)


def test_dtypes_never_mix_unless_the_wire_is_one_and_gradients_are_too() -> None:
    b, d = (entry(name, 2, dtype=HALF) for name in "bd")
    c = entry("c", 2, dtype=HALF, gradient_dtype=FLOAT)
    model = Manifest(((entry("a", 2), b, c, d),), ())
    assert contents(plans(model, grid(1, 2))[0]) == [["0.d", "0.b"], ["0.c", "0.a"]]
    found = plans(model, grid(1, 2), reduce_dtype=FLOAT)[0]
    assert contents(found) == [["0.d", "0.b"], ["0.c", "0.a"]]
    assert {bucket.wire_dtype for bucket in found.buckets} == {FLOAT}


@pytest.mark.parametrize(
    ("stride", "expected"),
    [
        ((48, 1, 12, 3), (48, 1, 12, 3)),  # channels_last
        ((48, 16, 4, 1), (48, 16, 4, 1)),
        ((1, 2, 6, 24), (1, 2, 6, 24)),  # all dimensions turned round
        ((96, 16, 4, 1), (48, 16, 4, 1)),  # with gaps: row-major
        ((0, 16, 4, 1), (48, 16, 4, 1)),  # expanded
    ],
)
def test_a_slot_has_its_parameters_strides(
    stride: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    model = Manifest(((entry("w", 2, 3, 4, 4, stride=stride),),), ())
    assert plans(model, grid(1, 2))[0].buckets[0].slots[0].stride == expected
    # Holders that disagree use row-major.
    other = Manifest(
        ((entry("w", 2, 3, stride=(1, 2)),), (entry("w", 2, 3),)), (((0, "w"), (1, "w")),)
    )
    for plan in plans(other, grid(2)).values():
        assert plan.buckets[0].slots[0].stride == (3, 1)


def test_a_smaller_local_shard_lies_together() -> None:
    """With the largest one's strides, (3, 1), a gap followed each of its rows."""
    (whole,) = plans(Manifest(((entry("w", 4, 3),),), ()), grid(1, 2))[0].buckets
    for shape, stride in (((4, 2), (2, 1)), ((2, 3), (3, 1)), ((0, 3), (3, 1)), ((4, 0), (1, 1))):
        (part,) = localised([whole], {"0.w": whole.route}, {"0.w": shape})
        assert part == dataclasses.replace(whole, slots=(Slot("0.w", 0, shape, stride),))


def test_the_digest_tells_plans_apart() -> None:
    options: list[dict[str, Any]] = [
        {},
        {"bucket_bytes": 0},
        {"reduce_dtype": HALF},
        {"handlers": BOTH[:1]},
        {"handlers": [*BOTH[:1], ("owner", By("dp", Placement.OWNER))]},
        {"stage_ticks": (1, 2, 3)},
    ]
    assert len({plans(TIED, grid(3, 2), **each)[0].digest for each in options}) == len(options)


# Owners of whole parameters: every rank has similar work, and a bucket is full of owners.

SIZES = st.integers(0, 40)


@pytest.mark.parametrize(
    ("shape", "cost"),
    [((3, 5), 45), ((5, 3), 45), ((2, 3, 4), 48), ((7,), 7), ((), 1), ((0, 3), 0), ((3, 0), 0)],
)
def test_a_step_costs_as_much_as_a_product_with_its_smaller_side(
    shape: tuple[int, ...], cost: int
) -> None:
    assert step_cost(shape) == cost


@settings(deadline=None, max_examples=100, derandomize=True)
@given(st.lists(st.lists(st.tuples(SIZES, SIZES), max_size=8), max_size=6), st.integers(1, 5))
def test_no_rank_has_more_than_another_by_more_than_one_matrix(
    buckets: list[list[tuple[int, int]]], number: int
) -> None:
    costs = [0] * number
    for bucket, shapes in enumerate(buckets):
        records = [record(f"{bucket}.{i}", *shape) for i, shape in enumerate(shapes)]
        shares = share_out(records, costs)
        assert sorted(x.key for share in shares for x in share) == sorted(x.key for x in records)
    largest = max((step_cost(shape) for shapes in buckets for shape in shapes), default=0)
    assert max(costs) - min(costs) <= largest


def test_the_next_bucket_goes_to_ranks_with_less_work() -> None:
    (matrix,), costs = [record("w", 4, 4)], [0, 0]
    assert share_out([matrix], costs) == [[matrix], []]
    assert share_out([matrix], costs) == [[], [matrix]]
    assert costs == [64, 64]


def matrices(number: int) -> Manifest:
    return Manifest((tuple(entry(f"w{i}", 4, 8) for i in range(number)),), ())


@pytest.mark.parametrize("number", [1, 3, 8, 13])
def test_a_bucket_has_a_matrix_for_each_rank_if_there_are_enough(number: int) -> None:
    found = plans(matrices(number), grid(1, 4), [("w", By("dp", WHOLE))], bucket_bytes=0)
    sizes = [len(bucket.slots) for bucket in found[0].buckets]
    assert sizes == [4] * (number // 4) + [number % 4] * (number % 4 > 0)
    for bucket in found[0].buckets:
        assert sorted(bucket.whole_numels, reverse=True) == [
            32 if rank < len(bucket.slots) else 0 for rank in range(4)
        ]
    stepped = [len(plan.main_ranges) for plan in found.values()]
    assert (sum(stepped), max(stepped) - min(stepped)) == (number, number % 4 > 0)


def test_stages_of_one_rank_are_balanced_together() -> None:
    """The first stage alone would give its only matrix to the first rank, and so would each."""
    model = Manifest(tuple((entry(f"w{i}", 4, 8),) for i in range(4)), ())
    found = plans(model, grid(1, 2, (0, 0, 0, 0)), [("w", By("dp", WHOLE))])
    assert [len(plan.main_ranges) for plan in found.values()] == [2, 2]
    # Full buckets close as others do.
    found = plans(matrices(32), grid(1, 2), [("w", By("dp", WHOLE))], bucket_bytes=16 * 128)
    assert [len(bucket.slots) for bucket in found[0].buckets] == [16, 16]


def test_a_plan_prints_which_matrices_a_rank_steps() -> None:
    found = plans(matrices(3), grid(1, 2), [("w", By("dp", WHOLE))])
    lines = [str(plan).splitlines()[1] for plan in found.values()]
    assert lines == ["it steps whole: 2 parameters, 0.w0 .. 0.w2", "it steps whole: 0.w1"]
    alone = plans(matrices(1), grid(1, 1), [("w", By("dp", WHOLE))])
    assert str(alone[0]).splitlines()[1:] == ["it steps whole: 0.w0"]


def test_nothing_else_may_scatter_whole_parameters() -> None:
    topology = grid(2, 2)
    tied = Manifest(((entry("w", 4, 4),), (entry("w", 4, 4),)), (((0, "w"), (1, "w")),))
    handlers = [("whole", By("dp", WHOLE)), ("rows", By("pp", SHARD))]
    with pytest.raises(PlanError, match=r"'0.w' is reduced by .* give the others .* 'replicate'"):
        plans(tied, topology, handlers)
