"""A rank that `pipegrad launch` starts: its process ends with its launcher.

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


def end_with_launcher() -> None:
    """Lets the kernel kill this process when its launcher has ended; on Linux only.

    Does nothing in a process that no launcher has started.
    """
    # What this process starts is not the launcher's.
    launcher = os.environ.pop(LAUNCHER, None)
    # SIGKILL: the launcher keeps the store by which ranks would agree on a last checkpoint.
    if launcher is not None and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if str(os.getppid()) != launcher:  # it ended before
            os.kill(os.getpid(), signal.SIGKILL)
