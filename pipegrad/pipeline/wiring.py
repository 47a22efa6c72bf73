"""What a Scheduler is made of: its schedule, the wiring of its stages, what its gradients need."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from pipegrad.comm.agreement import same
from pipegrad.errors import ScheduleError, TopologyError
from pipegrad.gradients.sync import GradientSync
from pipegrad.model.dtensor import is_dtensor
from pipegrad.pipeline.binding import bind
from pipegrad.pipeline.compute import Loss
from pipegrad.pipeline.stage import Stage, Wiring, wire
from pipegrad.schedules import Schedule, generate, registry
from pipegrad.schedules.program.program import Collective
from pipegrad.topology import Topology

ScheduleSpec = Schedule | str | Mapping[str, Any]
Ends = dict[int, tuple[tuple[str, ...], tuple[str, ...]]]  # stage -> its inputs and outputs


def schedule_of(spec: ScheduleSpec, topology: Topology, num_microbatches: int | None) -> Schedule:
    """Returns the schedule that is asked for, of this pipeline.

    Raises:
        PipegradError: If there is none, or not of these numbers.
    """
    num_ranks = topology.size(topology.pipeline)
    if isinstance(spec, Schedule):
        if num_microbatches not in (None, spec.num_microbatches) or spec.num_ranks != num_ranks:
            raise ScheduleError(
                f"schedule {spec.name!r} is of {spec.num_ranks} ranks and {spec.num_microbatches} "
                f"microbatches, asked for are {num_ranks} and {num_microbatches}"
            )
        return spec
    if num_microbatches is None:
        raise ScheduleError("num_microbatches is missing; only a Schedule knows its own")
    generator = registry.resolve(spec)
    return generate(generator, num_ranks=num_ranks, num_microbatches=num_microbatches)


def check_stages(schedule: Schedule, stages: Sequence[Stage], topology: Topology) -> None:
    """Refuses stages that are not this rank's, or that reduce their gradients themselves."""
    found = sorted(stage.index for stage in stages)
    if found != list(topology.local_stages):
        raise TopologyError(
            f"schedule {schedule.name!r} places stages {list(topology.local_stages)} on this rank, "
            f"which has {found}"
        )
    splits = any(action.kind == "W" for row in schedule.actions for action in row)
    for stage in stages:
        _ = stage.binding  # raises if the names of inputs look swapped
        if splits and any(is_dtensor(p) for p in stage.module.parameters()):
            raise TopologyError(
                f"schedule {schedule.name!r} splits backward, and stage {stage.index} has DTensor "
                f"parameters, whose backward FSDP2, or tensor parallelism, wants whole: take a "
                f"schedule that does not split, such as '1f1b' or 'interleaved-1f1b'"
            )
        for part in stage.module.modules():
            if isinstance(part, DistributedDataParallel):
                raise TopologyError(
                    f"stage {stage.index} has a {type(part).__name__}, which wants a backward "
                    f"behind each forward: give the module inside, and the handler 'data-parallel' "
                    f"reduces its gradients"
                )


def check_whole(whole: object, wiring: Wiring) -> None:
    """Refuses names of what is passed whole that nothing is given under."""
    known = (*wiring.external, "target")
    if not isinstance(whole, tuple | list) or any(name not in known for name in whole):
        raise ScheduleError(
            f"whole is {whole!r}, expected a tuple of names of what step() is given, out of "
            f"{list(known)}"
        )


def bound_loss(loss_fn: Loss | None, stages: Sequence[Stage], topology: Topology) -> Loss | None:
    """Returns how to call the loss with the outputs of the last stage, and a target.

    Raises:
        ScheduleError: If the names of its parameters look swapped.
    """
    last = [stage for stage in stages if stage.index == topology.num_stages - 1]
    if loss_fn is None or not last:
        return loss_fn
    return bind(loss_fn, (*last[0].outputs, "target"), "the last stage, with loss_fn's target,")


def wired(told: Mapping[int, Ends]) -> Wiring:
    """Returns how the stages hang together, the same in every pipeline."""
    views: dict[int, dict[int, str]] = {}
    merged: Ends = {}
    for rank, ends in told.items():
        for stage, names in ends.items():
            views.setdefault(stage, {})[rank] = str(names)
            merged[stage] = names
    for stage in sorted(views):
        same(f"inputs and outputs of stage {stage}", views[stage])
    return wire(merged)


def fed(schedule: Schedule, wiring: Wiring) -> Schedule:
    """Returns `schedule` of stages that hang together so; the same one if they are a chain."""
    sources = [set[int]() for _ in schedule.stage_to_rank]
    for link in wiring.links:
        for consumer in link.consumers:
            sources[consumer].add(link.producer)
    feeds = tuple(tuple(sorted(found)) for found in sources)
    is_chain = all(found == ((s - 1,) if s else ()) for s, found in enumerate(feeds))
    return replace(schedule, feeds=None if is_chain else feeds)


def collectives_of(sync: GradientSync) -> tuple[Collective, ...]:
    """Returns the reductions of this rank's pipeline, as the Program sees them."""
    topology = sync.topology
    pipeline = topology.ranks_along(topology.pipeline)
    found: dict[tuple[int, int, int, tuple[int, ...]], Collective] = {}
    readers = defaultdict[tuple[int, int, tuple[int, ...]], set[int]](set)
    plans = sync.plans(pipeline).values()
    for plan in plans:
        routes = {bucket.index: bucket.route for bucket in plan.buckets}
        for publish in plan.publishes:
            ranks = routes[publish.bucket][publish.hop].ranks
            readers[publish.bucket, publish.hop, ranks].update(publish.readers)
    for plan in plans:
        buckets = {bucket.index: bucket for bucket in plan.buckets}
        for launch in plan.launches:
            bucket = buckets[launch.bucket]
            hop = bucket.route[launch.hop]
            places = sorted({topology.at(r).coordinate(topology.pipeline) for r in hop.ranks})
            name = f"bucket {bucket.index}: {hop} over ranks {list(hop.ranks)}"
            stages = tuple(s for s in bucket.holders if topology.stage_to_rank[s] in places)
            found[launch.ready, launch.hop, launch.bucket, hop.ranks] = Collective(
                name,
                tuple(places),
                stages,
                launch.comm_stream,
                tuple(sorted(readers[launch.bucket, launch.hop, hop.ranks])),
            )
    return tuple(found[key] for key in sorted(found))
