"""Processes of a machine: has a rank's process ended, or is it stopped? Linux says so in /proc."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_BOOT = Path("/proc/sys/kernel/random/boot_id")


class ProcessId(NamedTuple):
    """Names one process among all machines.

    Attributes:
        machine: The boot of a machine, and the namespace in which the number counts.
        pid: The number.
        began: When it began, in ticks of that boot: a number may be used again.
    """

    machine: str
    pid: int
    began: str

    @classmethod
    def own(cls) -> ProcessId:
        """Returns that of this process; without a machine where there is no /proc."""
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """Returns that of a process of this machine, as `own` does."""
        try:
            machine = f"{_BOOT.read_text().strip()}{Path('/proc/self/ns/pid').readlink()}"
            return cls(machine, pid, _stat(pid)[1])
        except OSError:
            return cls("", pid, "")

    @classmethod
    def loaded(cls, text: str) -> ProcessId:
        """Returns what `dumped` has written."""
        machine, pid, began = text.split("|")
        return cls(machine, int(pid), began)

    def dumped(self) -> str:
        """Returns it as one word."""
        return f"{self.machine}|{self.pid}|{self.began}"

    def state(self) -> str:
        """Returns ``"ended"``, ``"stopped"``, ``"running"``, or "" for another machine's."""
        if not self.machine or self.machine != ProcessId.own().machine:
            return ""
        with suppress(OSError):
            letter, began = _stat(self.pid)
            if began == self.began and letter not in "ZX":
                return "stopped" if letter in "Tt" else "running"
        return "ended"


def _stat(pid: int) -> tuple[str, str]:
    """Returns the state and the begin of a process."""
    # The name of the program stands in brackets before, and may have any character.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]
