"""Processes of a machine: has a rank's process ended, or is it stopped? Linux says so in /proc.

The ranks of a machine learn of each other in the key-value store.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from pipegrad.comm.store import SignedStore

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_MOST_READS = 100  # of the processes of a machine, if nobody knows how many there are
_QUICK_READS = 10  # the first ones: a rank may end at once
_QUICK_SECONDS = 0.1
_SIGNS: Mapping[str, str] = {
    "": "does not answer: its process or machine has ended or is stopped, or its network is cut",
    "ended": "has ended without a word (process {pid})",
    "stopped": "is stopped (process {pid}), by a signal such as SIGSTOP, or by a debugger",
    "running": "does not answer, though its process {pid} runs: code that holds the interpreter "
    "lock, or a machine without memory or processor time",
}


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


class Processes:
    """The processes of the other ranks of this machine.

    Args:
        store: All ranks use it.
        prefix: Of the keys in the store. The same on all ranks.
        rank: Of this process, which it makes known.
    """

    def __init__(self, store: SignedStore, prefix: str, rank: int) -> None:
        self._store, self._prefix, self._rank = store, prefix, rank
        own = ProcessId.own()
        self._machine = f"{prefix}/machine/{own.machine}"
        store.add_line(self._machine, f"{rank} {own.dumped()}")
        self._others: dict[int, ProcessId] = {}
        self._left = set[int]()
        self._reads = 0

    @property
    def pause_seconds(self) -> float:
        """How soon to `learn` again; 0 if there is no hurry."""
        return 0.0 if self._are_known or self._reads > _QUICK_READS else _QUICK_SECONDS

    @property
    def _are_known(self) -> bool:
        expected = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
        return len(self._others) + 1 == expected or self._reads > _MOST_READS

    def learn(self) -> None:
        """Reads which processes this machine has, until all have come."""
        if self._are_known:
            return
        self._reads += 1
        if self._store.check([self._machine]):
            lines = self._store.lines(self._machine)
            known = {int(line.split()[0]): ProcessId.loaded(line.split()[1]) for line in lines}
            self._others = {r: p for r, p in known.items() if r != self._rank}

    def leave(self) -> None:
        """Says that this process may end from now on."""
        self._store.set(f"{self._prefix}/left/{self._rank}", "")

    def end(self, words: str) -> None:
        """Says that this process, or its use of the process group, has ended, after what."""
        self._store.set(f"{self._prefix}/ended/{self._rank}", words)

    def has_lost(self) -> bool:
        """Returns whether a process has ended without `leave`."""
        for rank, process in self._others.items():
            if rank not in self._left and process.state() == "ended":
                if not self._store.check([f"{self._prefix}/left/{rank}"]):
                    return True
                self._left.add(rank)
        return False

    def lost(self) -> list[int]:
        """Returns the ranks whose processes cannot answer, without those that may end."""
        return [r for r in sorted(self._others) if self.is_gone(r) and r not in self._left]

    def is_first(self) -> bool:
        """Returns whether no rank before this one can answer."""
        return all(self.is_gone(rank) for rank in self._others if rank < self._rank)

    def is_gone(self, rank: int) -> bool:
        """Returns whether a rank's process has ended or is stopped, as far as it is known."""
        return rank in self._others and self._others[rank].state() in ("ended", "stopped")

    def sign(self, rank: int) -> str:
        """Returns in words what is known of a process that has not answered."""
        ended = f"{self._prefix}/ended/{rank}"
        with suppress(dist.DistError, RuntimeError):  # the store may be gone
            if self._store.check([ended]):
                return f"has ended after {self._store.text(ended)}"
        process = self._others.get(rank)
        if process is None:
            return _SIGNS[""]
        return _SIGNS[process.state()].format(pid=process.pid)


def _stat(pid: int) -> tuple[str, str]:
    """Returns the state and the begin of a process."""
    # The name of the program stands in brackets before, and may have any character.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]
