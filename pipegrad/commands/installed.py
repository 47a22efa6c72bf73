"""`pipegrad handlers`, `schedules`, `codecs`, `reporters`: list what is installed; import none."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict

import click

from pipegrad.commands.options import AS_JSON, print_parts
from pipegrad.plugins.registry import CODECS, HANDLERS, REPORTERS, Plugin, Registry


@click.command("handlers")
@AS_JSON
def list_handlers(as_json: bool) -> None:
    """List the installed gradient handlers; none is imported."""
    _list(Registry(HANDLERS, object), as_json)


@click.command("schedules")
@AS_JSON
def list_schedules(as_json: bool) -> None:
    """List the installed schedules; none is imported."""
    from pipegrad.schedules import registry

    _list(registry, as_json)


@click.command("codecs")
@AS_JSON
def list_codecs(as_json: bool) -> None:
    """List the installed edge codecs; none is imported."""
    _list(Registry(CODECS, object), as_json)


@click.command("reporters")
@AS_JSON
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
    print_parts(
        make_console(), [table(columns, ([entry[c] for c in columns] for entry in entries))]
    )
