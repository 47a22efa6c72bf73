"""A rank that `pipegrad launch` starts: its process ends with its launcher.

Python is told not to import from the working directory (-P), which anybody may have written. What a
configuration names may be there, and is looked for there last.

Each rank is in a session of its own, so that Ctrl-C reaches the launcher alone. A launcher that is
killed by SIGKILL cannot end its ranks. So the kernel does it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

LAUNCHER = "PIPEGRAD_LAUNCHER"  # the variable with the launcher's process
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def begin_rank() -> None:
    """Does what a rank of a launcher begins with; nothing in a process that none has started.

    The kernel kills it when its launcher has ended, on Linux only. Modules of the working directory
    can be imported, if nothing that is installed has their name.
    """
    # What this process starts is not the launcher's.
    launcher = os.environ.pop(LAUNCHER, None)
    if launcher is None:
        return
    sys.path.append(os.getcwd())  # noqa: PTH109 - a text is what it takes
    # SIGKILL: the launcher keeps the store by which ranks would agree on a last checkpoint.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if str(os.getppid()) != launcher:  # it ended before
            os.kill(os.getpid(), signal.SIGKILL)
