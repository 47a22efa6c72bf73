"""The key-value store of a process group, as pipegrad uses it: values are signed.

[Note: signed values] Values are signed, because any process that reaches the store of a launch can
write into it. A launcher on one machine draws a key and passes it to its ranks in the environment,
which other users cannot read. Then a mark, and an HMAC of the value and its key in the store, stand
before each value. Reading a value without them raises MessageError. Without the variable, values
are not signed.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public
from torch.distributed.distributed_c10d import Store

from pipegrad.comm.plain import MOST_BYTES
from pipegrad.comm.waits import ended, look
from pipegrad.errors import MessageError

T = TypeVar("T")
STORE_KEY = "PIPEGRAD_STORE_KEY"  # the variable with the key of a launch
LOOPBACK = "127.0.0.1"
_LEAST_PAUSE_SECONDS, _MOST_PAUSE_SECONDS = 2e-4, 0.05  # between two looks of a wait
_MOST_WAIT = timedelta(minutes=10)
_MARK = b"pipegrad signed "
_HEAD = len(_MARK) + 32
_PIECES = b"pipegrad pieces "
_PIECE_BYTES = 2**22  # torch's store drops a client that sends 8 MiB at once


class SignedStore:
    """A key-value store whose values are signed; see [Note: signed values].

    Attributes:
        raw: The store of torch, whose values carry the signatures.
    """

    def __init__(self, store: Store, within_seconds: float = 30.0) -> None:
        self.raw = store
        self._within_seconds = within_seconds
        self._secret = os.environ.get(STORE_KEY, "").encode("utf-8", "surrogateescape")

    def clone(self, within_seconds: float) -> SignedStore:
        """Returns the same store over a separate connection, with another time for answers."""
        # Send a message first, because it fails at once if the store has ended. A new connection
        # would wait minutes for it.
        self.check(["pipegrad"])
        return SignedStore(self._asked(self.raw.clone), within_seconds)  # type: ignore[attr-defined]

    def set(self, key: str, value: bytes | str) -> None:
        """Sets a value."""
        signed = self._signed(key, self._short(key, value))
        self._asked(lambda: self.raw.set(key, signed))  # type: ignore[arg-type]

    def set_first(self, key: str, value: bytes | str) -> bytes:
        """Sets a value if there is none; returns the value that is there then.

        Raises:
            MessageError: If another program has written it.
        """
        signed = self._signed(key, self._short(key, value))
        found = self._asked(lambda: self.raw.compare_set(key, "", signed))  # type: ignore[arg-type]
        return self._whole(key, self._opened(key, found))

    def get(self, key: str) -> bytes:
        """Returns a value, when it is there.

        Raises:
            MessageError: If another program has written it.
        """
        return self._whole(key, self._opened(key, self._asked(lambda: self.raw.get(key))))

    def text(self, key: str) -> str:
        """Returns a value that is text, as `get` does."""
        return self.get(key).decode(errors="replace")

    def count(self, key: str) -> int:
        """Adds 1 to a number; returns it. It is not signed, because it only names keys."""
        return self._asked(lambda: self.raw.add(key, 1))

    def check(self, keys: Sequence[str]) -> bool:
        """Returns True if all of these have a value."""
        return self._asked(lambda: self.raw.check(list(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta = _MOST_WAIT) -> None:
        """Waits until all of these have a value.

        Raises:
            dist.DistStoreError: If they do not in time.
        """
        # A wait of torch that ends by its timeout writes lines to stderr.
        deadline, pause = time.monotonic() + timeout.total_seconds(), _LEAST_PAUSE_SECONDS
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise dist.DistStoreError(f"not all of {list(keys)} were set in {timeout}")
            look()
            time.sleep(pause)
            pause = min(1.1 * pause, _MOST_PAUSE_SECONDS)

    def delete_key(self, key: str) -> bool:
        """Deletes a value; returns whether there was one."""
        return self._asked(lambda: self.raw.delete_key(key))

    def _asked(self, call: Callable[[], T]) -> T:
        return ended(call, self._within_seconds)

    def _short(self, key: str, value: bytes | str) -> bytes:
        """Returns a small value as it is; sets a large one in pieces, and returns their names."""
        content = value.encode() if isinstance(value, str) else value
        if len(content) <= _PIECE_BYTES:
            return content
        name = sha256(content).hexdigest()
        for begin in range(0, len(content), _PIECE_BYTES):
            self.set(f"{key}/{name}/{begin}", content[begin : begin + _PIECE_BYTES])
        return b"%b%b %d" % (_PIECES, name.encode(), len(content))

    def _whole(self, key: str, content: bytes) -> bytes:
        """Returns the value for a result of `_short`."""
        if not content.startswith(_PIECES):
            return content
        name, _, size = content.removeprefix(_PIECES).decode(errors="replace").partition(" ")
        if not size.isdigit() or int(size) > MOST_BYTES:
            raise MessageError(_refusal(key))
        return b"".join(self.get(f"{key}/{name}/{at}") for at in range(0, int(size), _PIECE_BYTES))

    def _signed(self, key: str, content: bytes) -> bytes:
        if not self._secret:
            return content
        return b"".join((_MARK, self._signature(key, content), content))

    def _opened(self, key: str, content: bytes) -> bytes:
        if not self._secret:
            if content.startswith(_MARK):
                raise MessageError(_refusal(key))
            return content
        value = content[_HEAD:]
        expected = _MARK + self._signature(key, value)
        if not hmac.compare_digest(content[:_HEAD], expected):
            raise MessageError(_refusal(key))
        return value

    def _signature(self, key: str, content: bytes) -> bytes:
        return hmac.digest(self._secret, b"%b\0%b" % (key.encode(), content), "sha256")


def store() -> SignedStore:
    """Returns the key-value store of the default process group."""
    world = dist.group.WORLD
    assert world is not None
    return SignedStore(world.get_group_store())


def of_one_machine() -> dict[str, str]:
    """Returns variables for ranks of one machine: a new key, and gloo listens on loopback."""
    # "lo" is the name on Linux. Elsewhere gloo looks up the name of the host, as it always does.
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if Path("/sys/class/net/lo").exists() else {}
    return {STORE_KEY: secrets.token_hex(32), **loopback}


def loopback_store() -> TCPStore:
    """Returns a store that this process keeps, on loopback alone."""
    # Not torch's default socket, because it would listen on all interfaces. Use IPv4, because its
    # loopback has a name in /etc/hosts: a client of a store looks up the names of both ends for
    # torch's logs, and that takes 5 s if the DNS loses a packet. The default socket would see
    # ``::ffff:127.0.0.1``.
    listener = socket.create_server((LOOPBACK, 0))
    return TCPStore(
        LOOPBACK,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _refusal(key: str) -> str:
    return (
        f"another program has written {key!r} into the key-value store of this job, or its ranks "
        f"have different values of {STORE_KEY}: see docs/trust.md"
    )
