"""What the tests of plans share: models as plain data, and handlers that call a function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from pipegrad import GradientHandler, ParameterRecord, Reduction, Topology
from pipegrad.model.manifest import Manifest, ParameterEntry
from pipegrad.plan.options import GradientOptions
from pipegrad.plan.plan import Plan, make_plan
from pipegrad_handlers.data_parallel import DataParallel
from pipegrad_handlers.pipeline_shared import PipelineShared

FLOAT, HALF = torch.float32, torch.bfloat16
Handlers = Sequence[tuple[str, GradientHandler]]
BOTH: Handlers = (("pipeline-shared", PipelineShared()), ("data-parallel", DataParallel()))
LAYOUT = ("index", "ready", "holders", "dtype", "wire_dtype", "slots", "payload_numel")


Reductions = Callable[[Sequence[ParameterRecord], Topology], Iterable[Reduction]]


class Say(GradientHandler):
    """Asks for what a function returns."""

    def __init__(self, function: Reductions) -> None:
        self._function = function

    def reductions(
        self, parameters: Sequence[ParameterRecord], topology: Topology
    ) -> Iterable[Reduction]:
        return self._function(parameters, topology)


def say(function: Reductions) -> tuple[str, GradientHandler]:
    return "mine", Say(function)


def record(
    name: str,
    *shape: int,
    key: str = "",
    stage: int = 0,
    holders: tuple[int, ...] = (),
    dtype: torch.dtype = FLOAT,
    trained: bool = True,
    kind: str = "",
) -> ParameterRecord:
    holders = holders or (stage,)
    key = key or f"{holders[0]}.{name}"
    return ParameterRecord(key, name, stage, shape, dtype, trained, holders, 0, kind)


def entry(
    name: str,
    *shape: int,
    aliases: tuple[str, ...] = (),
    dtype: torch.dtype = FLOAT,
    gradient_dtype: torch.dtype | None = None,
    stride: tuple[int, ...] | None = None,
    trained: bool = True,
) -> ParameterEntry:
    strides = torch.empty(shape, device="meta").stride() if stride is None else stride
    return ParameterEntry(name, aliases, shape, strides, dtype, gradient_dtype or dtype, trained)


def manifest(*names: Sequence[str], wrappers: tuple[tuple[int, str], ...] = ()) -> Manifest:
    """Stages of parameters of two elements; ``emb``, ``head`` and ``third`` are one."""
    stages = tuple(tuple(entry(name, 2) for name in stage) for stage in names)
    tie = [(s, n) for s, stage in enumerate(names) for n in stage if n in ("emb", "head", "third")]
    return Manifest(stages, (tuple(tie),) if len(tie) > 1 else (), wrappers)


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
