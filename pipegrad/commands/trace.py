"""`pipegrad trace`: where a step of a recorded run went, why, and what would help."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipegrad.commands.drawing import Drawing, draws
from pipegrad.commands.options import Progress, Whole, print_parts, usage_errors
from pipegrad.errors import ScheduleError

if TYPE_CHECKING:
    from pipegrad.simulation.timeline import Timeline

_FILE = "timeline.json"


@click.command()
@click.argument("run", type=Path, metavar="RUN")
@click.option("--step", type=Whole(min=0), help="Of the recorded ones; by default the median one.")
@click.option(
    "--against",
    type=Path,
    metavar="RUN",
    help="Another run, or a timeline of pipegrad simulate --save: drawn beside it.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@draws
def trace(
    drawing: Drawing, run: Path, step: int | None, against: Path | None, *, as_json: bool
) -> None:
    """Print where a recorded step went: what each rank did, and what decided when it ended.

    RUN is the folder of a run, or a timeline in JSON.
    """
    from pipegrad.simulation.explain.explanation import explain

    with usage_errors():
        timeline = _loaded(run)
        Progress(len(timeline.stage_to_rank) * timeline.num_microbatches).at("explains a step")
        explanation = explain(timeline, step=step)
        if against and not drawing.is_wanted:
            raise click.UsageError("--against is drawn: say where, as in --html FILE")
        if drawing.is_wanted:
            drawing.write([*([_loaded(against)] if against else []), timeline])
    if as_json:
        click.echo(json.dumps(explanation.to_json(), indent=2))
        return
    from pipegrad.train.rendering import rendered_explanation
    from pipegrad.train.tables import make_console

    print_parts(make_console(), [_head(timeline), *rendered_explanation(explanation)])


def _loaded(run: Path) -> Timeline:
    from pipegrad.simulation.timeline import Timeline

    is_folder = os.path.isdir(run)  # noqa: PTH112 - Path's own raises, as for a name too long
    path = run / _FILE if is_folder else run
    if is_folder and not path.exists():
        raise ScheduleError(
            f"{run} has no {_FILE}: a run writes it when it has made all its steps, "
            f"unless it has train.trace=false or PIPEGRAD_TRACE, which may name another folder"
        )
    return Timeline.load(path)


def _head(timeline: Timeline) -> str:
    stages = len(timeline.stage_to_rank)
    return (
        f"{timeline.name}: {timeline.num_ranks} ranks, {stages} stages, "
        f"{timeline.num_microbatches} microbatches, {timeline.source}, "
        f"{len(timeline.step_ends)} steps"
    )
