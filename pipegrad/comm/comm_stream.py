"""A comm stream: a side stream, or on CPU a thread, that runs collectives in order.

Step 5 of the journey of a gradient in docs/internals.md launches collectives on comm streams.
Functions that launch stay outside of CUDA graphs and of compiled regions: see `outside_of_graphs`.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache, wraps
from typing import ParamSpec, TypeVar, cast

import torch

from pipegrad.comm import sync_points
from pipegrad.comm.waits import let_block
from pipegrad.errors import StepError

Task = Callable[[], None]
Outcome = tuple[torch.Event | None, object]  # the task's event, and a result of `hand_over`

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
    """A task that was submitted to a comm stream."""

    def __init__(self, device: torch.device) -> None:
        self.done: Future[Outcome] = Future()
        self._device = device

    def wait(self, timeout_seconds: float) -> bool:
        """Waits for the task and all tasks before it; returns False after the timeout.

        Sync: blocks the host if the tasks run in a thread. Then the current stream waits for the
        side stream, which does not block the host.

        Raises:
            BaseException: The first error that a task of the comm stream raised.
        """
        # Two waits are needed. The host waits until the thread has run the task, because there is
        # no event before. Then the current stream waits for the task's event on the side stream.
        done = HOST(self.done, timeout_seconds)
        if done is False:
            return False
        if done:
            event, order = self.done.result()
            sync_points.in_use.take_over(order)
            RESULT(event, self._device)
        return True


@dataclass(frozen=True)
class _Item:
    """A task in the queue.

    Attributes:
        task: The function to run.
        after: Events for which the side stream waits first.
        order: The result of `hand_over` in the thread that submitted it.
        ticket: The result of `submit`.
    """

    task: Task
    after: Sequence[torch.Event]
    order: object
    ticket: Ticket


class CommStream:
    """Runs tasks in order, in parallel with the compute stream.

    Each comm stream needs its own communicator for each set of ranks. Collectives of two streams
    on one communicator run one after the other.

    Attributes:
        error: The first error that a task raised.
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
            # A daemon: its task may wait for a collective that never ends, which must not hold up
            # the exit of Python.
            self._thread = threading.Thread(
                target=_drain, args=(self._queue, self._run), name=name, daemon=True
            )
            self._thread.start()

    def submit(self, task: Task, after: Sequence[torch.Event]) -> Ticket:
        """Enqueues `task` after all earlier tasks.

        Sync: returns at once. `task` runs with the side stream current, and the side stream first
        waits for the events in `after`. After a task has failed, later tasks do not run and fail
        with the same error. The caller keeps the tensors of the task until it has waited for it.
        """
        # One queue, in the order of the plan, because ranks that issue their part of one list of
        # collectives cannot wait for each other in a circle. Step 5 of the journey of a gradient
        # calls this.
        self._last = Ticket(self._device)
        item = _Item(task, after, sync_points.in_use.hand_over(), self._last)
        # Without a thread the caller runs the item, because the side stream is the queue, and a
        # wait there blocks no host.
        if self._queue is None:
            self._run(item)
        else:
            self._queue.put(item)
        return self._last

    @property
    def is_threaded(self) -> bool:
        """True if tasks run in a thread, and so may block the host."""
        return self._queue is not None

    def put_off(self, task: Task) -> None:
        """Keeps `task`, the rest of the task that calls this, for `run_late`."""
        # For `LateWork`, because a wait now would delay the next collectives, which do not need
        # its result.
        self._late.append(task)

    @property
    def has_late(self) -> bool:
        """True if tasks were put off. Reliable after `wait` has returned True."""
        return bool(self._late)

    def run_late(self) -> None:
        """Runs the tasks that were put off, in order, and those that they put off. Submit this.

        Sync: as the tasks. Without a thread, it blocks the host if they do.
        """
        while self._late:
            # Out of the queue before it runs, because it may put off another task at the end.
            self._late.popleft()()

    def wait(self, timeout_seconds: float) -> bool:
        """Waits for all submitted tasks; see `Ticket.wait`."""
        return self._last is None or self._last.wait(timeout_seconds)

    def close(self) -> None:
        """Ends the thread after the tasks that were submitted.

        After a failed step, a task may wait for a collective that never ends. Then this does not
        wait for the thread.

        Sync: the current stream waits for the side stream. Then buffers may be freed on it.
        """
        # A new event at the end of the side stream covers all tasks. A ticket would not, because
        # tasks may have failed.
        if self._stream is not None:
            CLOSED(LAST(self._device, self._stream), self._device)
        self.stop()
        if self._last is None or self._last.done.done():
            self.join()

    def stop(self) -> None:
        """Ends the thread after the tasks that were submitted; returns at once."""
        if self._queue is not None:
            self._queue.put(None)

    def join(self, timeout_seconds: float | None = None) -> bool:
        """Waits for the end of the thread; returns whether it has ended."""
        if self._queue is None or self._thread is threading.current_thread():
            return True  # the last reference may be in its own thread, which cannot join itself
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _run(self, item: _Item) -> None:
        try:
            # A task after a failed one fails too, because it may read memory that the failed one
            # has not written. Its `wait` then raises the first error.
            if self.error is not None:
                raise self.error
            sync_points.in_use.take_over(item.order)
            with sync_points.in_use.running(self._stream):
                # Wait on the side stream, never on the compute stream, because that one goes on
                # with the next backward.
                for event in item.after:
                    PRODUCERS(event, self._device)
                item.task()
                done = TASK_DONE(self._device)
            item.ticket.done.set_result((done, sync_points.in_use.hand_over()))
        except BaseException as error:  # noqa: BLE001 - `Ticket.wait` raises it in its caller's thread
            self.error = error
            item.ticket.done.set_exception(error)


def _drain(tasks: queue.SimpleQueue[_Item | None], run: Callable[[_Item], None]) -> None:
    let_block()
    while (item := tasks.get()) is not None:
        run(item)
        del item  # otherwise its tensors would live until the next item


P = ParamSpec("P")
T = TypeVar("T")


def outside_of_graphs(verb: Callable[P, T]) -> Callable[P, T]:
    """Returns `verb` so that Python runs it in every step, never as a recording.

    The verb raises StepError while a CUDA graph is captured, because a replay runs no Python: it
    would send nothing, and other ranks would wait. In code that torch.compile traces, the graph
    breaks at the verb; with ``fullgraph=True``, torch raises an error.
    """
    name = getattr(verb, "__name__", "").lstrip("_")

    @wraps(verb)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise StepError(
                f"{name}() while a CUDA graph is captured: its replay would not synchronise "
                f"gradients. Capture the model's forward and backward alone "
                f"(torch.cuda.make_graphed_callables), and call pipegrad outside of the capture"
            )
        return verb(*args, **kwargs)

    @cache
    def disabled() -> Callable[P, T]:
        reason = "pipegrad communicates: it must run in every step, as Python"
        return cast(Callable[P, T], torch.compiler.disable(run, reason=reason))

    @wraps(verb)
    def outside(*args: P.args, **kwargs: P.kwargs) -> T:
        # Do not import torch._dynamo, because that takes seconds. Without it no code is compiled.
        if "torch._dynamo" in sys.modules:
            return disabled()(*args, **kwargs)
        return run(*args, **kwargs)

    return outside
