"""Ending: threads and process groups end when they are closed, are dropped, or Python exits."""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

_GRACE_SECONDS = 10.0  # for collectives that other ranks are about to run too
_CUT_SECONDS = 5.0  # for threads to come back from connections that are closed
_POLL_SECONDS = 0.005
_TAG = 0x70677  # of a message that nobody sends


class Thread(Protocol):
    """What `Ending` needs of a comm stream."""

    def stop(self) -> None:
        """Ends the thread behind what it has to do; returns at once."""

    def join(self, timeout_seconds: float) -> bool:
        """Waits for the end of the thread; returns whether it has ended."""


class Ending:
    """Ends threads and groups once: by `end`, when nobody holds `owner` any more, or at exit.

    See [Note: how threads end]. What happens without a call needs no other rank: it waits for what
    is in flight, for some seconds, and closes the connections of what does not end by itself.

    Args:
        owner: Whose they are; held weakly.
        threads: Which of them; what is in it in the end counts.
        groups: Process groups that are the owner's alone, and are destroyed. Likewise.
        used: Process groups of others that its threads use.
        is_local: Whether destroying a group needs no other rank: on gloo.
        is_idle: Whether no collective is in flight that was launched without a thread.

    """

    def __init__(
        self,
        owner: object,
        *,
        threads: Collection[Thread] = (),
        groups: list[dist.ProcessGroup] | None = None,
        used: Iterable[dist.ProcessGroup] = (),
        is_local: bool = True,
        is_idle: Callable[[], bool] = lambda: True,
    ) -> None:
        self._in_vain = False
        self._threads = threads
        self._groups = [] if groups is None else groups
        self._used = used
        self._is_local = is_local
        self._is_idle = is_idle
        self._process = os.getpid()
        self._releases: list[Callable[[], object]] = []
        _waiting[id(self)] = self
        self._dropped = weakref.finalize(owner, self._end_by_itself)
        self._dropped.atexit = False

    def call(self, release: Callable[[], object]) -> None:
        """Has something else done in the end, ahead of all; it may not hold the owner."""
        self._releases.append(release)

    def note_in_vain(self, in_vain: bool) -> None:
        """Notes whether other ranks will not end what is in flight: a step has begun, say."""
        self._in_vain = in_vain

    def end(self) -> None:
        """Ends everything; does nothing the second time. Every rank must call it.

        Waits for what other ranks have to run too, unless that is in vain.
        """
        self._end(destroy=True, at_exit=False)

    def _end_by_itself(self, *, at_exit: bool = False) -> None:
        self._end(destroy=self._is_local, at_exit=at_exit)

    def _end(self, *, destroy: bool, at_exit: bool) -> None:
        # A forked process has neither the threads nor the connections.
        if _waiting.pop(id(self), None) is None or os.getpid() != self._process:
            return
        self._dropped.detach()
        for release in self._releases:
            release()
        for thread in self._threads:
            thread.stop()
        grace = 0.0 if self._in_vain else _GRACE_SECONDS
        interrupt: KeyboardInterrupt | None = None
        try:
            has_ended = self._wait(grace)
        except KeyboardInterrupt as error:  # at exit too: a thread that is left aborts the process
            has_ended, interrupt = False, error
        if not has_ended and self._is_local:
            for group in [*self._groups, *(self._used if at_exit else ())]:
                cut(group)
            self._wait(_CUT_SECONDS)
        while self._groups and destroy:
            destroy_group(self._groups.pop())
        if interrupt is not None:
            raise interrupt

    def _wait(self, timeout_seconds: float) -> bool:
        deadline = time.monotonic() + timeout_seconds
        ended = [t.join(max(0.0, deadline - time.monotonic())) for t in self._threads]
        while not self._is_idle() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return all(ended) and self._is_idle()


# [Note: how threads end] Until Python 3.14 an interpreter that finalizes kills a thread that comes
# back to it, and where the thread was in C++ the whole process is aborted. A thread in a collective
# of gloo comes back when the other ranks have come to it, or their connections end: at any time. So
# it has to come back before: our threads are told to stop, and are waited for. What does not end
# is a collective that another rank never comes to. No call of gloo ends it. But a receive that
# times out closes all connections of its group, and everything that waits for one of them fails.
# gloo has threads too, which let go of the tensors of a collective a little after whoever waited
# for it goes on. Destroying a group joins its threads, and needs no other rank.

_waiting: dict[int, Ending] = {}


@atexit.register
def _at_exit() -> None:
    for ending in reversed(list(_waiting.values())):  # in a dictionary: as they were made
        ending._end_by_itself(at_exit=True)


def cut(group: dist.ProcessGroup) -> None:
    """Closes this rank's connections of a group on gloo: what waits for them fails at once."""
    if group.size() > 1:
        peer = (group.rank() + 1) % group.size()
        with suppress(RuntimeError):  # that it has timed out, or that they are closed
            group.recv([torch.empty(1)], peer, _TAG).wait(timedelta(milliseconds=1))


def destroy_group(group: dist.ProcessGroup) -> None:
    """Destroys a group, unless ``destroy_process_group()`` has destroyed all."""
    with suppress(ValueError, AssertionError):
        dist.destroy_process_group(group)
