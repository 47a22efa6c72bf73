"""A network of hosts on one machine: a namespace each, around a switch. Needs root and iproute2.

All links begin and end inside of these namespaces. So nothing leaves them.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET


class Network:
    """Hosts ``0 .. num_hosts - 1`` with one link each, to a switch."""

    device = "eth0"  # each host's link

    def __init__(self, name: str, num_hosts: int) -> None:
        self._name, self._num_hosts = name, num_hosts
        self.rendezvous = {"MASTER_ADDR": "10.88.0.1", "MASTER_PORT": "29400"}
        self._switch = f"{name}-sw"

    @classmethod
    @contextmanager
    def made(cls, num_hosts: int) -> Iterator[Network]:
        """Makes a network, and removes it."""
        network = cls(f"pgf{os.getpid()}", num_hosts)
        try:
            network._make()
            yield network
        finally:
            network._remove()

    def space_of(self, host: int) -> str:
        """Returns the namespace of a host."""
        return f"{self._name}-n{host}"

    def cut(self, host: int) -> None:
        """Takes the link of a host down, without a word to either end of a connection."""
        _ip("-n", self._switch, "link", "set", f"p{host}", "down")

    def _make(self) -> None:
        self._make_space(self._switch)
        _ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "br0", "up")
        for host in range(self._num_hosts):
            space, port = self.space_of(host), f"p{host}"
            self._make_space(space)
            ends = ("peer", "name", port, "netns", self._switch)
            _ip("-n", space, "link", "add", self.device, "type", "veth", *ends)
            _ip("-n", space, "addr", "add", f"10.88.0.{host + 1}/24", "dev", self.device)
            _ip("-n", space, "link", "set", self.device, "up")
            _ip("-n", self._switch, "link", "set", port, "master", "br0")
            _ip("-n", self._switch, "link", "set", port, "up")

    def _make_space(self, name: str) -> None:
        _ip("netns", "add", name)
        _ip("-n", name, "link", "set", "lo", "up")

    def _remove(self) -> None:
        for name in (self._switch, *map(self.space_of, range(self._num_hosts))):
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "del", name)


def can_cut() -> bool:
    """Returns whether this machine can make a network."""
    return os.geteuid() == 0 and shutil.which("ip") is not None


def enter(space: str) -> None:
    """Moves this process into a namespace."""
    with Path("/var/run/netns", space).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"cannot enter {space}")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
