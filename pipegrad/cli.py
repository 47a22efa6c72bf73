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

from pipegrad.errors import DriftError, PipegradError, ReduceError, in_words
from pipegrad.plugins.registry import HANDLERS, Plugin, Registry

# torch takes seconds to import: a command imports what it needs when it runs.
if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from pipegrad.train.config import Config
    from pipegrad.train.report import Report
    from pipegrad.train.trainer import Trainer

_INTERRUPTED = 130  # what a shell says of SIGINT
_PLAIN_WIDTH = 160  # where there is no terminal to fit into
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
    """Gives a command a configuration to load: the file, and the options that change it."""

    @functools.wraps(command)
    def configured(
        config: Path,
        handlers: Sequence[str],
        schedule: str | None,
        settings: Sequence[str],
        **others: object,
    ) -> None:
        from pipegrad.train.config import load

        command(partial(load, config, settings, handlers=handlers, schedule=schedule), **others)

    return functools.reduce(lambda made, add: add(made), reversed(_CHANGES), configured)


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
    from pipegrad.train.process import world
    from pipegrad.train.report import Report
    from pipegrad.train.summary import rendered
    from pipegrad.train.trainer import Trainer

    with _refusing(), world():
        console = _console(quiet=dist.get_rank() != 0)
        try:
            trainer = Trainer(loaded)
            _print(console, trainer.notes)
            if dry_run:
                _print(console, rendered(trainer.outline) if trainer.outline else [])
            else:
                _run(trainer, Report(console, trainer.job.config))
        except KeyboardInterrupt:
            console.print("stopped; the run's folder holds what was done")
            sys.exit(_INTERRUPTED)
        except PipegradError as error:
            if isinstance(error, ReduceError) and not isinstance(error, DriftError):
                click.echo(f"Error on rank {dist.get_rank()}: {error}", err=True)  # its own words
            else:
                once_a_machine(partial(click.echo, f"Error: {error}", err=True))
            sys.exit(1)
        except SystemExit as error:  # of somebody's code: our own are outside of what is tried
            click.echo(f"Error on rank {dist.get_rank()}: {_ended(error)}", err=True)
            sys.exit(1)
        trainer.close()


@contextmanager
def _refusing() -> Iterator[None]:
    """Says in one line what is refused; where there is a world of ranks it says so itself."""
    try:
        yield
    except PipegradError as error:
        raise click.ClickException(str(error)) from error


def _ended(error: SystemExit) -> str:
    return f"the run was ended by {in_words(error)}: no model, handler or plug-in may do that"


def _run(trainer: Trainer, report: Report) -> None:
    import torch.distributed as dist

    from pipegrad.train.report import manifest_of

    config, first = trainer.job.config, dist.get_rank() == 0
    folder = trainer.make_folder(
        lambda folder: report.begin(folder, manifest_of(config, trainer.outline))
    )
    with report.running() if first else nullcontext():
        for number in range(trainer.first_step, config.train.steps + 1):
            metrics = trainer.step(number)
            if first:
                report.step(metrics)
            if config.train.saves_after(number):
                trainer.save(folder / f"checkpoint-{number}", number)
    drift = None
    try:
        trainer.sync.check_replicas()
    except DriftError as error:
        drift = error
    if first:
        report.close(folder, trainer.outline["device"], "DIFFER" if drift else "bit-identical")
    if drift:
        raise drift


@main.command()
@_configured
@click.option("--ranks", type=click.IntRange(min=1), help="How many; by default as CONFIG says.")
@_JSON
def plan(loaded: Callable[[], Config], ranks: int | None, as_json: bool) -> None:
    """Print what all ranks of CONFIG will do, without starting any."""
    from pipegrad.train.summary import rendered

    with _refusing():
        told = _planned(loaded(), ranks)
    if as_json:
        click.echo(json.dumps(told, indent=2))
    else:
        _print(_console(), rendered(told))


def _planned(config: Config, ranks: int | None) -> dict[str, Any]:
    from pipegrad.train.job import Job
    from pipegrad.train.summary import outline

    job = Job(config, ranks)

    def planned(device: str) -> dict[str, Any]:
        cut = job.cut(job.model(device))
        return outline(job, cut, job.manifest(cut))

    try:
        return planned("meta")
    except Exception:  # noqa: BLE001 - a factory that reads its own tensors needs real ones
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


def _list(plugins: Iterable[Plugin], as_json: bool) -> None:
    rows = [asdict(plugin) | {"summary": plugin.summary} for plugin in plugins]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    from pipegrad.train.tables import table

    columns = ["name", "distribution", "version", "summary"]
    _print(_console(), [table(columns, ([row[c] for c in columns] for row in rows))])


def _console(*, quiet: bool = False) -> Console:
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False, quiet=quiet)
    if not console.is_terminal:
        console.width = _PLAIN_WIDTH
    return console


def _print(console: Console, parts: Iterable[RenderableType]) -> None:
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str))
