"""CPU seconds of a test with its ranks: the same on an idle machine and on a busy one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

_TICK = 1 / os.sysconf("SC_CLK_TCK")


def spent() -> float:
    """Returns the CPU seconds of this process and of all below it, from their start."""
    ended = os.times()
    own = time.process_time() + ended.children_user + ended.children_system
    return own + sum(map(_spent_by, _children(os.getpid())))


def of_importing_torch() -> float:
    """Returns the CPU seconds of a fixed piece of work, by which machines are compared."""
    seconds = []
    for _ in range(2):
        before = os.times()
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
        after = os.times()
        user, system = (
            after.children_user - before.children_user,
            after.children_system - before.children_system,
        )
        seconds.append(user + system)
    return min(seconds)


def _spent_by(process: int) -> float:
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    # utime, stime, and those of children that have ended
    return sum(map(int, fields[11:15])) * _TICK + sum(map(_spent_by, _children(process)))


def _children(process: int) -> list[int]:
    found = list[int]()
    try:
        for thread in Path(f"/proc/{process}/task").iterdir():
            found += map(int, (thread / "children").read_text().split())
    except (FileNotFoundError, ProcessLookupError):
        pass
    return found
