"""Costs of a step that no microbatch has: reductions, the optimizer, and the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Literal, NamedTuple

import torch

from pipegrad.comm import sync_points
from pipegrad.errors import ScheduleError
from pipegrad.gradients.main_params import MainParameter
from pipegrad.gradients.named_optimizer import Optimizer, parts_in
from pipegrad.gradients.sync import GradientSync
from pipegrad.plugins.handler import ReductionStep
from pipegrad.simulation.costs import CollectiveCosts, HostCosts
from pipegrad.simulation.timeline import COMPUTE, Timeline


class OptimizerCosts(NamedTuple):
    """What stepping a stage takes.

    Attributes:
        seconds: Of the optimizer's step.
        num_bytes: Of its state, and of master copies.
    """

    seconds: float
    num_bytes: int


def collective_costs(sync: GradientSync) -> dict[str, CollectiveCosts]:
    """Returns what the reductions of this rank's pipeline send, by the names of the Program."""
    pipeline = sync.topology.ranks_along(sync.topology.pipeline)
    costs = dict[str, CollectiveCosts]()
    for plan in sync.plans(pipeline).values():
        buckets = {bucket.index: bucket for bucket in plan.buckets}
        for launch in plan.launches:
            bucket, number = buckets[launch.bucket], launch.step
            step = bucket.route[number]
            costs[bucket.name_of(number)] = CollectiveCosts(
                num_bytes=bucket.nbytes(number, plan.rank),
                num_ranks=len(step.ranks),
                kind=_kind(step),
                sync_bytes=bucket.parameter_nbytes(number, plan.rank)
                if step.syncs_parameters
                else 0,
            )
    return costs


def _kind(step: ReductionStep) -> Literal["all-reduce", "reduce-scatter", "send"]:
    # The two ranks of a pair send each other as much as in an all-reduce of two.
    if step.placement.has_owner:
        return "send"
    return "reduce-scatter" if step.placement.scatters else "all-reduce"


def gradient_bytes(sync: GradientSync, stage: int) -> int:
    """Returns the bytes of a stage's gradients, with their buckets.

    A bucket of several stages of this rank counts for the lowest of them.
    """
    local = set(sync.topology.local_stages)
    in_buckets = {slot.key for bucket in sync.plan.buckets for slot in bucket.slots}
    buckets = sum(
        bucket.payload_numel * bucket.dtype.itemsize
        for bucket in sync.plan.buckets
        if min(local.intersection(bucket.holders)) == stage
    )
    others = sum(
        sync.parameter(record).nbytes
        for record in sync.records()
        if record.requires_grad and record.stage == stage and record.key not in in_buckets
    )
    return buckets + others


def optimizer_costs(
    sync: GradientSync, optimizer: Optimizer | None, stage: int, repeats: int
) -> OptimizerCosts:
    """Returns what stepping a stage takes, measured with a copy of the optimizer.

    The copy has the groups of `optimizer`, not its state, and steps clones with gradients of zero.
    If it is made of several, each of them has a copy.
    A class that cannot be made of its groups alone is not measured; then its own state counts.

    Raises:
        ScheduleError: If the optimizer has no parameter of the stage.
    """
    own = [main for main in sync.main_parameters() if main.record.stage == stage]
    masters = sum(main.tensor.nbytes for main in own if main.copied)
    if optimizer is None or not own:
        return OptimizerCosts(0.0, masters)
    parts = [(type(part), _copied_groups(part, own)) for part in parts_in(optimizer)]
    if not any(groups for _, groups in parts):
        raise ScheduleError(
            f"the optimizer has none of the parameters that stage {stage} steps: give the one of "
            f"scheduler.optimizer(), or leave it out"
        )
    kinds: list[tuple[Callable[[object], torch.optim.Optimizer], object]] = [*parts]
    try:
        twins = [kind(groups) for kind, groups in kinds if groups]
    except TypeError:
        state = [optimizer.state.get(main.tensor, {}) for main in own]
        return OptimizerCosts(0.0, masters + _state_bytes(state))
    seconds = [_step_seconds(twins, sync.device) for _ in range(repeats + 1)][1:]
    states = (state for twin in twins for state in twin.state.values())
    return OptimizerCosts(statistics.median(seconds), masters + _state_bytes(states))


def _state_bytes(states: Iterable[Mapping[str, object]]) -> int:
    tensors = (value for state in states for value in state.values())
    return sum(value.nbytes for value in tensors if isinstance(value, torch.Tensor))


def _copied_groups(
    optimizer: torch.optim.Optimizer, own: list[MainParameter]
) -> list[dict[str, object]]:
    """Returns the groups of some main parameters, of clones with gradients of zero."""
    ids = {id(main.tensor) for main in own}
    groups = list[dict[str, object]]()
    for group in optimizer.param_groups:
        clones = [p.detach().clone().requires_grad_() for p in group["params"] if id(p) in ids]
        for clone in clones:
            clone.grad = torch.zeros_like(clone)
        options = {name: value for name, value in group.items() if name != "params"}
        groups += [{**options, "params": clones}] if clones else []
    return groups


def _step_seconds(optimizers: Iterable[torch.optim.Optimizer], device: torch.device) -> float:
    sync_points.finish_device(device)
    began = time.perf_counter()
    for optimizer in optimizers:
        optimizer.step()
    sync_points.finish_device(device)
    return time.perf_counter() - began


def host_costs(timeline: Timeline) -> HostCosts:
    """Returns what hosts take on top of computing, of a measured timeline.

    The host time right before a compute is that of an action: a mean. All other host time is that
    of the step, on the rank that has least of it. Other ranks also wait in it for what no span
    says, such as the loss of the last stage.
    """
    before, actions, rests = 0.0, 0, list[float]()
    for rank in range(timeline.num_ranks):
        spans = timeline.on_rank(rank)
        host = sum(s.seconds for s in spans if s.kind == "host")
        own = sum(
            s.seconds for s, after in pairwise(spans) if s.kind == "host" and after.kind in COMPUTE
        )
        before += own
        actions += sum(s.kind in COMPUTE for s in spans)
        rests.append(host - own)
    return HostCosts(
        action_seconds=before / max(actions, 1),
        step_seconds=max(0.0, min(rests, default=0.0)) / max(len(timeline.step_ends), 1),
    )
