"""`pipegrad schedule`: prints what each rank computes, in order."""

from __future__ import annotations

from collections.abc import Sequence

import click

from pipegrad.commands.options import Progress, sized, usage_errors


@click.command()
@click.argument("name")
@sized
@click.option(
    "--format",
    "file_format",
    type=click.Choice(["text", "torch-csv"]),
    default="text",
    show_default=True,
    help="torch-csv is what torch's _PipelineScheduleRuntime loads.",
)
def schedule(
    name: str, ranks: int, microbatches: int, settings: Sequence[str], file_format: str
) -> None:
    """Print what each rank computes, in order, by the schedule NAME.

    NAME is a name that `pipegrad schedules` lists, or module:attr.
    """
    from pipegrad.schedules import generate, registry
    from pipegrad.schedules.torch_csv import for_torch
    from pipegrad.train.config import parsed_setting

    with usage_errors():
        options = {".".join(key): value for key, value in map(parsed_setting, settings)}
        generator = registry.resolve({**options, "name": name})
        Progress(ranks * microbatches).at("makes the schedule")
        made = generate(generator, num_ranks=ranks, num_microbatches=microbatches)
        text = for_torch(made) if file_format == "torch-csv" else f"{made}\n"
    click.echo(text, nl=False)
