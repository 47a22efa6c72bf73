"""Launch: what identifies a launch by torchrun, over all starts of its ranks.

[Note: one launch, several starts] torchrun may start all ranks again, and these go on with the run
of the ranks before them. Its count of restarts does not say that there were any, since each machine
counts alone. Its ``--rdzv-id`` is chosen by the user, and may come again in another job. So a
launch has a name that is drawn at random and lies in torchrun's store, which lives as long as the
launch. Without such a store, the processes that have started the ranks are its names. They also
live as long as the launch. If one of several machines is replaced, the other names stay.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from pipegrad.comm.agreement import agree
from pipegrad.comm.processes import process_state
from pipegrad.train.process import LAUNCH


def names_of_launch() -> tuple[str, ...]:
    """Returns the names of this launch; none without torchrun. Every rank must call it."""
    return tuple(sorted({name for name in agree("the launch", launch_of) if name}))


def launch_of(environment: Mapping[str, str] = os.environ) -> str:
    """Returns what this rank knows of its launch by torchrun; "" without torchrun."""
    if "TORCHELASTIC_RUN_ID" not in environment:
        return ""
    return environment.get(LAUNCH) or process(os.getppid())


def process(number: int) -> str:
    """Returns a name of a process that no other process has, at any time on any machine."""
    # Process numbers come again, also in another container of this machine.
    return f"{socket.gethostname()} {number} {process_state(number)[1]}"
