"""``python -m pipegrad``: the command line, as torchrun and `pipegrad launch` start it."""

from pipegrad.cli import main
from pipegrad.commands.run_commands import begin_rank

begin_rank()
main(prog_name="pipegrad")
