"""What holds for every plan of 300 random models: layout, order, and no deadlock."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Mapping
from functools import cache, cached_property

import pytest
import torch

from pipegrad import Placement, Topology
from pipegrad.model.manifest import Manifest, ParameterEntry
from pipegrad.plan.buckets import Bucket
from pipegrad.plan.plan import Plan
from pipegrad.plan.routes import signature, steps_taken
from pipegrad_handlers.data_parallel import DataParallel
from pipegrad_handlers.pipeline_shared import PipelineShared
from tests.support.gradients.plans import (
    FLOAT,
    HALF,
    LAYOUT,
    Handlers,
    Placed,
    contents,
    entry,
    grid,
    plans,
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A random model on a random mesh."""

    manifest: Manifest
    topology: Topology
    handlers: Handlers
    bucket_bytes: int
    reduce_dtype: torch.dtype | None
    comm_streams: int
    stage_ticks: tuple[int, ...] | None

    @cached_property
    def plans(self) -> dict[int, Plan]:
        options = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return plans(**options)


@cache
def random_case(seed: int) -> Case:
    rng = random.Random(seed)
    pp, dp = rng.randint(1, 4), rng.randint(1, 3)
    placement = rng.choice([list(range(pp)), [*range(pp), *reversed(range(pp))]])
    stages: list[list[ParameterEntry]] = [
        [
            entry(
                f"p{i}",
                *(rng.choice([0, 1, 2, 5, 17]) for _ in range(rng.randint(0, 2))),
                dtype=rng.choice([FLOAT, FLOAT, HALF]),
                trained=rng.random() < 0.8,
            )
            for i in range(rng.randint(0, 5))
        ]
        for _ in placement
    ]
    ties = []
    for number in range(rng.randint(0, 3) if len(stages) > 1 else 0):
        holders = sorted(rng.sample(range(len(stages)), rng.randint(2, min(4, len(stages)))))
        tied = entry(f"tie{number}", rng.randint(1, 20), dtype=rng.choice([FLOAT, HALF]))
        for stage in holders:
            stages[stage].insert(rng.randint(0, len(stages[stage])), tied)
        ties.append(tuple((stage, tied.name) for stage in holders))
    over_data: Handlers = rng.choice(
        [
            [("data-parallel", DataParallel())],
            [("owner", Placed(Placement.OWNER))],
            [("sharded", Placed(Placement.SHARD))],
            [],
        ]
    )
    handlers = [("pipeline-shared", PipelineShared()), *over_data]
    rng.shuffle(handlers)
    ticks = tuple(rng.randint(0, 6) for _ in stages)
    return Case(
        manifest=Manifest(tuple(map(tuple, stages)), tuple(sorted(ties))),
        topology=grid(pp, dp, placement),
        handlers=handlers,
        bucket_bytes=rng.choice([0, 64, 100, 256, 2**20]),
        reduce_dtype=rng.choice([None, None, HALF, FLOAT]),
        comm_streams=rng.randint(1, 3),
        stage_ticks=rng.choice([None, ticks]),
    )


SEEDS = [pytest.param(range(start, start + 50), id=f"{start}..") for start in range(0, 300, 50)]


@pytest.mark.parametrize("seeds", SEEDS)
def test_every_trained_routed_parameter_has_one_slot_that_fits(seeds: Iterable[int]) -> None:
    for seed in seeds:
        case = random_case(seed)
        for rank, plan in case.plans.items():
            records = {r.key: r for r in case.manifest.records(case.topology.at(rank))}
            routes = dict(plan.routes)
            trained = [key for key, r in records.items() if r.requires_grad and key in routes]
            assert sorted(key for keys in contents(plan) for key in keys) == sorted(trained), seed
            packed = [slot.key for pack in plan.packs for slot in pack.slots]
            assert sorted(packed) == sorted(routes), seed
            for bucket in plan.buckets:
                end = 0
                for slot in bucket.slots:
                    record = records[slot.key]
                    assert slot.offset >= end, seed
                    assert slot.offset * bucket.wire_dtype.itemsize % 64 == 0, seed
                    assert (slot.shape, bucket.holders) == (record.shape, record.holders), seed
                    assert bucket.dtype == record.dtype, seed
                    assert bucket.wire_dtype == (case.reduce_dtype or record.dtype), seed
                    assert signature(routes[slot.key]) == signature(bucket.route), seed
                    end = slot.offset + slot.numel
                assert bucket.payload_numel >= end, seed
                positions = [records[slot.key].position for slot in bucket.slots]
                assert positions == sorted(positions, reverse=True), seed


@pytest.mark.parametrize("seeds", SEEDS)
def test_a_bucket_is_full_or_the_last_of_its_kind(seeds: Iterable[int]) -> None:
    for seed in seeds:
        case = random_case(seed)
        for plan in case.plans.values():
            kinds: dict[object, list[Bucket]] = {}
            for bucket in plan.buckets:
                kind = (bucket.ready, bucket.holders, bucket.dtype, signature(bucket.route))
                kinds.setdefault(kind, []).append(bucket)
            for buckets in kinds.values():
                sizes = [b.payload_numel * b.wire_dtype.itemsize for b in buckets]
                for bucket, size, after in zip(buckets, sizes, buckets[1:], strict=False):
                    first = min(
                        64 * -(-after.slots[0].numel * bucket.wire_dtype.itemsize // 64),
                        size + 2**30,
                    )
                    assert size + first > case.bucket_bytes, seed
                for bucket, size in zip(buckets, sizes, strict=True):
                    filled = [slot for slot in bucket.slots if slot.numel]
                    assert size <= case.bucket_bytes or len(filled) <= 1, seed


@pytest.mark.parametrize("seeds", SEEDS)
def test_all_ranks_share_layout_groups_and_digest(seeds: Iterable[int]) -> None:
    for seed in seeds:
        case = random_case(seed)
        found = case.plans
        assert len({(plan.groups, plan.digest) for plan in found.values()}) == 1, seed
        layouts: dict[int, set[object]] = {}
        launching = set()
        for rank, plan in found.items():
            buckets = {bucket.index: bucket for bucket in plan.buckets}
            for index, bucket in buckets.items():
                layout = tuple(getattr(bucket, name) for name in LAYOUT)
                layouts.setdefault(index, set()).add((layout, signature(bucket.route)))
                for reduction_step in bucket.route:
                    assert rank in reduction_step.ranks, seed
                    same = {b.index: b for b in found[reduction_step.ranks[0]].buckets}[index].route
                    assert reduction_step in same, seed
            for launch in plan.launches:
                launching.add((buckets[launch.bucket].route[launch.step].ranks, launch.comm_stream))
            for pack in plan.packs:
                launching.update((reduction_step.ranks, 0) for reduction_step in pack.route)
        assert all(len(layout) == 1 for layout in layouts.values()), seed
        assert sorted(layouts) == list(range(len(layouts))), seed
        groups = next(iter(found.values())).groups
        assert launching <= set(groups), seed
        assert groups == tuple(sorted(groups)), seed


@pytest.mark.parametrize("seeds", SEEDS)
def test_launches_are_sorted_and_complete_and_never_deadlock(seeds: Iterable[int]) -> None:
    for seed in seeds:
        case = random_case(seed)
        for rank, plan in case.plans.items():
            assert sorted((x.bucket, x.step) for x in plan.launches) == [
                (b.index, reduction_step)
                for b in plan.buckets
                for reduction_step in range(steps_taken(b.route, rank))
            ], seed
            order = [(x.ready, x.step, x.bucket) for x in plan.launches]
            assert order == sorted(order), seed
            ready = {bucket.index: bucket.ready for bucket in plan.buckets}
            assert all(x.ready == ready[x.bucket] + x.step for x in plan.launches), seed
            assert all(x.comm_stream == x.bucket % case.comm_streams for x in plan.launches), seed
        assert stuck(case.plans, case.comm_streams) == [], seed


# --- no deadlock


def stuck(found: Mapping[int, Plan], comm_streams: int) -> list[tuple[int, int]]:
    """Runs all comm streams of all ranks; returns those (rank, comm stream) that never end.

    One thread a comm stream takes its launches in order; a collective ends once every member's
    thread of that comm stream is at it: a rendezvous, the strictest that a backend can be.
    """
    waiting = {
        (rank, comm_stream): [x for x in plan.launches if x.comm_stream == comm_stream]
        for rank, plan in found.items()
        for comm_stream in range(comm_streams)
    }
    routes = {rank: {b.index: b.route for b in plan.buckets} for rank, plan in found.items()}
    moved = True
    while moved:
        moved = False
        for (rank, comm_stream), queue in waiting.items():
            if not queue:
                continue
            head = (queue[0].bucket, queue[0].step)
            members = [(m, comm_stream) for m in routes[rank][head[0]][head[1]].ranks]
            if all(
                waiting[m] and (waiting[m][0].bucket, waiting[m][0].step) == head for m in members
            ):
                for member in members:
                    waiting[member].pop(0)
                moved = True
    return [place for place, queue in waiting.items() if queue]


def test_the_simulation_finds_a_deadlock() -> None:
    """Two ties in opposite order on two ranks, in one comm stream; and a missing member."""
    model = Manifest(
        ((entry("a", 4), entry("b", 4)), (entry("b", 4), entry("a", 4))),
        (((0, "a"), (1, "a")), ((0, "b"), (1, "b"))),
    )
    found = plans(model, grid(2), bucket_bytes=0, comm_streams=1)
    assert stuck(found, 1) == []
    crossed = {0: found[0], 1: dataclasses.replace(found[1], launches=found[1].launches[::-1])}
    assert stuck(crossed, 1) == [(0, 0), (1, 0)]
    missing = {0: found[0], 1: dataclasses.replace(found[1], launches=found[1].launches[:1])}
    assert stuck(missing, 1) == [(0, 0)]
