"""The command line: a command is a function in `pipegrad/commands/` and a name here."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import click

from pipegrad.commands.audit_command import audit
from pipegrad.commands.command_options import add_traceback
from pipegrad.commands.inspect_commands import LISTS, doctor, export, trace
from pipegrad.commands.plan_commands import plan, schedule, simulate, verify
from pipegrad.commands.run_commands import launch, train


class _Commands(click.Group):
    """Commands that Ctrl-C ends with the exit code of SIGINT; click would exit with 1."""

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
    # A module that a user names, for example of a schedule, may be in the working directory. All
    # commands search it last, because anybody may have written into it.
    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.append(folder)


for command in (train, launch, plan, schedule, simulate, trace, doctor, export, audit, verify):
    main.add_command(add_traceback(command))
for command in LISTS:
    main.add_command(command)
