"""`pipegrad plan`: prints what the ranks of a configuration will do, without starting any."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipegrad.commands.drawing import Drawing, draws
from pipegrad.commands.options import AS_JSON, Whole, configured, print_parts, usage_errors
from pipegrad.errors import reason
from pipegrad.printable import printable_lines

if TYPE_CHECKING:
    from pipegrad.model.manifest import Manifest
    from pipegrad.partition.cut_model import Cut
    from pipegrad.simulation.costs import Costs
    from pipegrad.train.config import Config
    from pipegrad.train.job import Job

_MOST_RANKS = 2**20  # a topology lists its ranks


@click.command()
@configured
@click.option(
    "--ranks",
    type=Whole(1, _MOST_RANKS),
    help="How many; by default as CONFIG says.",
)
@click.option("--rank", type=Whole(min=0), help="Print all that this rank does.")
@click.option(
    "--costs",
    "costs_file",
    type=Path,
    metavar="FILE",
    help="A file of costs: times and memory are then simulated with them.",
)
@click.option(
    "--profile",
    "profile_file",
    type=Path,
    metavar="FILE",
    help="Measure the stages in this process, plan with their costs, and save them.",
)
@AS_JSON
@draws
def plan(
    drawing: Drawing,
    loaded: Callable[[], Config],
    *,
    ranks: int | None,
    rank: int | None,
    costs_file: Path | None,
    profile_file: Path | None,
    as_json: bool,
) -> None:
    """Print what the ranks of CONFIG will do, without starting any: one replica, and sums."""
    from pipegrad.simulation.auto import Auto
    from pipegrad.simulation.costs import Costs
    from pipegrad.train.rendering import rendered_summary
    from pipegrad.train.summary import make_summary, predicted, rank_as_text, summarize_rank
    from pipegrad.train.tables import make_console

    with usage_errors():
        costs = Costs.load(costs_file) if costs_file else None
        config = loaded()
        job, cut, manifest = _prepared(config, ranks, costs_file)
        if profile_file:
            costs = _profiled(job, costs, profile_file)
            if isinstance(job.generator.plugin, Auto):  # it chooses with what was measured
                job, cut, manifest = _prepared(config, ranks, profile_file)
        if drawing.is_wanted:
            drawing.write([predicted(job, manifest, costs)])
        if rank is not None and as_json:
            click.echo(json.dumps(summarize_rank(job, manifest, rank), indent=2))
        elif rank is not None:
            click.echo(printable_lines(rank_as_text(job, manifest, rank)))
        elif as_json:
            click.echo(json.dumps(make_summary(job, cut, manifest, costs), indent=2))
        else:
            summary = make_summary(job, cut, manifest, costs)
            print_parts(make_console(), rendered_summary(summary, job.schedule))


def _profiled(job: Job, costs: Costs | None, path: Path) -> Costs:
    """Returns costs with measured stages, and saves them; the network is that of `costs`."""
    from pipegrad.simulation.costs import Costs
    from pipegrad.train.preflight import profile_job

    found = replace(costs or Costs(()), stages=profile_job(job))
    try:
        found.save(path)
    except OSError as error:
        raise click.ClickException(f"--profile {path}: {reason(error)}") from error
    return found


def _prepared(config: Config, ranks: int | None, costs: Path | None) -> tuple[Job, Cut, Manifest]:
    from pipegrad.train.job import Job

    job = Job(config, ranks, costs)

    def on(device: str) -> tuple[Job, Cut, Manifest]:
        cut = job.cut(job.model(device))
        return job, cut, job.manifest(cut)

    try:
        return on("meta")
    # Without memory first: a plan of a large model fits anywhere. A factory that reads its own
    # tensors fails on "meta", and needs real ones.
    except Exception:  # noqa: BLE001 - any error of the factory
        return on("cpu")
