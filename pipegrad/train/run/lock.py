"""Lock: one job at a time works in the folder of a run."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from datetime import UTC, datetime
from pathlib import Path

from pipegrad import run_files
from pipegrad.errors import PipegradError

LOCK = "lock"
_HELD = (errno.EACCES, errno.EAGAIN)


class HeldError(PipegradError, OSError):
    """Another process works in the folder of a run."""


class RunLock:
    """The lock of a run's folder. Rank 0 holds it from before it reads there until the run's end.

    The kernel releases it when this process ends, however it ends. It is a lock of the process: a
    worker of the data that outlives the process does not hold it, as it would with `fcntl.flock`.

    Args:
        folder: Of the run.

    Attributes:
        notes: That nothing is locked, if so.

    Raises:
        HeldError: If another process holds it. The message says which.
        OSError: If there can be no such file, or another user has put something in its place.
    """

    def __init__(self, folder: Path) -> None:
        self.notes: tuple[str, ...] = ()
        # A number, and no file object: what forgets this lock does not release it.
        self._file = run_files.open_to_change(folder / LOCK, os.O_RDWR)
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                raise HeldError(
                    f"{folder} is in use by {self._holder()}: two jobs cannot go on with one run: "
                    f"wait for its end, or end it"
                ) from error
            words = f"{folder} cannot be locked ({error.strerror}): start no other job with it"
            self.notes = (words,)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        os.ftruncate(self._file, 0)
        os.write(
            self._file, f"process {os.getpid()} on {socket.gethostname()} since {now}\n".encode()
        )

    def release(self) -> None:
        """Lets another process go on with the run."""
        os.close(self._file)

    def _holder(self) -> str:
        """Returns what the process that holds it has written, and closes the file."""
        written = os.read(self._file, 200).decode(errors="replace").strip()
        os.close(self._file)
        return written or "another process"
