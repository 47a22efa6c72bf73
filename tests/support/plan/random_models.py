"""Random models on random meshes, whose parameters are placed by name along each dimension."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st

from pipegrad import ParameterRecord, Placement, Topology
from pipegrad.model.manifest import Manifest, ParameterEntry
from pipegrad.plan.options import GradientOptions
from pipegrad.plan.plan import Plan, make_plans
from pipegrad.plugins.handler import Op
from tests.support.gradients.placements import OWNER, REPLICATE, SHARD, WHOLE, By
from tests.support.gradients.plans import FLOAT, HALF, entry

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
