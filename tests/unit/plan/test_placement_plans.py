"""What holds for every plan of a random model: layout, order, shares, and the ways back."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipegrad import ParameterRecord, Placement, Topology, make_plan
from pipegrad.errors import PlanError
from pipegrad.model.manifest import Manifest, ParameterEntry
from pipegrad.plan.buckets import Bucket, Slot
from pipegrad.plan.options import GradientOptions
from pipegrad.plan.plan import MainRange, Plan, make_plans
from pipegrad.plan.routes import signature, steps_taken
from pipegrad.plugins.handler import Op
from tests.support.gradients.placements import OWNER, REPLICATE, SHARD, WHOLE, By, members
from tests.support.gradients.plans import FLOAT, HALF, LAYOUT, contents, entry, grid

quick = settings(deadline=None, max_examples=60, derandomize=True)
AXES = ("pp", "dp", "tp")
Style = Mapping[str, Placement | None]  # dimension -> where the sum along it lives


@dataclasses.dataclass(frozen=True)
class Case:
    """A model on a mesh, whose parameters are placed by name."""

    manifest: Manifest
    topology: Topology
    styles: Mapping[str, Style]
    op: Op  # along "dp"
    options: Mapping[str, Any]

    @property
    def handlers(self) -> list[tuple[str, By]]:
        def table(axis: str) -> dict[str, Placement]:
            return {name: p for name, style in self.styles.items() if (p := style[axis])}

        ops: dict[str, Op] = {"pp": "sum", "dp": self.op, "tp": "sum"}
        return [(f"over-{axis}", By(axis, table(axis), op)) for axis, op in ops.items()]

    @cached_property
    def plans(self) -> dict[int, Plan]:
        return make_plans(
            self.manifest, self.topology, self.handlers, GradientOptions(**self.options)
        )

    @property
    def comm_streams(self) -> int:
        return int(self.options["comm_streams"])

    def holders(self, record: ParameterRecord) -> list[int]:
        views = map(self.topology.at, self.topology.ranks)
        return [v.rank for v in views if not set(v.local_stages).isdisjoint(record.holders)]


SHAPES = [(), (0,), (1,), (7,), (16,), (67,), (5, 3), (0, 3)]
DTYPES = [FLOAT, FLOAT, FLOAT, HALF, torch.float64, torch.complex64]
PLACED = st.sampled_from([OWNER, WHOLE, SHARD, REPLICATE, None])


def is_possible(style: Style) -> bool:
    """Whether a style scatters at most once, if it scatters whole parameters."""
    scatters = [placement for placement in style.values() if placement in (WHOLE, SHARD)]
    return len(scatters) < 2 or WHOLE not in scatters


@st.composite
def parameters(draw: st.DrawFn, name: str) -> ParameterEntry:
    dtype = draw(st.sampled_from(DTYPES))
    options: dict[str, Any] = {"dtype": dtype, "trained": draw(st.integers(0, 9)) > 0}
    if dtype is HALF and draw(st.booleans()):
        options["gradient_dtype"] = FLOAT
    if draw(st.integers(0, 4)) == 0:  # channels_last
        return entry(name, 2, 3, 2, 2, stride=(12, 1, 6, 3), **options)
    return entry(name, *draw(st.sampled_from(SHAPES)), **options)


@st.composite
def topologies(draw: st.DrawFn, *, permuted: bool) -> Topology:
    sizes = {
        "pp": draw(st.integers(1, 4)),
        "dp": draw(st.integers(1, 3)),
        "tp": draw(st.integers(1, 2)),
    }
    axes = [(axis, sizes[axis]) for axis in draw(st.permutations(AXES))]
    world = torch.Size(sizes.values()).numel()
    ranks = sorted(draw(st.sets(st.integers(0, 30), min_size=world, max_size=world)))
    places = [*range(sizes["pp"]), *draw(st.lists(st.integers(0, sizes["pp"] - 1), max_size=3))]
    return Topology.build(
        axes=axes,
        ranks=draw(st.permutations(ranks)) if permuted else ranks,
        rank=ranks[0],
        stage_to_rank=draw(st.permutations(places)),
    )


@st.composite
def cases(draw: st.DrawFn, *, permuted: bool = False) -> Case:
    topology = draw(topologies(permuted=permuted))
    styles = st.fixed_dictionaries(dict.fromkeys(AXES, PLACED)).filter(is_possible)
    palette = draw(st.lists(styles, min_size=1))
    stages: list[list[ParameterEntry]] = []
    for stage in range(topology.num_stages):
        names = [f"s{stage}p{i}" for i in range(draw(st.integers(0, 4)))]
        stages.append([draw(parameters(name)) for name in names])
    ties = []
    for number in range(draw(st.integers(0, 3)) if len(stages) > 1 else 0):
        held = draw(st.sets(st.sampled_from(range(len(stages))), min_size=2, max_size=4))
        tied = draw(parameters(f"tie{number}"))
        for stage in held:
            stages[stage].insert(draw(st.integers(0, len(stages[stage]))), tied)
        ties.append(tuple((stage, tied.name) for stage in sorted(held)))
    names = sorted({one.name for held in stages for one in held})
    ticks = draw(st.none() | st.tuples(*[st.integers(0, 5)] * len(stages)))
    return Case(
        Manifest(tuple(map(tuple, stages)), tuple(sorted(ties))),
        topology,
        {name: draw(st.sampled_from(palette)) for name in names},
        draw(st.sampled_from(["sum", "mean"])),
        {
            "bucket_bytes": draw(st.sampled_from([0, 64, 100, 256, 2**20])),
            "reduce_dtype": draw(st.sampled_from([None, None, FLOAT, HALF])),
            "comm_streams": draw(st.integers(1, 3)),
            "stage_ticks": ticks,
            "allow_unsynced": ["*"],
        },
    )


# --- who steps what


def steppers(case: Case, record: ParameterRecord) -> list[set[int]]:
    """Returns for each element of a parameter the ranks whose optimizer steps it."""
    found: list[set[int]] = [set() for _ in range(record.numel)]
    for rank, plan in case.plans.items():
        for main_range in (s for s in plan.main_ranges if s.key == record.key):
            for element in range(main_range.begin, main_range.end):
                assert rank not in found[element], "stepped twice on one rank"
                found[element].add(rank)
    return found


def who_should(case: Case, record: ParameterRecord, element: set[int]) -> bool:
    """Whether `element` is stepped by one owner, by one rank of a SHARD, by all of the others.

    With WHOLE it is one rank for all elements of a parameter, which a test below compares.
    """
    count = len(case.holders(record))
    for axis, placement in case.styles[record.name].items():
        for rank in element:
            group = members(case.topology.at(rank), axis, record)
            there = element.intersection(group)
            if placement is OWNER and there != {min(group)}:
                return False
            if placement in (WHOLE, SHARD) and there != {rank}:
                return False
            if placement in (REPLICATE, None) and there != set(group):
                return False
        if placement in (OWNER, WHOLE, SHARD):
            count //= len(group_of(case, axis, record))
    return len(element) == count


def group_of(case: Case, axis: str, record: ParameterRecord) -> tuple[int, ...]:
    return members(case.topology.at(case.holders(record)[0]), axis, record)


@quick
@given(cases())
def test_every_element_is_stepped_by_exactly_the_ranks_that_should(case: Case) -> None:
    for record in case.manifest.parameters:
        stepped = steppers(case, record)
        if record.requires_grad:
            assert [e for e in stepped if not who_should(case, record, e)] == []
        else:
            assert stepped == [set()] * record.numel
        if WHOLE in case.styles[record.name].values():  # no part is on another rank
            assert len({frozenset(ranks) for ranks in stepped}) <= 1
    for rank, plan in case.plans.items():
        held = case.manifest.records(case.topology.at(rank))
        assert plan.trained_numel == sum(r.numel for r in held if r.requires_grad)
        assert plan.main_numel == sum(s.end - s.begin for s in plan.main_ranges)
        keys = [r.key for r in held]
        assert [s.key for s in plan.main_ranges] == sorted(
            {s.key for s in plan.main_ranges}, key=keys.index
        )
        # A share is what the rank has the sums of.
        numels = {r.key: r.numel for r in held}
        places = {slot.key: (b, slot.offset) for b in plan.buckets for slot in b.slots}
        for main_range in plan.main_ranges:
            if not main_range.sharded:
                assert (main_range.begin, main_range.end) == (0, numels[main_range.key])
                continue
            bucket, offset = places[main_range.key]
            region = bucket.region(rank, len(bucket.route))
            assert 0 <= main_range.begin < main_range.end <= numels[main_range.key]
            assert region.start <= offset + main_range.begin
            assert offset + main_range.end <= region.stop


# --- rows


@quick
@given(cases())
def test_rows_partition_what_was_left_aligned_and_no_smaller_than_the_flags(case: Case) -> None:
    """A row that was smaller than the flags had them written over the next one's gradients.

    Of whole parameters they may be of any size, and end between slots.
    """
    for rank, plan in case.plans.items():
        for bucket in plan.buckets:
            before = range(bucket.payload_numel)
            for number, reduction_step in enumerate(bucket.route, 1):
                mine = bucket.region(rank, number)
                if not reduction_step.placement.scatters:
                    assert mine == before
                    continue
                theirs = [
                    in_plan(case, member, bucket).region(member, number)
                    for member in reduction_step.ranks
                ]
                assert list(itertools.chain(*theirs)) == list(before)
                numels = tuple(map(len, theirs))
                assert bucket.scattered(number - 1, rank) == numels
                assert mine == theirs[reduction_step.ranks.index(rank)]
                assert mine.start * bucket.wire_dtype.itemsize % 64 == 0
                before = mine
                if reduction_step.placement is SHARD:
                    assert len(set(numels)) == 1
                    assert len(mine) >= len(bucket.slots)
                    continue
                for slot in bucket.slots:
                    parts = [len(slot.within(row)) for row in theirs if slot.within(row)]
                    assert parts == ([slot.numel] if slot.numel else [])
        assert plan.reduced_bytes == sum(bytes_of(plan, bucket) for bucket in plan.buckets)


def bytes_of(plan: Plan, bucket: Bucket) -> int:
    """Returns the bytes of rows and flags that a rank reduces of a bucket."""
    found, left = 0, bucket.payload_numel
    for reduction_step in bucket.route:
        found += (left + len(bucket.slots)) * bucket.wire_dtype.itemsize
        if reduction_step.placement is OWNER and plan.rank != min(reduction_step.ranks):
            break
        if reduction_step.placement is SHARD:
            left //= len(reduction_step.ranks)
        if reduction_step.placement is WHOLE:
            left = bucket.whole_numels[reduction_step.ranks.index(plan.rank)]
    return found


def in_plan(case: Case, rank: int, bucket: Bucket) -> Bucket:
    return next(b for b in case.plans[rank].buckets if b.index == bucket.index)


def test_bytes_of_one_bucket_by_hand() -> None:
    """70 elements and a flag; SHARD over 2 leaves 40 (aligned to 16 elements: 48) for REPLICATE."""
    topology = Topology.build(axes=(("pp", 1), ("dp", 2), ("tp", 2)))
    handlers = [("a", By("dp", SHARD)), ("b", By("tp", REPLICATE))]
    model = Manifest(((entry("w", 70),),), ())
    for plan in make_plans(model, topology, handlers, GradientOptions(bucket_bytes=0)).values():
        (bucket,) = plan.buckets
        assert (bucket.payload_numel, bucket.numel) == (96, 97)
        assert [bucket.nbytes(number, plan.rank) for number in (0, 1)] == [4 * 97, 4 * 49]
        assert plan.reduced_bytes == 4 * 97 + 4 * 49
        assert bucket.pieces(plan.rank, 0) == (Slot("0.w", 0, (70,), (1,)),)
        assert bucket.pieces(plan.rank, 1) == (Slot("", 0, (48,), (1,)),)
        begin = 48 * (plan.rank // 2)
        assert plan.main_ranges == (MainRange("0.w", begin, min(begin + 48, 70), sharded=True),)


# --- there and back: a simulation of all ranks

Item = tuple[str, int, int]  # launch or publish, bucket, hop


class World:
    """All comm streams of all ranks: items in order, each item all of its members at once.

    A step's launches, its publishes, and the next step's launches. A rendezvous is the strictest
    that a backend can be. What moves back is a number an element: 1 where it was stepped.
    """

    def __init__(self, plans: Mapping[int, Plan], comm_streams: int) -> None:
        self.plans = plans
        self.buckets = {(r, b.index): b for r, plan in plans.items() for b in plan.buckets}
        self.waiting = {
            (rank, comm_stream): items(plan, comm_stream)
            for rank, plan in plans.items()
            for comm_stream in range(comm_streams)
        }
        self.memory = {
            place: torch.zeros(bucket.payload_numel, dtype=torch.int8)
            for place, bucket in self.buckets.items()
        }
        self.offsets = {
            (rank, slot.key): (bucket.index, slot.offset, slot.numel)
            for (rank, _), bucket in self.buckets.items()
            for slot in bucket.slots
        }
        for rank, plan in plans.items():
            for main_range in plan.main_ranges:
                if (rank, main_range.key) in self.offsets:
                    index, offset, _ = self.offsets[rank, main_range.key]
                    self.memory[rank, index][
                        offset + main_range.begin : offset + main_range.end
                    ] = 1

    def run(self, seed: int) -> None:
        """Takes items in an order that `seed` chooses, until none can be taken."""
        rng = random.Random(seed)
        while ready := [place for place, queue in self.waiting.items() if self._can(place, queue)]:
            rank, comm_stream = rng.choice(ready)
            kind, index, reduction_step = self.waiting[rank, comm_stream][0]
            if kind == "publish":
                self._move_back(rank, index, reduction_step)
            for member in self._members(rank, index, reduction_step):
                self.waiting[member, comm_stream].pop(0)

    @property
    def stuck(self) -> list[tuple[int, int]]:
        return [place for place, queue in self.waiting.items() if queue]

    @property
    def stale(self) -> list[tuple[int, str]]:
        """Returns (rank, key) of what is not what was stepped."""
        return [
            (rank, key)
            for (rank, key), (index, offset, numel) in self.offsets.items()
            if not bool(self.memory[rank, index][offset : offset + numel].all())
        ]

    def _members(self, rank: int, index: int, reduction_step: int) -> tuple[int, ...]:
        return self.buckets[rank, index].route[reduction_step].ranks

    def _can(self, place: tuple[int, int], queue: list[Item]) -> bool:
        if not queue:
            return False
        rank, comm_stream = place
        others = [self.waiting[m, comm_stream] for m in self._members(rank, *queue[0][1:])]
        return all(other and other[0] == queue[0] for other in others)

    def _move_back(self, rank: int, index: int, number: int) -> None:
        reduction_step = self.buckets[rank, index].route[number]
        regions = {m: self.buckets[m, index].region(m, number) for m in reduction_step.ranks}
        assert len(set(regions.values())) == 1
        here = slice(regions[rank].start, regions[rank].stop)
        parts = [self.memory[m, index][here] for m in reduction_step.ranks]
        if reduction_step.placement.scatters:
            numels = list(self.buckets[rank, index].scattered(number, rank))
            result = torch.cat([p.split(numels)[i] for i, p in enumerate(parts)])
        else:
            result = parts[0].clone()
        for part in parts:
            part.copy_(result)


def items(plan: Plan, comm_stream: int) -> list[Item]:
    there: list[Item] = [
        ("launch", x.bucket, x.step) for x in plan.launches if x.comm_stream == comm_stream
    ]
    back: list[Item] = [
        ("publish", x.bucket, x.step) for x in plan.publishes if x.comm_stream == comm_stream
    ]
    return there + back + there


@quick
@given(cases(), st.integers(0, 99))
def test_nothing_waits_for_each_other_and_all_have_what_was_stepped(case: Case, seed: int) -> None:
    world = World(case.plans, case.comm_streams)
    world.run(seed)
    assert (world.stuck, world.stale) == ([], [])


@quick
@given(cases())
def test_publishes_go_backwards_along_a_route_once_each(case: Case) -> None:
    """Each stage of a rank waits for all that brings parameters to it there."""
    for rank, plan in case.plans.items():
        local, buckets = case.topology.at(rank).local_stages, {b.index: b for b in plan.buckets}
        for bucket in plan.buckets:
            back = [x.step for x in plan.publishes if x.bucket == bucket.index]
            taken = {x.step for x in plan.launches if x.bucket == bucket.index}
            with_parameter_sync = [h for h in taken if bucket.route[h].placement is not REPLICATE]
            assert back == sorted(with_parameter_sync, reverse=True)
        assert all(x.comm_stream == x.bucket % case.comm_streams for x in plan.publishes)
        for publish in plan.publishes:
            step = buckets[publish.bucket].route[publish.step]
            comes = step.placement.scatters or rank != min(step.ranks)
            readers = set(local).intersection(buckets[publish.bucket].holders)
            assert set(publish.readers) == (readers if comes else set())


@quick
@given(cases(), st.permutations(range(3)))
def test_any_rank_plans_the_same_whatever_the_order_of_handlers(
    case: Case, order: list[int]
) -> None:
    handlers = [case.handlers[i] for i in order]
    assert len({plan.digest for plan in case.plans.values()}) == 1
    ranks = case.topology.ranks
    for rank in {ranks[0], ranks[-1]}:
        view = case.topology.at(rank)
        assert (
            make_plan(case.manifest, view, handlers, GradientOptions(**case.options))
            == case.plans[rank]
        )


@quick
@given(cases(permuted=True), st.integers(0, 99))
def test_a_mesh_in_any_order_is_right_or_refused(case: Case, seed: int) -> None:
    """On permuted ranks members of a REPLICATE had other rows, and a tie other owners: a hang."""
    try:
        found = case.plans
    except PlanError as error:
        assert "number the ranks so that they ascend" in str(error)  # noqa: PT017
        return
    world = World(found, case.comm_streams)
    world.run(seed)
    assert (world.stuck, world.stale) == ([], [])


# --- stories

TIE = Manifest(((entry("w", 40),), (entry("w", 40),)), (((0, "w"), (1, "w")),))


def test_more_flags_than_elements_make_rows_as_large_as_the_flags() -> None:
    """One parameter of 3 elements beside 40 empty ones: 41 flags did not fit into 16 elements."""
    model = Manifest(((entry("w", 3), *(entry(f"e{i}", 0) for i in range(40))),), ())
    for plan in make_plans(
        model, grid(1, 2), [("s", By("dp", SHARD))], GradientOptions(bucket_bytes=64)
    ).values():
        (bucket,) = plan.buckets
        assert (len(bucket.slots), bucket.payload_numel) == (41, 2 * 48)
        assert len(bucket.region(plan.rank, 1)) == 48


# Layout, order, and what all ranks share.


@quick
@given(cases())
def test_every_trained_routed_parameter_has_one_slot_that_fits(case: Case) -> None:
    for rank, plan in case.plans.items():
        records = {r.key: r for r in case.manifest.records(case.topology.at(rank))}
        routes = dict(plan.routes)
        trained = [key for key, r in records.items() if r.requires_grad and key in routes]
        assert sorted(key for keys in contents(plan) for key in keys) == sorted(trained)
        assert list(routes) == sorted(routes)
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


def bytes_in(bucket: Bucket, *slots: Slot) -> int:
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
                assert bytes_in(bucket, *bucket.slots, after.slots[0]) > capacity
            for bucket in buckets:
                filled = [slot for slot in bucket.slots if slot.numel]
                assert bytes_in(bucket, *filled) <= capacity or len(filled) == 1


@quick
@given(cases())
def test_all_ranks_share_layout_groups_and_digest(case: Case) -> None:
    found = case.plans
    assert len({(plan.groups, plan.digest) for plan in found.values()}) == 1
    layouts: dict[int, set[object]] = {}
    launching, routed = set(), set()
    for rank, plan in found.items():
        buckets = {bucket.index: bucket for bucket in plan.buckets}
        for index, bucket in buckets.items():
            layout = tuple(getattr(bucket, name) for name in LAYOUT)
            layouts.setdefault(index, set()).add((layout, signature(bucket.route)))
            for step in bucket.route:
                assert rank in step.ranks
                routed.add((step.ranks, index % case.comm_streams))
                same = {b.index: b for b in found[step.ranks[0]].buckets}[index].route
                assert step in same
        for launch in plan.launches:
            launching.add((buckets[launch.bucket].route[launch.step].ranks, launch.comm_stream))
        for _, route in plan.routes:
            for step in route:
                launching.add((step.ranks, 0))
                # All its ranks make the same parameters equal, in the same order.
                common = [key for key, route in plan.routes if step in route]
                for member in step.ranks:
                    theirs = [key for key, route in found[member].routes if step in route]
                    assert theirs == common
    assert all(len(layout) == 1 for layout in layouts.values())
    assert sorted(layouts) == list(range(len(layouts)))
    groups = next(iter(found.values())).groups
    assert launching <= set(groups) <= launching | routed
    assert groups == tuple(sorted(groups))


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
