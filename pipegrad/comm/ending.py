"""Ending: threads and process groups end when they are closed or dropped, or when Python exits."""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from pipegrad.comm.comm_stream import CommStream

_GRACE_SECONDS = 10.0  # for collectives that other ranks will soon run too
_CUT_SECONDS = 5.0  # for threads to return from gloo after their connections were closed
_POLL_SECONDS = 0.005
_TAG = 0x70677  # of a message that no rank sends


class Ending:
    """Ends threads and groups once: in `end`, when `owner` is garbage, or at exit.

    See [Note: how threads end]. Without a call of `end`, the ending needs no other rank. It waits
    some seconds for collectives in flight. Then it closes the connections of those that still run.

    Args:
        owner: The object that owns the threads and groups; a weak reference.
        threads: Comm streams with a thread. The collection may change until they are ended.
        groups: Process groups that only the owner uses. They are destroyed. The list may change.
        is_local: Whether a group can be destroyed without other ranks, as on gloo.
        is_idle: Returns whether no collective is in flight that was launched without a thread.
        begin: Is called when the ending begins. It must hold no reference to the owner.

    Attributes:
        in_vain: Whether other ranks may never run the collectives in flight, as inside a step.
    """

    def __init__(
        self,
        owner: object,
        *,
        threads: Collection[CommStream] = (),
        groups: list[dist.ProcessGroup] | None = None,
        is_local: bool = True,
        is_idle: Callable[[], bool] = lambda: True,
        begin: Callable[[], object] = lambda: None,
    ) -> None:
        self.in_vain = False
        self._threads = threads
        self._groups = [] if groups is None else groups
        self._is_local = is_local
        self._is_idle = is_idle
        self._process = os.getpid()
        self._begin = begin
        _waiting[id(self)] = self
        self._dropped = weakref.finalize(owner, self._end_by_itself)
        self._dropped.atexit = False

    def end(self) -> None:
        """Ends everything; a second call does nothing. Every rank must call it.

        Waits for collectives in flight, unless that is in vain.
        """
        self._end(destroy=True)

    def _end_by_itself(self) -> None:
        self._end(destroy=self._is_local)

    def _end(self, *, destroy: bool) -> None:
        # A forked process has a copy of this object, but not the threads and connections.
        if _waiting.pop(id(self), None) is None or os.getpid() != self._process:
            return
        self._dropped.detach()
        self._begin()
        for thread in self._threads:
            thread.stop()
        # Threads come first, then groups, because a thread may be inside a collective of a group.
        grace = 0.0 if self.in_vain else _GRACE_SECONDS
        interrupt: KeyboardInterrupt | None = None
        try:
            has_ended = self._wait(grace)
        # Raise the interrupt last, because a thread that still runs at exit aborts the process.
        except KeyboardInterrupt as error:
            has_ended, interrupt = False, error
        if not has_ended and self._is_local:
            for group in self._groups:
                cut(group)
            self._wait(_CUT_SECONDS)
        while self._groups and destroy:
            # ``destroy_process_group()`` may have destroyed all groups already.
            with suppress(ValueError, AssertionError):
                dist.destroy_process_group(self._groups.pop())
        if interrupt is not None:
            raise interrupt

    def _wait(self, timeout_seconds: float) -> bool:
        deadline = time.monotonic() + timeout_seconds
        ended = [t.join(max(0.0, deadline - time.monotonic())) for t in self._threads]
        while not self._is_idle() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return all(ended) and self._is_idle()


# [Note: how threads end] Our threads must return before the interpreter finalizes. Before Python
# 3.14, it then kills each thread that returns to Python from C++, and this aborts the process. A
# thread in a collective of gloo returns at any time: when the other ranks run the collective or
# close their connections. For this reason threads are stopped, and the ending waits for them.
# A collective that another rank never runs does not end, and gloo has no call that ends it. But a
# receive that times out closes all connections of its group, and its collectives fail.
# gloo has its own threads. They release the tensors of a collective shortly after its wait has
# returned. To destroy a group joins these threads, and needs no other rank.

_waiting: dict[int, Ending] = {}


@atexit.register
def _at_exit() -> None:
    # The last one first, because an object may use objects that were made earlier.
    for ending in reversed(list(_waiting.values())):
        ending._end_by_itself()


def set_all_in_vain() -> None:
    """Marks the job as failed: at exit, no rank waits for collectives in flight."""
    for ending in list(_waiting.values()):
        ending.in_vain = True


def cut(group: dist.ProcessGroup) -> None:
    """Closes this rank's connections of a gloo group. Calls that wait for them fail at once."""
    # Receive from every rank: the first receive that times out closes all connections, but one
    # from a rank that has ended fails at once and closes none.
    for peer in {*range(group.size())} - {group.rank()}:
        with suppress(RuntimeError):  # it timed out, or the connection was closed before
            group.recv([torch.empty(1)], peer, _TAG).wait(timedelta(milliseconds=1))


def cut_all() -> None:
    """Closes this rank's connections in all groups of this process, also the user's.

    Waits for their collectives fail then. No group can be used again.
    """
    for group in list(dist.distributed_c10d._world.pg_map):
        # A group may be destroyed already, or broken. The others must be closed all the same.
        with suppress(RuntimeError, ValueError):
            cut(group) if dist.get_backend(group) == "gloo" else group.abort()
