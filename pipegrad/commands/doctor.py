"""`pipegrad doctor`: what there is between the ranks of a job, and what is odd."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipegrad.commands.options import Number, explained, print_parts, saving
from pipegrad.errors import PipegradError

if TYPE_CHECKING:
    import torch
    from rich.console import RenderableType

    from pipegrad.observe.doctor import Examination


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
    """Measure the links between ranks, compare their versions, and say what is odd.

    torchrun --nproc-per-node 4 -m pipegrad doctor
    """
    import torch.distributed as dist

    from pipegrad.comm.agreement import once_a_machine
    from pipegrad.observe.doctor import examine
    from pipegrad.train.process import process_group

    try:
        with process_group(timeout_seconds):
            try:
                found = examine(_device(device), timeout_seconds=timeout_seconds)
                if dist.get_rank() == 0:
                    _show(found, as_json=as_json)
                    if save:
                        saving(save, found.costs.save)
            except (PipegradError, RuntimeError) as error:
                message = f"Error: {explained(error)}"
                once_a_machine(lambda: click.echo(message, err=True))
                raise SystemExit(1) from error
    except PipegradError as error:
        raise click.ClickException(explained(error)) from error


def _device(name: str) -> torch.device:
    import os

    import torch

    from pipegrad.train.process import automatic_kind

    kind = automatic_kind() if name == "auto" else name
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")))
    torch.accelerator.set_device_index(device.index)
    return device


def _show(found: Examination, *, as_json: bool) -> None:
    from pipegrad.train.tables import make_console

    if as_json:
        click.echo(json.dumps(found.to_json(), indent=2))
        return
    print_parts(make_console(), _parts(found))


def _parts(found: Examination) -> Iterator[RenderableType]:
    from pipegrad.train.tables import table

    versions = list(dict.fromkeys(name for facts in found.ranks for name in facts.versions))
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
                found.ranks, found.clocks, found.late_seconds, strict=True
            )
        ),
    )
    if found.links:
        yield table(
            ["from", "to", "latency", "alone", "both ways at once", "with all of its host"],
            (
                [
                    link.costs.source,
                    link.costs.target,
                    f"{link.costs.latency_seconds * 1e6:,.0f} us",
                    f"{link.costs.bytes_per_second / 1e6:,.0f} MB/s",
                    f"{link.both_ways:.0%}",
                    f"{link.busy:.0%}",
                ]
                for link in found.links
            ),
        )
    if found.odd:
        yield "odd:"
        yield from (f"  {line}" for line in found.odd)
    else:
        yield "nothing is odd"
