"""Owners of whole parameters: every rank has similar work, and a bucket is full of owners."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipegrad.errors import PlanError
from pipegrad.model.manifest import Manifest
from pipegrad.plan.buckets import Owners, step_cost
from tests.support.gradients.placements import SHARD, WHOLE, By
from tests.support.gradients.plans import entry, grid, plans

quick = settings(deadline=None, max_examples=100, derandomize=True)
SIZES = st.integers(0, 40)


@pytest.mark.parametrize(
    ("shape", "cost"),
    [((3, 5), 45), ((5, 3), 45), ((2, 3, 4), 48), ((7,), 7), ((), 1), ((0, 3), 0), ((3, 0), 0)],
)
def test_a_step_costs_as_much_as_a_product_with_its_smaller_side(
    shape: tuple[int, ...], cost: int
) -> None:
    assert step_cost(shape) == cost


@quick
@given(st.lists(st.lists(st.tuples(SIZES, SIZES), max_size=8), max_size=6), st.integers(1, 5))
def test_no_rank_has_more_than_another_by_more_than_one_matrix(
    buckets: list[list[tuple[int, int]]], number: int
) -> None:
    owners, ranks, costs = Owners(), tuple(range(number)), [0] * number
    for shapes in buckets:
        for owner, shape in zip(owners.choose(ranks, shapes), shapes, strict=True):
            costs[owner] += step_cost(shape)
    largest = max((step_cost(shape) for shapes in buckets for shape in shapes), default=0)
    assert max(costs) - min(costs) <= largest


def test_other_ranks_have_other_owners() -> None:
    owners = Owners()
    assert owners.choose((0, 1), [(4, 4)]) == [0]
    assert owners.choose((2, 3), [(4, 4)]) == [0]
    assert owners.choose((0, 1), [(4, 4)]) == [1]


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
