"""A comm stream: a side stream, or on CPU a thread, in which collectives run in order."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from pipegrad.comm import sync_points

Task = Callable[[], None]
Outcome = tuple[torch.Event | None, object]  # the task's event, and what its thread knew

PRODUCERS = sync_points.Wait(
    "comm-stream.producers", "a task reads what other streams have just written"
)
TASK_DONE = sync_points.Record(
    "comm-stream.task-done", "who waits for a task must not run ahead of its stream"
)
HOST = sync_points.WaitHost(
    "comm-stream.host", "the task of a thread may not have run, nor recorded its event"
)
RESULT = sync_points.Wait(
    "comm-stream.result", "the current stream reads and overwrites what the task wrote"
)
LAST = sync_points.Record(
    "comm-stream.last", "close orders behind all that runs, failed or not waited for"
)
CLOSED = sync_points.Wait(
    "comm-stream.closed", "after close the buffers are freed, on the current stream"
)


class Ticket:
    """A task on its way."""

    def __init__(self, device: torch.device) -> None:
        self.done: Future[Outcome] = Future()
        self._device = device

    def wait(self, timeout_seconds: float) -> bool:
        """Waits for the task and all before it in its comm stream; returns False after the timeout.

        Sync: where tasks block the host, so does this; then the current stream waits for the
        side stream. A wait on a device's own stream never blocks the host.

        Raises:
            BaseException: The first error that a task of the comm stream raised.
        """
        done = HOST(self.done, timeout_seconds)
        if done is False:
            return False
        if done:
            event, handed = self.done.result()
            sync_points.in_use.take_over(handed)
            RESULT(event, self._device)
        return True


@dataclass(frozen=True)
class _Item:
    task: Task
    after: Sequence[torch.Event]
    handed: object
    ticket: Ticket


class CommStream:
    """Runs tasks one after the other, beside the compute stream.

    Two comm streams need two communicators for each process group: streams that share one
    serialise.

    Args:
        name: For the thread, in stack dumps.
        device: Where the tensors live.
        threaded: Run tasks in a thread of its own, because waiting for them blocks the host.

    Attributes:
        error: The first one that a task raised.
    """

    def __init__(self, name: str, device: torch.device, *, threaded: bool) -> None:
        self._device = device
        self._stream = sync_points.in_use.stream(device, name)
        self.error: BaseException | None = None
        self._last: Ticket | None = None
        self._queue: queue.SimpleQueue[_Item | None] | None = None
        self._late = deque[Task]()
        if threaded:
            self._queue = queue.SimpleQueue()
            self._thread = threading.Thread(
                target=_drain, args=(self._queue, self._run), name=name, daemon=True
            )
            self._thread.start()

    def submit(self, task: Task, after: Sequence[torch.Event]) -> Ticket:
        """Enqueues `task`, to run behind all that was submitted before.

        Sync: returns at once. `task` runs with the side stream current, which first waits for the
        events in `after`. After a task has failed the following ones are dropped, and fail alike.
        Whoever submits holds the tensors of the task until it has been waited for.
        """
        self._last = Ticket(self._device)
        item = _Item(task, after, sync_points.in_use.hand_over(), self._last)
        if self._queue is None:
            self._run(item)
        else:
            self._queue.put(item)
        return self._last

    @property
    def is_threaded(self) -> bool:
        """Whether tasks may block the host: it is a thread of their own."""
        return self._queue is not None

    def put_off(self, task: Task) -> None:
        """Keeps a task for `run_late`: called by a task, of what is left of it."""
        self._late.append(task)

    @property
    def has_late(self) -> bool:
        """Whether tasks were put off; sure once what was submitted has been waited for."""
        return bool(self._late)

    def run_late(self) -> None:
        """Runs what was put off, in order, and what that puts off. A task itself: submit it.

        Blocks the host if they do, and this is no thread.
        """
        while self._late:
            self._late.popleft()()

    def wait(self, timeout_seconds: float) -> bool:
        """Waits for all submitted tasks, as `Ticket.wait` does for one."""
        return self._last is None or self._last.wait(timeout_seconds)

    def close(self) -> None:
        """Ends the thread, once what was submitted is done.

        One that is not done, because a step failed, is left behind: its collective may never end.

        Sync: the current stream waits for what runs, so that buffers may be freed on it.
        """
        if self._stream is not None:
            CLOSED(LAST(self._device, self._stream), self._device)
        self.stop()
        if self._last is None or self._last.done.done():
            self.join()

    def stop(self) -> None:
        """Ends the thread behind what was submitted; returns at once."""
        if self._queue is not None:
            self._queue.put(None)

    def join(self, timeout_seconds: float | None = None) -> bool:
        """Waits for the end of the thread; returns whether it has ended."""
        if self._queue is None or self._thread is threading.current_thread():
            return True  # the last to hold the comm stream may be its own thread
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _run(self, item: _Item) -> None:
        try:
            if self.error is not None:
                raise self.error
            sync_points.in_use.take_over(item.handed)
            with sync_points.in_use.running(self._stream):
                for event in item.after:
                    PRODUCERS(event, self._device)
                item.task()
                done = TASK_DONE(self._device)
            item.ticket.done.set_result((done, sync_points.in_use.hand_over()))
        except BaseException as error:  # noqa: BLE001 - raised again by wait, in the caller's thread
            self.error = error
            item.ticket.done.set_exception(error)


def _drain(tasks: queue.SimpleQueue[_Item | None], run: Callable[[_Item], None]) -> None:
    while (item := tasks.get()) is not None:
        run(item)
        del item  # or its tensors would live until the next one
