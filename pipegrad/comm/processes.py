"""Processes of this machine: has one ended, or is it stopped? Linux says so in /proc."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from pipegrad.comm.store import SignedStore

_SIGNS = {
    "": "does not answer: its process or machine has ended or is stopped, or its network is cut",
    "ended": "has ended without a word (process {pid})",
    "stopped": "is stopped (process {pid}), by a signal such as SIGSTOP, or by a debugger",
    "running": "does not answer, though its process {pid} runs: code that holds the interpreter "
    "lock, or a machine without memory or processor time",
}


class Neighbours:
    """The processes of the other ranks of this machine, which learn of each other in the store.

    Args:
        store: All ranks use it.
        prefix: Of keys in it, the same on all ranks.
        rank: Of this process.

    Attributes:
        known: Number of a process, and when it began, by rank.
    """

    def __init__(self, store: SignedStore, prefix: str, rank: int) -> None:
        self.known: dict[int, tuple[int, str]] = {}
        self._store, self._prefix = store, prefix
        self._machine, own = _machine(), os.getpid()
        store.set(f"{prefix}/{rank}", f"{own} {process_state(own)[1]} {self._machine}")
        local, num_local = (os.environ.get(f"LOCAL_{name}") for name in ("RANK", "WORLD_SIZE"))
        first = rank - int(local or 0)
        self._unread = {*range(first, first + int(num_local or 1))} - {rank}

    def learn(self) -> bool:
        """Reads which processes have come; returns whether all have."""
        for rank in [r for r in self._unread if self._store.check([f"{self._prefix}/{r}"])]:
            pid, began, machine = self._store.text(f"{self._prefix}/{rank}").split(" ", 2)
            if machine == self._machine != "":
                self.known[rank] = int(pid), began
            self._unread.remove(rank)
        return not self._unread

    def state(self, rank: int) -> str:
        """Returns ``"ended"``, ``"stopped"``, ``"running"``, or "" if it is not known."""
        if rank not in self.known:
            return ""
        letter, began = process_state(self.known[rank][0])
        if began != self.known[rank][1] or letter in "ZX":
            return "ended"
        return "stopped" if letter in "Tt" else "running"

    def gone(self) -> set[int]:
        """Returns the ranks whose processes cannot answer."""
        return {rank for rank in self.known if self.state(rank) in ("ended", "stopped")}

    def sign(self, rank: int) -> str:
        """Returns in words what is known of a process that has not answered."""
        return _SIGNS[self.state(rank)].format(pid=self.known.get(rank, (0,))[0])


def _machine() -> str:
    """Returns the name of this machine, and where numbers of processes count: in its container."""
    try:
        return f"{socket.gethostname()} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # nobody says when a process began
        return ""


def process_state(pid: int) -> tuple[str, str]:
    """Returns the state of a process, a letter, and when it began, in ticks; "" if unknown."""
    try:
        # The name of the program stands in brackets before, and may have any character.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]
