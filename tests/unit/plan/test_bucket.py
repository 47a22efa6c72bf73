"""The plan: buckets whose layout all holders share, and an order that cannot deadlock."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from pipegrad import Placement
from pipegrad.model.manifest import Manifest
from pipegrad.plan.buckets import Slot, localised
from tests.support.gradients.placements import By
from tests.support.gradients.plans import (
    BOTH,
    FLOAT,
    HALF,
    TIED,
    contents,
    entry,
    grid,
    plans,
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
