"""A rank that `pipegrad launch` starts: the command line, in a process that ends with its launcher.

    python -m pipegrad.commands.rank LAUNCHER_PID train CONFIG ...

Each rank is in a session of its own, so that Ctrl-C reaches the launcher alone. A launcher that is
killed by SIGKILL cannot end its ranks. So the kernel does it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def end_with(launcher: int) -> None:
    """Lets the kernel kill this process when its launcher has ended; on Linux only."""
    # SIGKILL: the launcher keeps the store by which ranks would agree on a last checkpoint.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # it ended before
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    end_with(int(sys.argv.pop(1)))
    from pipegrad.cli import main

    main(prog_name="pipegrad")
