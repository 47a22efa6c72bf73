"""Summary: stages, ties, routes and the plans of one replica, as plain data that fits into JSON.

A summary has the ranks of one replica alone. Sums over all ranks are multiples, because
`check_routes` has checked that other replicas do the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from pipegrad.errors import PlanError
from pipegrad.model.manifest import Manifest
from pipegrad.observe.measured_costs import reductions_in, with_codecs
from pipegrad.partition.cut_model import Cut
from pipegrad.pipeline.wiring import synced_stages
from pipegrad.plan.buckets import Bucket
from pipegrad.plan.plan import Plan
from pipegrad.plugins.handler import Placement
from pipegrad.plugins.registry import ResolvedPlugin, redacted
from pipegrad.schedules import Program, Proof, lower, verify
from pipegrad.simulation.choose import cut_at
from pipegrad.simulation.costs import CollectiveCosts, Costs, StageCosts
from pipegrad.simulation.simulator import simulate
from pipegrad.simulation.timeline import Timeline
from pipegrad.topology import Topology
from pipegrad.train.job import Job

Span = tuple[int, int, int]  # first, last, step
_UNIT_COSTS = StageCosts(forward_seconds=1, backward_seconds=2, weight_seconds=1)
UNIT_COSTS_IN_WORDS = "F 1, B 2, I 1, W 1, and nothing for sending"


def make_summary(
    job: Job, cut: Cut, manifest: Manifest, costs: Costs | None = None
) -> dict[str, Any]:
    """Returns the summary of a job, as plain data that fits into JSON.

    Args:
        job: The job.
        cut: The stages of all ranks.
        manifest: The model that its ranks agreed on, or will agree on.
        costs: Costs of computing and sending; without them, times are in units.

    Raises:
        PlanError: If `Job.plans` raises it.
        ScheduleError: If the costs do not fit the job's stages.
    """
    topology = job.topology()
    plans = job.plans(manifest, ranks=topology.one_replica)
    program = lower(job.schedule)
    proof, own = verify(program), _of_job(job, plans, program, costs)
    result = simulate(program, own, records=False)
    step = result.step_seconds[0]
    busy = [
        sum(own.stages[action.stage].seconds(action.kind) for action in actions)
        for actions in job.schedule.actions
    ]
    bubble = [1 - seconds / step if step else 0.0 for seconds in busy]
    times = {
        "stage_to_rank": list(job.schedule.stage_to_rank),
        "time_unit": "seconds" if costs else "units",
        "step_time": step,
        "bubble": bubble,
        "peak_bytes": list(result.peak_bytes) if costs else None,
    }
    views = _views(job, topology)
    stages = [_stage(views, cut, manifest, stage) for stage in sorted(cut.modules)]
    buckets = {bucket.index: bucket for plan in plans.values() for bucket in plan.buckets}
    return {
        "ranks": job.num_ranks,
        "pipeline": job.pipeline,
        "data": job.data,
        "dimensions": job.config.parallel.dimensions,
        "replicas": job.num_ranks // job.pipeline,
        "microbatches": job.schedule.num_microbatches,
        "schedule": _identity(job.generator) | times,
        "is_measured": job.measured_generator is not None,
        "choice": None if job.choice is None else job.choice.to_json(),
        "handlers": [_identity(resolved) for resolved in job.handlers.values()],
        "codecs": str(job.codecs),
        "stages": stages,
        "ties": list(_ties(job, manifest)),
        "routes": list(_routes(job, manifest, plans)),
        "links": list(_links(program, own if costs else None)),
        "pipeline_ranks": list(_pipeline_ranks(job, stages, plans, proof, bubble)),
        "collectives": sum(n for n, _ in _launched(buckets.values(), topology)),
        "reduced_bytes": sum(nbytes for _, nbytes in _launched(buckets.values(), topology)),
    }


def summarize_rank(job: Job, manifest: Manifest, rank: int) -> dict[str, Any]:
    """Returns the plan of one rank, and the items of its Program, as plain data.

    Here each stage passes one value to the next, because a job finds the others in its first step.

    Raises:
        PlanError: If `Job.plans` raises it, or there is no such rank.
    """
    plan, program, own = _of_rank(job, manifest, rank)
    return plan_data(plan) | {"pipeline_rank": own, "program": program.listing(own).split("\n")}


def rank_as_text(job: Job, manifest: Manifest, rank: int) -> str:
    """Returns the result of `summarize_rank` as text.

    Raises:
        PlanError: If `summarize_rank` raises it.
    """
    plan, program, own = _of_rank(job, manifest, rank)
    return f"{plan}\n\npipeline {program.listing(own)}"


def _of_rank(job: Job, manifest: Manifest, rank: int) -> tuple[Plan, Program, int]:
    """Returns the plan of a rank, the Program of its replica, and its pipeline rank."""
    if rank not in job.topology().ranks:
        raise PlanError(f"--rank {rank}: the job has ranks 0 to {job.num_ranks - 1}")
    view = job.topology(rank)
    plans = job.plans(manifest, ranks=view.ranks_along(view.pipeline))
    program = lower(job.schedule, synced=synced_stages(plans.values()))
    return plans[rank], program, view.coordinate(view.pipeline)


def plan_data(plan: Plan) -> dict[str, Any]:
    """Returns a plan as plain data: buckets, launches and publishes."""
    return {
        "rank": plan.rank,
        "buckets": [
            {
                "bucket": bucket.index,
                "ready": bucket.ready,
                "holders": list(bucket.holders),
                "dtype": str(bucket.dtype).removeprefix("torch."),
                "wire_dtype": str(bucket.wire_dtype).removeprefix("torch."),
                "elements": bucket.payload_numel,
                "parameters": [slot.key for slot in bucket.slots],
                "route": [
                    {
                        "reduction": str(step),
                        "handler": step.handler,
                        "placement": step.placement.value,
                        "op": step.op,
                        "axes": step.axes,
                        "ranks": spans(step.ranks),
                    }
                    for step in bucket.route
                ],
            }
            for bucket in plan.buckets
        ],
        "launches": [vars(launch) for launch in plan.launches],
        "publishes": [vars(p) | {"readers": list(p.readers)} for p in plan.publishes],
        "divisors": dict(plan.divisors),
    }


def _identity(resolved: ResolvedPlugin[Any]) -> dict[str, Any]:
    return {
        "name": resolved.name,
        "value": resolved.value,
        "distribution": resolved.distribution,
        "version": resolved.version,
        "options": redacted(dict(resolved.options)),
    }


def predicted(job: Job, manifest: Manifest, costs: Costs | None = None) -> Timeline:
    """Returns the timeline of a step, simulated.

    Raises:
        ScheduleError: If the costs do not fit the job's stages.
    """
    program, plans = lower(job.schedule), job.plans(manifest, ranks=job.topology().one_replica)
    timeline = simulate(program, _of_job(job, plans, program, costs)).timeline
    assert timeline is not None
    if costs is not None:
        return timeline
    return replace(timeline, time_unit="units", notes={"costs": UNIT_COSTS_IN_WORDS})


def _of_job(job: Job, plans: Mapping[int, Plan], program: Program, costs: Costs | None) -> Costs:
    """Returns the costs of a job's stages and chunks, its reductions, and its codecs.

    Costs of smaller stages are merged. A reduction that the costs do not have takes no time.
    """
    number = len(program.schedule.stage_to_rank)
    costs = costs or Costs(stages=(_UNIT_COSTS,) * number)
    size, rest = divmod(len(costs.stages), number)
    own = costs if rest or not size else cut_at(costs, range(size, number * size, size))
    own = own.of_chunks(program.schedule.chunks)
    reductions = {
        name: replace(
            own.collectives.get(name, CollectiveCosts()),
            stages=planned.stages,
            comm_stream=planned.comm_stream,
            readers=planned.readers,
        )
        for name, planned in reductions_in(plans.values(), job.topology()).items()
    }
    return with_codecs(replace(own, collectives=reductions), job.codecs, program)


def _views(job: Job, topology: Topology) -> list[Topology]:
    """Returns the topology as the rank of each stage sees it, in one replica."""
    views = [job.topology(rank) for rank in topology.one_replica]
    return [views[rank] for rank in job.schedule.stage_to_rank]


def _stage(views: Sequence[Topology], cut: Cut, manifest: Manifest, stage: int) -> dict[str, Any]:
    entries = manifest.stages[stage]
    parameters = list(cut.modules[stage].parameters())
    return {
        "stage": stage,
        "ranks": spans(_replicas(views[stage])),
        "layers": cut.layers_of(stage),
        "parameters": len(entries),
        "elements": sum(p.numel() for p in parameters),
        "bytes": sum(p.numel() * p.dtype.itemsize for p in parameters),
        "trained": sum(p.numel() for p in parameters if p.requires_grad),
    }


def _replicas(view: Topology) -> tuple[int, ...]:
    """Returns the ranks of all replicas at the pipeline coordinate of a rank."""
    return view.ranks_along(tuple(name for name, _ in view.axes if name != view.pipeline))


def _ties(job: Job, manifest: Manifest) -> Iterator[dict[str, Any]]:
    for tie in manifest.ties:
        stage, name = tie[0]
        entry = next(e for e in manifest.stages[stage] if e.name == name)
        yield {
            "key": f"{stage}.{name}",
            "shape": list(entry.shape),
            "places": [list(location) for location in tie],
            "ranks": list(job.topology().ranks_of([stage for stage, _ in tie])),
        }


def _routes(job: Job, manifest: Manifest, plans: Mapping[int, Plan]) -> Iterator[dict[str, Any]]:
    """Yields each route, with its numbers of parameters and elements."""
    # Several ranks have a plan for the same parameter. It counts once, at its lowest rank.
    seen = set[str]()
    rows: dict[str, dict[str, Any]] = {}
    for rank, plan in plans.items():
        routes = dict(plan.routes)
        for record in manifest.records(job.topology(rank)):
            route = " then ".join(map(str, routes.get(record.key, ()))) or "stays where it is"
            route = route if record.requires_grad else "frozen"
            if record.key not in seen:
                # Routes keep the order in which parameters take them first: the table is stable.
                row = rows.setdefault(route, {"route": route, "parameters": 0, "elements": 0})
                row["parameters"] += 1
                row["elements"] += record.numel
            seen.add(record.key)
    yield from rows.values()


def _links(program: Program, costs: Costs | None) -> Iterator[dict[str, Any]]:
    """Yields the messages and bytes of a step, for each direction between two pipeline ranks."""
    channels: dict[tuple[int, int], list[int | None]] = {}
    for channel in program.channels:
        link = program.links[channel.link]
        is_known = costs is not None and link.name in costs.stages[link.producer].outputs
        num_bytes = costs.crossing(link, channel).num_bytes if costs and is_known else None
        channels.setdefault((channel.source, channel.target), []).append(num_bytes)
    microbatches = program.schedule.num_microbatches
    for (source, target), sizes in sorted(channels.items()):
        known = [size for size in sizes if size is not None]
        yield {
            "source": source,
            "target": target,
            "messages": microbatches * len(sizes),
            "bytes": microbatches * sum(known) if len(known) == len(sizes) else None,
        }


def _pipeline_ranks(
    job: Job,
    stages: list[dict[str, Any]],
    plans: Mapping[int, Plan],
    proof: Proof,
    bubble: Sequence[float],
) -> Iterator[dict[str, Any]]:
    for number, (rank, plan) in enumerate(plans.items()):
        view = job.topology(rank)
        own = [stages[stage] for stage in view.local_stages]
        nbytes, elements = (sum(s[name] for s in own) for name in ("bytes", "elements"))
        yield {
            "pipeline_rank": number,
            "ranks": spans(_replicas(view)),
            "stages": list(view.local_stages),
            "parameters": sum(stage["parameters"] for stage in own),
            "elements": elements,
            "stepped_elements": plan.main_numel,
            "parameter_bytes": nbytes,
            "gradient_bytes": _gradient_bytes(plan, own),
            "live_activations": proof.live_activations[number],
            "receive_buffers": proof.receive_buffers[number],
            "bubble": bubble[number],
            "collectives": len(plan.launches),
            "reduced_bytes": plan.reduced_bytes,
            "published_bytes": plan.published_bytes,
            "plan": plan_data(plan),
        }


def _gradient_bytes(plan: Plan, stages: Iterable[Mapping[str, Any]]) -> int:
    """Returns the bytes of the gradients: in buckets, and outside of buckets."""
    in_buckets = sum(slot.numel for bucket in plan.buckets for slot in bucket.slots)
    rest = plan.trained_numel - in_buckets
    width = max((s["bytes"] // s["elements"] for s in stages if s["elements"]), default=0)
    return sum(b.numel * b.dtype.itemsize for b in plan.buckets) + max(rest, 0) * width


def _launched(buckets: Iterable[Bucket], topology: Topology) -> Iterator[tuple[int, int]]:
    """Yields the number of ranks that launch each reduction of a bucket, and their bytes."""
    replicas = len(topology.ranks) // topology.size(topology.pipeline)
    for bucket in buckets:
        ranks = replicas * len({topology.stage_to_rank[stage] for stage in bucket.holders})
        parts = 1
        for step in bucket.route:
            # The parts of a bucket may have different sizes, but all of them are the payload.
            numel = ranks // parts * bucket.payload_numel + ranks * len(bucket.slots)
            yield ranks, numel * bucket.wire_dtype.itemsize
            # The groups of a step have equal sizes, and after OWNER one rank of each goes on.
            ranks //= len(step.ranks) if step.placement is Placement.OWNER else 1
            parts *= len(step.ranks) if step.placement.scatters else 1


def spans(ranks: Iterable[int]) -> list[Span]:
    """Returns ascending ranks as one span, if they are equally far apart, else as rows."""
    ranks = list(ranks)
    steps = {later - rank for rank, later in pairwise(ranks)}
    if len(ranks) > 2 and len(steps) == 1:
        return [(ranks[0], ranks[-1], steps.pop())]
    found: list[Span] = []
    for rank in ranks:
        first = rank
        if found and found[-1][1] == rank - 1:
            first, *_ = found.pop()
        found.append((first, rank, 1))
    return found
