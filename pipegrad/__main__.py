"""``python -m pipegrad``: the command line, as torchrun and `pipegrad launch` start it."""

from pipegrad.cli import main
from pipegrad.commands.rank import end_with_launcher

end_with_launcher()
main(prog_name="pipegrad")
