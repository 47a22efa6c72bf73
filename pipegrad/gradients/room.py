"""Room for buckets: the memory of those whose parts were taken goes before new memory is made."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from pipegrad.comm.comm_stream import Ticket
from pipegrad.gradients.bucket_buffer import BucketBuffer

_MAX_LEAVING = 2  # buckets whose parts are not taken yet, before new memory waits for theirs
_PATIENCE_SECONDS = 1.0  # in each step, for that
_LEAST_PATIENCE_SECONDS = 1e-3
_DEVICE_POLL_SECONDS = 5e-5


class Room:
    """Frees the memory of buckets in the order of their launches. Each backward asks for room.

    Args:
        buffers: By number.
        is_patient: Whether a backward may wait for memory, some time: no other stage needs it.
    """

    def __init__(self, buffers: Mapping[int, BucketBuffer], *, is_patient: bool) -> None:
        self._buffers = buffers
        self._is_patient = is_patient
        self._allowed_seconds = _PATIENCE_SECONDS
        self._patience_seconds = _PATIENCE_SECONDS  # what is left of it in this step
        self._leaving: dict[int, Ticket] = {}
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Starts a step, in which no bucket was launched."""
        self._leaving.clear()
        if not self._is_patient:
            self._patience_seconds = 0.0
            return
        # Where a wait was in vain, the next step is most likely to wait in vain, too. So it waits
        # for half as long, and longer again when waits have ended in time.
        if self._patience_seconds <= 0:
            self._allowed_seconds = max(self._allowed_seconds / 2, _LEAST_PATIENCE_SECONDS)
        else:
            self._allowed_seconds = min(2 * self._allowed_seconds, _PATIENCE_SECONDS)
        self._patience_seconds = self._allowed_seconds

    def launched(self, bucket: int, ticket: Ticket) -> None:
        """Notes a reduction after which the memory of a bucket may go.

        Args:
            bucket: Its number.
            ticket: Of the reduction.
        """
        self._leaving[bucket] = ticket

    def tickets(self) -> list[Ticket]:
        """Returns the reductions whose buckets are still in memory, in the order of launches."""
        return list(self._leaving.values())

    def make(self) -> None:
        """Frees what may go. It may wait a short time, so that few buckets are in memory at once.

        Sync: no stream waits for a reduction that is under way.
        """
        # A rank that waits here could wait for a rank that waits for it in a collective of the
        # user. So the wait is bounded, for each step.
        with self._lock:
            self.free_done()
            while len(self._leaving) >= _MAX_LEAVING and self._patience_seconds > 0:
                start = time.perf_counter()
                oldest = next(iter(self._leaving.values()))
                if not oldest.is_done(self._patience_seconds):
                    time.sleep(_DEVICE_POLL_SECONDS)
                self._patience_seconds -= time.perf_counter() - start
                self.free_done()

    def free(self) -> None:
        """Frees all that may go. Call it when the reductions have ended.

        Sync: as `BucketBuffer.let_go`.
        """
        for bucket in list(self._leaving):
            del self._leaving[bucket]
            self._buffers[bucket].let_go()

    def free_done(self) -> None:
        """Frees the memory of buckets whose reductions have ended, without a wait.

        Sync: as `BucketBuffer.let_go`.
        """
        for bucket, ticket in list(self._leaving.items()):
            if ticket.is_done() and self._buffers[bucket].is_taken:
                del self._leaving[bucket]
                self._buffers[bucket].let_go()
