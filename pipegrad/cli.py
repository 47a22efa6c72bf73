"""The command line: a command is a file in `pipegrad/commands/` and a line here."""

from __future__ import annotations

import click

from pipegrad.commands.doctor import doctor
from pipegrad.commands.installed import list_handlers, list_reporters, list_schedules
from pipegrad.commands.plan import plan
from pipegrad.commands.schedule import schedule
from pipegrad.commands.simulate import simulate
from pipegrad.commands.trace import trace
from pipegrad.commands.train import train


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="pipegrad")
def main() -> None:
    """Gradients that travel between pipeline stages: train, plan, and see what is installed."""


main.add_command(train)
main.add_command(plan)
main.add_command(schedule)
main.add_command(simulate)
main.add_command(trace)
main.add_command(doctor)
main.add_command(list_handlers)
main.add_command(list_reporters)
main.add_command(list_schedules)
