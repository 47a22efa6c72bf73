"""What holds for every plan of a random model: layout, order, and what all ranks share."""

from __future__ import annotations

import itertools

from hypothesis import given

from pipegrad.plan.buckets import Bucket, Slot
from pipegrad.plan.routes import signature, steps_taken
from tests.support.gradients.plans import LAYOUT, contents
from tests.support.plan.random_models import Case, cases, quick


@quick
@given(cases())
def test_every_trained_routed_parameter_has_one_slot_that_fits(case: Case) -> None:
    for rank, plan in case.plans.items():
        records = {r.key: r for r in case.manifest.records(case.topology.at(rank))}
        routes = dict(plan.routes)
        trained = [key for key, r in records.items() if r.requires_grad and key in routes]
        assert sorted(key for keys in contents(plan) for key in keys) == sorted(trained)
        packed = [slot.key for pack in plan.packs for slot in pack.slots]
        assert sorted(packed) == sorted(routes)
        for bucket in plan.buckets:
            end = 0
            for slot in bucket.slots:
                record = records[slot.key]
                assert slot.offset >= end
                assert slot.offset * bucket.wire_dtype.itemsize % 64 == 0
                assert (slot.shape, bucket.holders) == (record.shape, record.holders)
                dtype = case.manifest.entries(slot.key)[0].gradient_dtype
                assert bucket.dtype == dtype
                assert bucket.wire_dtype == (case.options["reduce_dtype"] or dtype)
                assert signature(routes[slot.key]) == signature(bucket.route)
                end = slot.offset + slot.numel
            assert bucket.payload_numel >= end
            positions = [records[slot.key].position for slot in bucket.slots]
            # Of whole parameters those of an owner lie together.
            assert bucket.whole_numels or positions == sorted(positions, reverse=True)


def bytes_of(bucket: Bucket, *slots: Slot) -> int:
    """Returns how many bytes these slots take, in units of 64."""
    return sum(64 * -(-slot.numel * bucket.wire_dtype.itemsize // 64) for slot in slots)


@quick
@given(cases())
def test_a_bucket_is_full_or_the_last_of_its_kind(case: Case) -> None:
    capacity = case.options["bucket_bytes"]
    for plan in case.plans.values():
        kinds: dict[object, list[Bucket]] = {}
        for bucket in plan.buckets:
            if not bucket.whole_numels:  # those have a parameter for each rank
                sent = bucket.syncs_parameters and bucket.parameter_dtype
                kind = (bucket.ready, bucket.holders, bucket.dtype, sent, signature(bucket.route))
                kinds.setdefault(kind, []).append(bucket)
        for buckets in kinds.values():
            for bucket, after in itertools.pairwise(buckets):
                assert bytes_of(bucket, *bucket.slots, after.slots[0]) > capacity
            for bucket in buckets:
                filled = [slot for slot in bucket.slots if slot.numel]
                assert bytes_of(bucket, *filled) <= capacity or len(filled) == 1


@quick
@given(cases())
def test_all_ranks_share_layout_groups_and_digest(case: Case) -> None:
    found = case.plans
    assert len({(plan.groups, plan.digest) for plan in found.values()}) == 1
    layouts: dict[int, set[object]] = {}
    launching = set()
    for rank, plan in found.items():
        buckets = {bucket.index: bucket for bucket in plan.buckets}
        for index, bucket in buckets.items():
            layout = tuple(getattr(bucket, name) for name in LAYOUT)
            layouts.setdefault(index, set()).add((layout, signature(bucket.route)))
            for step in bucket.route:
                assert rank in step.ranks
                same = {b.index: b for b in found[step.ranks[0]].buckets}[index].route
                assert step in same
        for launch in plan.launches:
            launching.add((buckets[launch.bucket].route[launch.step].ranks, launch.comm_stream))
        for pack in plan.packs:
            launching.update((step.ranks, 0) for step in pack.route)
    assert all(len(layout) == 1 for layout in layouts.values())
    assert sorted(layouts) == list(range(len(layouts)))
    groups = next(iter(found.values())).groups
    assert groups == tuple(sorted(launching))


@quick
@given(cases())
def test_launches_are_sorted_and_complete(case: Case) -> None:
    for rank, plan in case.plans.items():
        assert sorted((x.bucket, x.step) for x in plan.launches) == [
            (b.index, step) for b in plan.buckets for step in range(steps_taken(b.route, rank))
        ]
        order = [(x.ready, x.step, x.bucket) for x in plan.launches]
        assert order == sorted(order)
        ready = {bucket.index: bucket.ready for bucket in plan.buckets}
        assert all(x.ready == ready[x.bucket] + x.step for x in plan.launches)
        assert all(x.comm_stream == x.bucket % case.comm_streams for x in plan.launches)
