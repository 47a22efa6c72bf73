"""What the tests of plans share: a handler that places anywhere, and models as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from pipegrad import GradientHandler, Placement, Reduction, Topology
from pipegrad.model.manifest import Manifest, ParameterEntry
from pipegrad.plan.options import GradientOptions
from pipegrad.plan.plan import Plan, make_plan
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

    def reductions(self, parameters: Any, topology: Topology) -> Iterable[Reduction]:
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
    **options: Any,
) -> dict[int, Plan]:
    return {
        rank: make_plan(
            manifest,
            topology.at(rank),
            handlers,
            GradientOptions(bucket_bytes=bucket_bytes, **options),
        )
        for rank in topology.ranks
    }


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
