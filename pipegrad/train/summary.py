"""Summary: stages, ties, routes and every rank's plan of a job, as plain data and as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType

from pipegrad.model.manifest import Manifest
from pipegrad.partition.cut_model import Cut
from pipegrad.plan.plan import Plan
from pipegrad.plugins.registry import ResolvedPlugin
from pipegrad.simulation.choose import rows_of
from pipegrad.train.job import Job
from pipegrad.train.tables import table

_MIB = 2**20


def make_summary(job: Job, cut: Cut, manifest: Manifest) -> dict[str, Any]:
    """Returns the summary of a job, as plain data that fits into JSON.

    Args:
        job: The job.
        cut: The stages of all ranks.
        manifest: The model that its ranks agreed on, or will agree on.

    Raises:
        PlanError: As `Job.plans` does.
    """
    plans = job.plans(manifest)
    choice = job.choice
    return {
        "ranks": job.num_ranks,
        "pipeline": job.pipeline,
        "data": job.data,
        "dimensions": job.config.parallel.dimensions,
        "microbatches": job.schedule.num_microbatches,
        "schedule": _identity(job.generator) | {"grid": str(job.schedule).splitlines()},
        "is_measured": job.measured_generator is not None,
        "choice": None if choice is None else choice.to_json(),
        "handlers": [_identity(resolved) for resolved in job.handlers.values()],
        "stages": [_stage(job, cut, manifest, stage) for stage in sorted(cut.modules)],
        "ties": list(_ties(job, manifest)),
        "routes": list(_routes(job, manifest, plans)),
        "plans": [_plan(plan) for plan in plans.values()],
        "collectives": sum(len(plan.launches) for plan in plans.values()),
        "reduced_bytes": sum(plan.reduced_bytes for plan in plans.values()),
    }


def _identity(resolved: ResolvedPlugin[Any]) -> dict[str, Any]:
    return {
        "name": resolved.name,
        "value": resolved.value,
        "distribution": resolved.distribution,
        "version": resolved.version,
        "options": dict(resolved.options),
    }


def _stage(job: Job, cut: Cut, manifest: Manifest, stage: int) -> dict[str, Any]:
    entries = manifest.stages[stage]
    parameters = list(cut.modules[stage].parameters())
    view = job.topology()
    return {
        "stage": stage,
        "ranks": [rank for rank in view.ranks if stage in view.at(rank).local_stages],
        "layers": cut.layers_of(stage),
        "parameters": len(entries),
        "elements": sum(p.numel() for p in parameters),
        "bytes": sum(p.numel() * p.dtype.itemsize for p in parameters),
        "trained": sum(p.numel() for p in parameters if p.requires_grad),
    }


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
    """Yields for each route how many parameters take it."""
    # Several ranks have a plan for the same parameter. It counts once, at its lowest rank.
    route_of: dict[str, str] = {}
    sizes: dict[str, int] = {}
    for rank, plan in plans.items():
        routes = dict(plan.routes)
        for record in manifest.records(job.topology(rank)):
            reduction_steps = " then ".join(map(str, routes.get(record.key, ())))
            route = reduction_steps or "stays where it is"
            route_of.setdefault(record.key, route if record.requires_grad else "frozen")
            sizes[record.key] = record.numel
    # Routes keep the order in which parameters take them first, so the table is stable.
    for route in dict.fromkeys(route_of.values()):
        keys = [key for key, own_route in route_of.items() if own_route == route]
        elements = sum(sizes[key] for key in keys)
        yield {"route": route, "parameters": len(keys), "elements": elements}


def _plan(plan: Plan) -> dict[str, Any]:
    return {
        "rank": plan.rank,
        "buckets": len(plan.buckets),
        "collectives": len(plan.launches),
        "reduced_bytes": plan.reduced_bytes,
        "text": str(plan).splitlines(),
    }


def rendered(summary: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Yields a summary as parts that rich prints."""
    yield (
        f"{summary['ranks']} ranks: pipeline {summary['pipeline']} x data {summary['data']}"
        f"{''.join(f' x {name} {size}' for name, size in summary['dimensions'].items())}, "
        f"{summary['microbatches']} microbatches by {_source(summary['schedule'])}"
    )
    yield "handlers: " + (", ".join(map(_source, summary["handlers"])) or "none")
    yield ""
    if summary["is_measured"]:
        yield "the schedule to begin with; it may change when steps were measured:"
    if summary["choice"]:
        head, *rows = rows_of(summary["choice"])
        yield table(head, rows)
    yield from summary["schedule"]["grid"]
    yield ""
    yield table(
        ["stage", "ranks", "layers", "parameters", "elements", "MiB"],
        (
            [
                stage["stage"],
                _spans(stage["ranks"]),
                _ends(stage["layers"]),
                stage["parameters"],
                f"{stage['elements']:,}",
                f"{stage['bytes'] / _MIB:.2f}",
            ]
            for stage in summary["stages"]
        ),
    )
    for tie in summary["ties"]:
        locations = " and ".join(f"{name!r} on stage {stage}" for stage, name in tie["places"])
        yield (
            f"one parameter {tuple(tie['shape'])}: {locations}, over ranks {tie['ranks']} and alike"
        )
    yield table(
        ["reduction", "parameters", "elements"],
        ([way["route"], way["parameters"], f"{way['elements']:,}"] for way in summary["routes"]),
    )
    for plan in summary["plans"]:
        yield from plan["text"]
        yield ""
    yield (
        f"all ranks: {summary['collectives']} collectives, "
        f"{summary['reduced_bytes'] / _MIB:.2f} MiB a step, each rank's part counted"
    )


def _source(identity: Mapping[str, Any]) -> str:
    where = f"{identity['distribution']} {identity['version']}".strip() or identity["value"]
    options = "".join(f", {name} = {value}" for name, value in identity["options"].items())
    return f"{identity['name']} ({where}{options})"


def _ends(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"


def _spans(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
