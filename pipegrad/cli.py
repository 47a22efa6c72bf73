"""The command line: a command is a file in `pipegrad/commands/` and a line here."""

from __future__ import annotations

import signal

import click

from pipegrad.commands.audit import audit
from pipegrad.commands.doctor import doctor
from pipegrad.commands.export import export
from pipegrad.commands.installed import (
    list_codecs,
    list_handlers,
    list_reporters,
    list_schedules,
)
from pipegrad.commands.launch import launch
from pipegrad.commands.options import add_traceback
from pipegrad.commands.plan import plan
from pipegrad.commands.schedule import schedule
from pipegrad.commands.simulate import simulate
from pipegrad.commands.trace import trace
from pipegrad.commands.train import train


class _Commands(click.Group):
    """Commands that Ctrl-C ends with the exit code of SIGINT; click has 1, that of an error."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("stopped by SIGINT", err=True)
            ctx.exit(128 + signal.SIGINT)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="pipegrad")
def main() -> None:
    """Gradients that travel between pipeline stages: train, plan, and see what is installed."""


for command in (train, launch, plan, schedule, simulate, trace, doctor, export, audit):
    main.add_command(add_traceback(command))
for command in (list_codecs, list_handlers, list_reporters, list_schedules):
    main.add_command(command)
