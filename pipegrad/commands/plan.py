"""`pipegrad plan`: prints what all ranks of a configuration will do, without starting any."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from pipegrad.commands.options import AS_JSON, configured, print_parts, usage_errors

if TYPE_CHECKING:
    from pipegrad.train.config import Config


@click.command()
@configured
@click.option("--ranks", type=click.IntRange(min=1), help="How many; by default as CONFIG says.")
@AS_JSON
def plan(loaded: Callable[[], Config], ranks: int | None, as_json: bool) -> None:
    """Print what all ranks of CONFIG will do, without starting any."""
    from pipegrad.train.summary import rendered
    from pipegrad.train.tables import make_console

    with usage_errors():
        summary = _planned(loaded(), ranks)
    if as_json:
        click.echo(json.dumps(summary, indent=2))
    else:
        print_parts(make_console(), rendered(summary))


def _planned(config: Config, ranks: int | None) -> dict[str, Any]:
    from pipegrad.train.job import Job
    from pipegrad.train.summary import make_summary

    job = Job(config, ranks)

    def planned(device: str) -> dict[str, Any]:
        cut = job.cut(job.model(device))
        return make_summary(job, cut, job.manifest(cut))

    try:
        return planned("meta")
    # Without memory first: a plan of a large model fits anywhere. A factory that reads its own
    # tensors fails on "meta", and needs real ones.
    except Exception:  # noqa: BLE001 - any error of the factory
        return planned("cpu")
