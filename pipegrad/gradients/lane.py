"""A lane: where collectives run beside the compute, in order. A side stream, or on CPU a thread."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence

import torch

Task = Callable[[], None]


def record_event(device: torch.device) -> torch.Event | None:
    """Returns an event recorded on the current stream, or None where there are no streams."""
    return None if device.type == "cpu" else torch.accelerator.current_stream(device).record_event()


def wait_event(event: torch.Event | None, device: torch.device) -> None:
    """Makes the current stream wait for `event`."""
    if event is not None:
        torch.accelerator.current_stream(device).wait_event(event)


class Lane:
    """Runs tasks one after the other, beside the compute stream.

    Two lanes need two communicators for each process group: streams that share one serialise.

    Args:
        name: For the thread, in stack dumps.
        device: Where the tensors live.
        threaded: Run tasks in a thread of its own, because waiting for them blocks the host.
    """

    def __init__(self, name: str, device: torch.device, *, threaded: bool) -> None:
        self._device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device)
        self._error: BaseException | None = None
        self._idle = threading.Event()
        self._idle.set()
        self._unfinished = 0
        self._lock = threading.Lock()
        self._tasks: queue.SimpleQueue[tuple[Task, Sequence[torch.Event]] | None] | None = None
        if threaded:
            self._tasks = queue.SimpleQueue()
            thread = threading.Thread(target=_drain, args=(self._tasks, self._run), name=name)
            thread.daemon = True
            thread.start()

    def submit(self, task: Task, after: Sequence[torch.Event]) -> None:
        """Enqueues `task`, to run behind all that was submitted before.

        Sync: returns at once. `task` runs with the side stream current, which first waits for the
        events in `after`. After a task has failed the following ones are dropped.
        """
        with self._lock:
            self._unfinished += 1
            self._idle.clear()
        if self._tasks is None:
            self._run(task, after)
        else:
            self._tasks.put((task, after))

    def wait(self, timeout_seconds: float) -> bool:
        """Waits for all submitted tasks; returns False if they take longer than the timeout.

        Sync: where tasks block the host, so does this; then the current stream waits for the
        side stream. A wait on a device's own stream never blocks the host.

        Raises:
            BaseException: The first error that a task raised.
        """
        if not self._idle.wait(timeout_seconds):
            return False
        if self._error is not None:
            raise self._error
        if self._stream is not None:
            torch.accelerator.current_stream(self._device).wait_stream(self._stream)
        return True

    def close(self) -> None:
        """Ends the thread, once what was submitted is done."""
        if self._tasks is not None:
            self._tasks.put(None)

    def _run(self, task: Task, after: Sequence[torch.Event]) -> None:
        try:
            if self._error is None:
                with self._stream or contextlib.nullcontext():
                    for event in after:
                        wait_event(event, self._device)
                    task()
        except BaseException as error:  # noqa: BLE001 - raised again by wait, in the caller's thread
            self._error = error
        with self._lock:
            self._unfinished -= 1
            if self._unfinished == 0:
                self._idle.set()


def _drain(
    tasks: queue.SimpleQueue[tuple[Task, Sequence[torch.Event]] | None],
    run: Callable[[Task, Sequence[torch.Event]], None],
) -> None:
    while (item := tasks.get()) is not None:
        run(*item)
