"""The plan: buckets whose layout all holders share, and an order that cannot deadlock."""

from __future__ import annotations

import dataclasses
import os
import random
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest
import torch

from pipegrad import GradientHandler, ParameterRecord, Placement, Plan, Reduction, Topology
from pipegrad.gradients.bucket import Bucket, Launch, Slot, make_plan
from pipegrad.gradients.manifest import Manifest, ParameterEntry
from pipegrad.gradients.route import hops_taken, signature
from pipegrad_handlers.data_parallel import DataParallel
from pipegrad_handlers.pipeline_shared import PipelineShared

FLOAT, HALF = torch.float32, torch.bfloat16
Handlers = Sequence[tuple[str, GradientHandler]]
BOTH: Handlers = (("pipeline-shared", PipelineShared()), ("data-parallel", DataParallel()))
LAYOUT = ("index", "ready", "holders", "dtype", "wire_dtype", "slots", "payload_numel")


class Placed(GradientHandler):
    """Sums over the data dimension, with the result placed somewhere."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement

    def reductions(
        self, parameters: Sequence[ParameterRecord], topology: Topology
    ) -> Iterable[Reduction]:
        ranks = topology.ranks_along("dp")
        return [Reduction(p, ranks, "sum", self._placement) for p in parameters]


def entry(
    name: str,
    *shape: int,
    dtype: torch.dtype = FLOAT,
    gradient_dtype: torch.dtype | None = None,
    stride: tuple[int, ...] | None = None,
    trained: bool = True,
) -> ParameterEntry:
    strides = torch.empty(shape, device="meta").stride() if stride is None else stride
    return ParameterEntry(name, (), shape, strides, dtype, gradient_dtype or dtype, trained)


def grid(pp: int, dp: int = 1, stages: Sequence[int] | None = None) -> Topology:
    return Topology.build(axes=(("pp", pp), ("dp", dp)), stage_to_rank=stages)


def plans(
    manifest: Manifest,
    topology: Topology,
    handlers: Handlers = BOTH,
    bucket_bytes: int = 2**20,
    **options: object,
) -> dict[int, Plan]:
    return {
        rank: make_plan(
            manifest, topology.at(rank), handlers, bucket_bytes=bucket_bytes, **options  # type: ignore[arg-type]
        )
        for rank in topology.ranks
    }  # fmt: skip


def contents(plan: Plan) -> list[list[str]]:
    return [[slot.key for slot in bucket.slots] for bucket in plan.buckets]


TIED = Manifest(
    stages=(
        (entry("emb", 5, 3), entry("norm", 3), entry("frozen", 2, trained=False)),
        (entry("w", 3, 3), entry("b", 3)),
        (entry("ln", 3), entry("head", 5, 3)),
    ),
    ties=(((0, "emb"), (2, "head")),),
)

# --- whole plans


def test_a_plan_as_a_whole() -> None:
    plan = plans(TIED, grid(3, 2), lanes=2)[5]
    mean, tie = plan.routes[1][1]
    assert (str(mean), mean.ranks) == ("replicate-mean(dp)", (4, 5))
    assert (str(tie), tie.ranks) == ("replicate-sum(pp[0,2])", (1, 5))
    norm = Bucket(
        index=0,
        ready=0,
        holders=(2,),
        dtype=FLOAT,
        wire_dtype=FLOAT,
        route=(mean,),
        slots=(Slot("2.ln", 0, (3,), (1,)),),
        payload_numel=16,
    )
    emb = dataclasses.replace(
        norm,
        index=3,
        ready=2,
        holders=(0, 2),
        route=(mean, tie),
        slots=(Slot("0.emb", 0, (5, 3), (3, 1)),),
    )
    assert plan == Plan(
        rank=5,
        buckets=(norm, emb),
        launches=(
            Launch(bucket=0, hop=0, ready=0, lane=0),
            Launch(bucket=3, hop=0, ready=2, lane=1),
            Launch(bucket=3, hop=1, ready=3, lane=1),
        ),
        routes=(("2.ln", (mean,)), ("0.emb", (mean, tie))),
        packs=plan.packs,
        groups=(
            ((0, 1), 0), ((0, 1), 1), ((0, 4), 0), ((0, 4), 1), ((1, 5), 0), ((1, 5), 1),
            ((2, 3), 0), ((2, 3), 1), ((4, 5), 0), ((4, 5), 1),
        ),
        digest=plan.digest,
    )  # fmt: skip
    assert [b.index for b in plans(TIED, grid(3, 2))[0].buckets] == [2, 3]
    assert (norm.numel, norm.nbytes, plan.reduced_bytes) == (17, 68, 3 * 68)


def test_a_plan_prints_what_matters() -> None:
    assert str(plans(TIED, grid(3, 2), lanes=2)[5]) == (
        "rank 5: 2 buckets, 3 collectives, 0.00 MiB a step\n"
        "launch  bucket  lane  ready  MiB        reduction\n"
        "0       0       0     0      0.000      replicate-mean(dp) over ranks [4, 5]: "
        "1 parameters, 2.ln .. 2.ln\n"
        "1       3       1     2      0.000      replicate-mean(dp) over ranks [4, 5]: "
        "1 parameters, 0.emb .. 0.emb\n"
        "2       3       1     3      0.000      replicate-sum(pp[0,2]) over ranks [1, 5]: "
        "1 parameters, 0.emb .. 0.emb"
    )


def test_frozen_parameters_travel_only_to_be_made_equal() -> None:
    plan = plans(TIED, grid(3, 2))[0]
    assert contents(plan) == [["0.norm"], ["0.emb"]]
    packed = [slot.key for pack in plan.packs for slot in pack.slots]
    assert sorted(packed) == ["0.emb", "0.frozen", "0.norm"]


def test_without_handlers_nothing_is_planned() -> None:
    untied = dataclasses.replace(TIED, ties=())
    for plan in plans(untied, grid(3, 2), handlers=()).values():
        assert (plan.buckets, plan.launches, plan.routes, plan.packs, plan.groups) == ((),) * 5


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


def test_two_ties_that_two_stages_register_in_another_order_lie_alike() -> None:
    """Summed by local order, a and b would get each other's values: 101 twice, not 2 and 200."""
    model = Manifest(
        stages=((entry("a", 4), entry("b", 4)), (entry("b", 4), entry("a", 4))),
        ties=(((0, "a"), (1, "a")), ((0, "b"), (1, "b"))),
    )
    first, last = plans(model, grid(2)).values()
    assert contents(first) == contents(last) == [["0.b", "0.a"]]
    assert first.buckets == last.buckets


def test_slots_are_aligned_to_64_bytes_of_the_wire() -> None:
    model = Manifest(((entry("a", 3), entry("b", 17), entry("c"), entry("d", 0)),), ())
    (bucket,) = plans(model, grid(1, 2))[0].buckets
    assert bucket.slots == (
        Slot("0.d", 0, (0,), (1,)),
        Slot("0.c", 0, (), ()),
        Slot("0.b", 16, (17,), (1,)),
        Slot("0.a", 48, (3,), (1,)),
    )
    assert (bucket.payload_numel, bucket.numel, bucket.nbytes) == (64, 68, 272)
    (bucket,) = plans(model, grid(1, 2), reduce_dtype=HALF)[0].buckets
    assert [slot.offset for slot in bucket.slots] == [0, 0, 32, 64]
    assert (bucket.dtype, bucket.wire_dtype, bucket.nbytes) == (FLOAT, HALF, 2 * 100)


@pytest.mark.parametrize(
    ("capacity", "expected"),
    [
        (64 * 6, [["0.e", "0.d", "0.c", "0.b", "0.a"]]),
        (64 * 5, [["0.e", "0.d", "0.c"], ["0.b", "0.a"]]),
        (64 * 3 - 1, [["0.e", "0.d"], ["0.c"], ["0.b", "0.a"]]),
        (64, [["0.e"], ["0.d"], ["0.c"], ["0.b"], ["0.a"]]),
        (0, [["0.e"], ["0.d"], ["0.c"], ["0.b"], ["0.a"]]),
    ],
)
def test_buckets_are_cut_by_bytes_in_reverse_position(
    capacity: int, expected: list[list[str]]
) -> None:
    """`c` takes three alignment units, the others one; too large for a bucket, it goes alone."""
    sizes = {"a": 16, "b": 1, "c": 33, "d": 16, "e": 2}
    model = Manifest((tuple(entry(name, size) for name, size in sizes.items()),), ())
    if capacity == 64 * 6:
        capacity += 64
    assert contents(plans(model, grid(1, 2), bucket_bytes=capacity)[0]) == expected


def test_dtypes_never_mix_unless_the_wire_is_one_and_gradients_are_too() -> None:
    model = Manifest(
        (
            (
                entry("a", 2),
                entry("b", 2, dtype=HALF),
                entry("c", 2, dtype=HALF, gradient_dtype=FLOAT),
                entry("d", 2, dtype=HALF),
            ),
        ),
        (),
    )
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


def test_holders_that_disagree_on_strides_use_row_major() -> None:
    model = Manifest(
        ((entry("w", 2, 3, stride=(1, 2)),), (entry("w", 2, 3),)), (((0, "w"), (1, "w")),)
    )
    for plan in plans(model, grid(2)).values():
        assert plan.buckets[0].slots[0].stride == (3, 1)


# --- placements


def test_after_an_owner_only_owners_launch_the_later_hops() -> None:
    handlers = [*BOTH[:1], ("owner", Placed(Placement.OWNER))]
    found = plans(TIED, grid(3, 2), handlers)
    taken = {rank: [(x.bucket, x.hop) for x in plan.launches] for rank, plan in found.items()}
    assert taken == {
        0: [(2, 0), (3, 0), (3, 1)],
        1: [(2, 0), (3, 0)],
        2: [(1, 0)],
        3: [(1, 0)],
        4: [(0, 0), (3, 0), (3, 1)],
        5: [(0, 0), (3, 0)],
    }
    assert [str(h) for h in found[1].buckets[1].route] == [
        "owner-sum(dp)", "replicate-sum(pp[0,2])",
    ]  # fmt: skip


def test_shards_are_planned_before_replicas() -> None:
    found = plans(TIED, grid(3, 2), [*BOTH[:1], ("sharded", Placed(Placement.SHARD))])
    assert [str(h) for h in found[1].buckets[1].route] == [
        "shard-sum(dp)", "replicate-sum(pp[0,2])",
    ]  # fmt: skip
    assert [(x.bucket, x.hop) for x in found[1].launches] == [(2, 0), (3, 0), (3, 1)]


# --- any model, by property


@dataclasses.dataclass(frozen=True)
class Case:
    """A random model on a random mesh."""

    manifest: Manifest
    topology: Topology
    handlers: Handlers
    bucket_bytes: int
    reduce_dtype: torch.dtype | None
    lanes: int
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
        lanes=rng.randint(1, 3),
        stage_ticks=rng.choice([None, ticks]),
    )


SEEDS = [pytest.param(range(start, start + 50), id=f"{start}..") for start in range(0, 300, 50)]


@pytest.mark.parametrize("seeds", SEEDS)
def test_every_trained_routed_parameter_has_one_slot(seeds: Iterable[int]) -> None:
    for seed in seeds:
        case = random_case(seed)
        for rank, plan in case.plans.items():
            records = case.manifest.records(case.topology.at(rank))
            routes = dict(plan.routes)
            trained = [r.key for r in records if r.requires_grad and r.key in routes]
            assert sorted(key for keys in contents(plan) for key in keys) == sorted(trained), seed
            packed = [slot.key for pack in plan.packs for slot in pack.slots]
            assert sorted(packed) == sorted(routes), seed


@pytest.mark.parametrize("seeds", SEEDS)
def test_slots_fit_and_buckets_never_mix(seeds: Iterable[int]) -> None:
    for seed in seeds:
        case = random_case(seed)
        for rank, plan in case.plans.items():
            records = {r.key: r for r in case.manifest.records(case.topology.at(rank))}
            routes = dict(plan.routes)
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
                for hop in bucket.route:
                    assert rank in hop.ranks, seed
                    same = {b.index: b for b in found[hop.ranks[0]].buckets}[index].route
                    assert hop in same, seed
            for launch in plan.launches:
                launching.add((buckets[launch.bucket].route[launch.hop].ranks, launch.lane))
            for pack in plan.packs:
                launching.update((hop.ranks, 0) for hop in pack.route)
        assert all(len(layout) == 1 for layout in layouts.values()), seed
        assert sorted(layouts) == list(range(len(layouts))), seed
        groups = next(iter(found.values())).groups
        assert launching <= set(groups), seed
        assert groups == tuple(sorted(groups)), seed


@pytest.mark.parametrize("seeds", SEEDS)
def test_launches_are_sorted_and_complete(seeds: Iterable[int]) -> None:
    for seed in seeds:
        case = random_case(seed)
        for rank, plan in case.plans.items():
            assert sorted((x.bucket, x.hop) for x in plan.launches) == [
                (b.index, hop) for b in plan.buckets for hop in range(hops_taken(b.route, rank))
            ], seed
            order = [(x.ready, x.hop, x.bucket) for x in plan.launches]
            assert order == sorted(order), seed
            ready = {bucket.index: bucket.ready for bucket in plan.buckets}
            assert all(x.ready == ready[x.bucket] + x.hop for x in plan.launches), seed
            assert all(x.lane == x.bucket % case.lanes for x in plan.launches), seed


# --- no deadlock


def stuck(found: Mapping[int, Plan], lanes: int) -> list[tuple[int, int]]:
    """Runs all lanes of all ranks; returns those (rank, lane) that never end.

    One thread a lane takes its launches in order; a collective ends once every member's thread of
    that lane is at it: a rendezvous, the strictest that a backend can be.
    """
    waiting = {
        (rank, lane): [x for x in plan.launches if x.lane == lane]
        for rank, plan in found.items()
        for lane in range(lanes)
    }
    routes = {rank: {b.index: b.route for b in plan.buckets} for rank, plan in found.items()}
    moved = True
    while moved:
        moved = False
        for (rank, lane), queue in waiting.items():
            if not queue:
                continue
            head = (queue[0].bucket, queue[0].hop)
            members = [(m, lane) for m in routes[rank][head[0]][head[1]].ranks]
            if all(
                waiting[m] and (waiting[m][0].bucket, waiting[m][0].hop) == head for m in members
            ):
                for member in members:
                    waiting[member].pop(0)
                moved = True
    return [place for place, queue in waiting.items() if queue]


@pytest.mark.parametrize("seeds", SEEDS)
def test_no_order_of_any_model_deadlocks(seeds: Iterable[int]) -> None:
    for seed in seeds:
        case = random_case(seed)
        assert stuck(case.plans, case.lanes) == [], seed


def test_the_simulation_finds_a_deadlock() -> None:
    """Two ties that two ranks take in opposite order, in one lane; and a member that is missing."""
    model = Manifest(
        ((entry("a", 4), entry("b", 4)), (entry("b", 4), entry("a", 4))),
        (((0, "a"), (1, "a")), ((0, "b"), (1, "b"))),
    )
    found = plans(model, grid(2), bucket_bytes=0)
    assert stuck(found, 1) == []
    crossed = {0: found[0], 1: dataclasses.replace(found[1], launches=found[1].launches[::-1])}
    assert stuck(crossed, 1) == [(0, 0), (1, 0)]
    missing = {0: found[0], 1: dataclasses.replace(found[1], launches=found[1].launches[:1])}
    assert stuck(missing, 1) == [(0, 0)]


# --- determinism

SCRIPT = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("plans", sys.argv[1])
module = sys.modules["plans"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
for seed in range(40):
    for plan in module.random_case(seed).plans.values():
        print(plan.digest, plan.groups, [(x.bucket, x.hop) for x in plan.launches])
"""


def test_a_plan_does_not_depend_on_the_hash_seed() -> None:
    running = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", SCRIPT, str(Path(__file__))],
            env={**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    first, second = (process.communicate(timeout=60)[0] for process in running)
    assert first == second
    assert len(first.splitlines()) > 40


def test_the_digest_tells_plans_apart() -> None:
    options: list[dict[str, Any]] = [
        {},
        {"bucket_bytes": 0},
        {"reduce_dtype": HALF},
        {"handlers": BOTH[:1]},
        {"handlers": [*BOTH[:1], ("owner", Placed(Placement.OWNER))]},
        {"stage_ticks": (1, 2, 3)},
    ]
    assert len({plans(TIED, grid(3, 2), **each)[0].digest for each in options}) == len(options)
