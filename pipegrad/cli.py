"""The command line: parses and prints, decides nothing."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipegrad.commands.simulate import simulate
from pipegrad.errors import DriftError, PipegradError, ReduceError, in_words
from pipegrad.plugins.registry import HANDLERS, REPORTERS, Plugin, Registry

# torch takes seconds to import: a command imports what it needs when it runs.
if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from pipegrad.train.config import Config
    from pipegrad.train.reporters.report import Report
    from pipegrad.train.trainer import Trainer

_INTERRUPTED = 130  # the exit code of a shell for SIGINT
_CHANGES = (
    click.argument("config", type=Path),
    click.option(
        "--handler",
        "handlers",
        multiple=True,
        metavar="NAME",
        help="A gradient handler, by name or as module:attr. All of them replace the file's list.",
    ),
    click.option(
        "--schedule", metavar="NAME", help="A schedule, by name or as module:attr; for the file's."
    ),
    click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="KEY=VALUE",
        help="Changes a key, as in --set train.steps=10. TOML; repeat for several.",
    ),
)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def _configured(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command a function that loads its configuration, from the file and the options."""

    @functools.wraps(command)
    def configured(
        config: Path,
        handlers: Sequence[str],
        schedule: str | None,
        settings: Sequence[str],
        **other_options: object,
    ) -> None:
        from pipegrad.train.config import load

        command(
            partial(load, config, settings, handlers=handlers, schedule=schedule), **other_options
        )

    return functools.reduce(lambda decorated, add: add(decorated), reversed(_CHANGES), configured)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="pipegrad")
def main() -> None:
    """Gradients that travel between pipeline stages: train, plan, and see what is installed."""


@main.command()
@_configured
@click.option("--dry-run", is_flag=True, help="Set everything up, print the plan, and exit.")
def train(loaded: Callable[[], Config], dry_run: bool) -> None:
    """Train what CONFIG describes: alone, or on the ranks of torchrun.

    torchrun --nproc-per-node 4 -m pipegrad train CONFIG
    """
    import torch.distributed as dist

    from pipegrad.comm.agreement import once_a_machine
    from pipegrad.train.process import process_group
    from pipegrad.train.reporters.report import Report
    from pipegrad.train.summary import rendered
    from pipegrad.train.tables import make_console
    from pipegrad.train.trainer import Trainer

    with _usage_errors(), process_group():
        console = make_console(quiet=dist.get_rank() != 0)
        try:
            trainer = Trainer(loaded)
            _print(console, trainer.notes)
            if dry_run:
                _print(console, rendered(trainer.summary) if trainer.summary else [])
            else:
                _run(trainer, Report(console, trainer.job))
        except KeyboardInterrupt:
            console.print("stopped; the run's folder holds what was done")
            sys.exit(_INTERRUPTED)
        except PipegradError as error:
            # A failed reduction has another message on each rank, so each rank prints its own.
            # Other errors are alike on all ranks, so one rank of each machine prints them.
            if isinstance(error, ReduceError) and not isinstance(error, DriftError):
                click.echo(f"Error on rank {dist.get_rank()}: {error}", err=True)
            else:
                once_a_machine(partial(click.echo, f"Error: {error}", err=True))
            sys.exit(1)
        except SystemExit as error:  # raised by a model or plug-in; pipegrad's own are not in `try`
            click.echo(f"Error on rank {dist.get_rank()}: {_exit_message(error)}", err=True)
            sys.exit(1)
        trainer.close()


@contextmanager
def _usage_errors() -> Iterator[None]:
    """Turns errors before and outside of a run into one line; a run prints its own errors."""
    try:
        yield
    except PipegradError as error:
        raise click.ClickException(str(error)) from error


def _exit_message(error: SystemExit) -> str:
    return f"the run was ended by {in_words(error)}: no model, handler or plug-in may do that"


def _run(trainer: Trainer, report: Report) -> None:
    import torch.distributed as dist

    from pipegrad.train.reporters.report import manifest_of

    config, is_first_rank = trainer.job.config, dist.get_rank() == 0
    folder = trainer.make_folder(
        lambda folder: report.begin(folder, manifest_of(config, trainer.summary))
    )
    with report.running() if is_first_rank else nullcontext():
        for step in range(trainer.first_step, config.train.steps + 1):
            metrics = trainer.step(step)
            if is_first_rank:
                report.step(metrics)
            if config.train.saves_after(step):
                trainer.save(folder / f"checkpoint-{step}", step)
    # The report is written first, even if copies differ. All ranks raise the same DriftError.
    drift = None
    try:
        trainer.sync.check_replicas()
    except DriftError as error:
        drift = error
    if is_first_rank:
        report.close(folder, trainer.summary["device"], "DIFFER" if drift else "bit-identical")
    if drift:
        raise drift
    if config.model.is_transformers:
        trainer.save_model(folder / "model")


@main.command()
@_configured
@click.option("--ranks", type=click.IntRange(min=1), help="How many; by default as CONFIG says.")
@_JSON
def plan(loaded: Callable[[], Config], ranks: int | None, as_json: bool) -> None:
    """Print what all ranks of CONFIG will do, without starting any."""
    from pipegrad.train.summary import rendered
    from pipegrad.train.tables import make_console

    with _usage_errors():
        summary = _planned(loaded(), ranks)
    if as_json:
        click.echo(json.dumps(summary, indent=2))
    else:
        _print(make_console(), rendered(summary))


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


@main.command("handlers")
@_JSON
def list_handlers(as_json: bool) -> None:
    """List the installed gradient handlers; none is imported."""
    _list(Registry(HANDLERS, object), as_json)


@main.command("schedules")
@_JSON
def list_schedules(as_json: bool) -> None:
    """List the installed schedules; none is imported."""
    from pipegrad.schedules import registry

    _list(registry, as_json)


@main.command()
@click.argument("name")
@click.option("--ranks", type=click.IntRange(min=1), required=True, help="Ranks of the pipeline.")
@click.option("--microbatches", type=click.IntRange(min=1), required=True, help="Of a step.")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="An option of the schedule, as in --set stages_per_rank=3. TOML; repeat for several.",
)
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

    try:
        options = {".".join(key): value for key, value in map(parsed_setting, settings)}
        generator = registry.resolve({**options, "name": name})
        made = generate(generator, num_ranks=ranks, num_microbatches=microbatches)
        text = for_torch(made) if file_format == "torch-csv" else f"{made}\n"
    except PipegradError as error:
        raise click.UsageError(str(error)) from error
    click.echo(text, nl=False)


@main.command("reporters")
@_JSON
def list_reporters(as_json: bool) -> None:
    """List the installed reporters of metrics; none is imported."""
    _list(Registry(REPORTERS, object), as_json)


def _list(plugins: Iterable[Plugin], as_json: bool) -> None:
    entries = [asdict(plugin) | {"summary": plugin.summary} for plugin in plugins]
    if as_json:
        click.echo(json.dumps(entries, indent=2))
        return
    from pipegrad.train.tables import make_console, table

    columns = ["name", "distribution", "version", "summary"]
    _print(make_console(), [table(columns, ([entry[c] for c in columns] for entry in entries))])


def _print(console: Console, parts: Iterable[RenderableType]) -> None:
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str))


main.add_command(simulate)
