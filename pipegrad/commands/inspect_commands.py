"""`pipegrad trace`, `doctor`, `export` and the lists of plug-ins: show runs, ranks and plug-ins."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipegrad.commands.command_options import (
    AS_JSON,
    Number,
    draw,
    draws,
    explained,
    saving,
    tell_if_long,
    usage_errors,
)
from pipegrad.errors import PipegradError, ScheduleError
from pipegrad.plugins.registry import CODECS, HANDLERS, REPORTERS, Registry
from pipegrad.printable import printable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from pipegrad.observe.doctor import Examination
    from pipegrad.simulation.timeline import Timeline

_FILE = "timeline.json"


@click.command()
@click.argument("run", type=Path, metavar="RUN")
@click.option(
    "--step", type=click.IntRange(min=0), help="Of the recorded ones; by default the median one."
)
@click.option(
    "--against",
    type=Path,
    metavar="RUN",
    help="Another run, or a timeline of pipegrad simulate --save: drawn beside it.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@draws
def trace(
    pictures: Mapping[str, Path],
    run: Path,
    step: int | None,
    against: Path | None,
    *,
    as_json: bool,
) -> None:
    """Print the parts of a recorded step: the work of each rank, and the reasons for its end time.

    RUN is the folder of a run, or a timeline in JSON.
    """
    from pipegrad.simulation.explain.explanation import explain

    with usage_errors():
        timeline = _loaded(run)
        tell_if_long(len(timeline.stage_to_rank) * timeline.num_microbatches, "explains a step")
        explanation = explain(timeline, step=step)
        if against and not pictures:
            raise click.UsageError("--against is drawn: say where, as in --html FILE")
        draw(pictures, [*([_loaded(against)] if against else []), timeline])
    if as_json:
        click.echo(json.dumps(explanation.to_json(), indent=2))
        return
    from pipegrad.tables import make_console, print_parts
    from pipegrad.train.rendering import rendered_explanation

    head = (
        f"{timeline.name}: {timeline.num_ranks} ranks, {len(timeline.stage_to_rank)} stages, "
        f"{timeline.num_microbatches} microbatches, {timeline.source}, "
        f"{len(timeline.step_ends)} steps"
    )
    print_parts(make_console(), [head, *rendered_explanation(explanation)])


def _loaded(run: Path) -> Timeline:
    from pipegrad.simulation.timeline import Timeline

    is_folder = os.path.isdir(run)  # noqa: PTH112 - Path's own raises, as for a name too long
    path = run / _FILE if is_folder else run
    if is_folder and not path.exists():
        raise ScheduleError(
            f"{run} has no {_FILE}: a run writes it when it has made all its steps, "
            f"unless it has train.trace=false"
        )
    return Timeline.load(path)


@click.command()
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True
)
@click.option(
    "--timeout",
    "timeout_seconds",
    type=Number(min=1.0, max=3600.0),
    default=30.0,
    show_default=True,
    help="Seconds to wait for the slowest rank, each time the ranks meet.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--save", type=Path, metavar="FILE", help="Save the network as costs, for `pipegrad simulate`."
)
def doctor(*, device: str, timeout_seconds: float, as_json: bool, save: Path | None) -> None:
    """Measure the links between ranks, compare their versions, and report what is odd.

    torchrun --nproc-per-node 4 -m pipegrad doctor
    """
    import torch.distributed as dist

    from pipegrad.comm.agreement import once_a_machine
    from pipegrad.observe.doctor import examine
    from pipegrad.tables import make_console, print_parts
    from pipegrad.train.process import device_of_rank, process_group

    with usage_errors(), process_group(timeout_seconds):
        try:
            result = examine(device_of_rank(device), timeout_seconds=timeout_seconds)
            if dist.get_rank() == 0:
                if as_json:
                    click.echo(json.dumps(result.to_json(), indent=2))
                else:
                    print_parts(make_console(), _parts(result))
                if save:
                    saving("--save", save, result.costs.save)
        except (PipegradError, RuntimeError) as error:
            message = f"Error: {explained(error)}"
            once_a_machine(lambda: click.echo(message, err=True))
            raise SystemExit(1) from error


def _parts(result: Examination) -> Iterator[RenderableType]:
    from pipegrad.tables import table

    versions = list(dict.fromkeys(name for facts in result.ranks for name in facts.versions))
    yield table(
        ["rank", "host", "device", "backend", *versions, "cores", "threads", "clock", "late"],
        (
            [
                facts.rank,
                facts.host,
                facts.device,
                facts.backend,
                *(facts.versions.get(name, "") for name in versions),
                facts.cores,
                facts.compute_threads,
                f"{clock.offset * 1e3:+.3f} ms",
                f"{late:.1f} s",
            ]
            for facts, clock, late in zip(
                result.ranks, result.clocks, result.late_seconds, strict=True
            )
        ),
    )
    if result.links:
        yield table(
            ["from", "to", "latency", "rate"],
            (
                [
                    link.source,
                    link.target,
                    f"{link.latency_seconds * 1e6:,.0f} us",
                    f"{link.bytes_per_second / 1e6:,.0f} MB/s",
                ]
                for link in result.links
            ),
        )
    if result.odd:
        yield "odd:"
        yield from (f"  {line}" for line in result.odd)
    else:
        yield "nothing is odd"


@click.command()
@click.argument("checkpoint", type=Path)
@click.option(
    "--output",
    type=Path,
    metavar="FILE",
    help="Ends in .safetensors; by default the checkpoint's path with this suffix.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="Of floating-point tensors; by default each its own.",
)
def export(checkpoint: Path, output: Path | None, dtype: str | None) -> None:
    """Write the state dict of the uncut model of CHECKPOINT into one safetensors file.

    It needs no GPU.

    CHECKPOINT is the folder of a checkpoint, or of a run: then its newest checkpoint is taken.
    """
    import torch

    from pipegrad.checkpoint.exporting import export as write
    from pipegrad.checkpoint.folders import find_checkpoint

    with usage_errors():
        folder = find_checkpoint(checkpoint)
        path = output or folder.resolve().with_name(f"{folder.resolve().name}.safetensors")
        of_floats = None if dtype is None else getattr(torch, dtype)
        state = write(folder, path, dtype=of_floats)
    numel = sum({id(tensor): tensor.numel() for tensor in state.values()}.values())
    wrote = f"wrote {path}: {len(state)} names, {numel:,} elements, from {folder}"
    click.echo(printable(wrote))


# Lists of plug-ins.


def _lister(name: str, group: str, what: str) -> click.Command:
    @click.command(name, help=f"List the installed {what}; none is imported.")
    @AS_JSON
    def show(as_json: bool) -> None:
        entries = [asdict(plugin) for plugin in Registry(group, object)]
        if as_json:
            click.echo(json.dumps(entries, indent=2))
            return
        from pipegrad.tables import make_console, print_parts, table

        columns = ["name", "distribution", "version", "value"]
        cells = ([entry[column] for column in columns] for entry in entries)
        print_parts(make_console(), [table(columns, cells)])

    return show


LISTS = (
    _lister("codecs", CODECS, "edge codecs"),
    _lister("handlers", HANDLERS, "gradient handlers"),
    _lister("reporters", REPORTERS, "reporters of metrics"),
    _lister("schedules", "pipegrad.schedules", "schedules"),
)
