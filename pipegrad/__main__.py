"""``python -m pipegrad``: the command line, as torchrun starts it."""

from pipegrad.cli import main

main(prog_name="pipegrad")
