"""Saver: writes checkpoints beside the training, one at a time.

[Note: a save beside the steps]
1. All ranks begin a save after the same step. They copy values to CPU memory (`Staging`), and a
   thread writes them. So the training goes on, and only the next optimizer waits for the copy.
2. The threads of all ranks coordinate over a gloo group of their own. So their messages never meet
   the collectives of the training.
3. Each rank sends the status of its thread in the message of metrics that every step makes. All
   ranks see the same statuses after the same step, and so they end the save together.
4. If a rank fails, torch tells all ranks in the save. The run goes on, without this checkpoint. A
   rank that cannot even collect its state brings the error into the save. So ranks never wait for
   each other outside of the save.

torch's own ``async_save`` is not used. Its stager copies tensors by type and does not know `Chunk`,
and Python waits for its threads at exit, also if the other ranks are gone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from enum import IntEnum
from pathlib import Path
from threading import Event
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from pipegrad import run_files
from pipegrad.comm.ending import Ending
from pipegrad.errors import PlanError, in_words
from pipegrad.train.checkpoint.checksums import CheckedWriter
from pipegrad.train.checkpoint.folders import unfinished
from pipegrad.train.checkpoint.writer.staging import Staging

WRITE_SECONDS = 1800.0  # timeout for the slowest rank to write its part


Collect = Callable[[], Mapping[str, Tensor]]


class Status(IntEnum):
    """What the thread of a rank does. The largest one of all ranks says what the save does."""

    IDLE = 0
    DONE = 1  # well or not
    BUSY = 2


class Saver:
    """Writes the checkpoints of a run. All ranks make it, and call it, together.

    Args:
        device: Of this rank's stages.
        run: Values of the run, as text; see `CheckedWriter`.
        written: Called on rank 0 with the folder of each checkpoint that is whole. It may run in a
            thread.
    """

    def __init__(
        self, device: torch.device, run: Mapping[str, str], written: Callable[[Path], object]
    ) -> None:
        self._device, self._run, self._written = device, run, written
        self._staging = Staging(device)
        self._save: _Save | None = None
        self._threads: list[_Save] = []
        timeout = timedelta(seconds=WRITE_SECONDS)
        group = dist.new_group(timeout=timeout, backend="gloo", group_desc="pipegrad checkpoint")
        self._group = cast("dist.ProcessGroup", group)
        # A thread that waits for a rank that is gone ends with the process; see
        # [Note: how threads end].
        self._ending = Ending(self, threads=self._threads, groups=[self._group])

    @property
    def is_busy(self) -> bool:
        """Whether a save is not settled. The same on all ranks."""
        return self._save is not None

    def save(self, folder: Path, step: int, collect: Collect) -> str:
        """Writes a checkpoint, and returns when it is whole; returns why it failed, or "".

        Args:
            folder: Of the checkpoint.
            step: After which it is written.
            collect: Returns what this rank writes.

        Raises:
            PlanError: If `collect` has raised it on some rank. On all ranks.
        """
        state, error = _collected(collect)
        try:
            self._write(folder, state, error)
        except CheckpointException as failure:
            cause, _ = failure.failures[min(failure.failures)]
            if isinstance(cause, PlanError):
                raise cause from failure
            return _complaint(folder, step, failure)
        return ""

    def begin(self, folder: Path, step: int, collect: Collect) -> None:
        """Copies a state, and begins to write it; see [Note: a save beside the steps].

        Args:
            folder: Of the checkpoint.
            step: After which it is written.
            collect: Returns what this rank writes.

        Sync: as `Staging.copy`. Call `wait_copied` before anything overwrites the state.
        """
        assert self._save is None
        state, error = _collected(collect)
        staged = self._staging.copy(state)

        def write() -> None:
            if self._device.type != "cpu":
                torch.accelerator.set_device_index(self._device.index)
            self._staging.finish()
            self._write(folder, staged, error)

        self._save = _Save(folder, step, write)
        self._threads[:] = [self._save]
        self._save.start()

    def wait_copied(self) -> None:
        """Orders the current stream behind the copies of a save.

        Sync: as `Staging.wait`.
        """
        self._staging.wait()

    @property
    def status(self) -> Status:
        """What this rank's thread does, for the message of metrics."""
        return Status.IDLE if self._save is None else self._save.status

    def settle(self, status: Status) -> str:
        """Ends a save if all ranks have; returns why it failed, or "".

        Args:
            status: The largest one of all ranks.
        """
        return self.wait() if status == Status.DONE else ""

    def wait(self) -> str:
        """Waits for the save; returns why it failed, or "". All ranks must call it."""
        if self._save is None:
            return ""
        ended, self._save = self._save, None
        ended.join()
        self._threads.clear()
        return _complaint(ended.folder, ended.step, ended.error) if ended.error else ""

    def close(self) -> None:
        """Ends the process group; every rank must call it."""
        self._ending.end()

    def _write(self, folder: Path, state: Mapping[str, Tensor], error: Exception | None) -> None:
        is_first = dist.get_rank() == 0
        try:
            save(
                dict(state),
                storage_writer=CheckedWriter(folder, self._run, error),
                process_group=self._group,
            )
        except BaseException:
            # Also the disk may be full, so what was written gives its space back. No rank writes
            # any more: torch raises when all ranks have replied.
            if is_first:
                run_files.remove(unfinished(folder))
            raise
        if is_first:
            self._written(folder)


class _Save:
    """A thread that writes one checkpoint.

    Attributes:
        folder: Of the checkpoint.
        step: After which it is written.
        error: Why it failed; None if it has not.
    """

    def __init__(self, folder: Path, step: int, write: Callable[[], None]) -> None:
        self.folder, self.step, self._write = folder, step, write
        self.error: BaseException | None = None
        # Python does not wait for a daemon at exit, and the ending does.
        self._thread = threading.Thread(
            target=self._run, name="pipegrad checkpoint", daemon=True
        )  # fmt: skip
        self._has_ended = Event()

    def start(self) -> None:
        self._thread.start()

    @property
    def status(self) -> Status:
        """What this thread does."""
        return Status.DONE if self._has_ended.is_set() else Status.BUSY

    def stop(self) -> None:
        """Does nothing: the thread ends when its checkpoint is written, or its group is cut."""

    def join(self, timeout_seconds: float | None = None) -> bool:
        """Waits for the end of the thread; returns whether it has ended."""
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:  # noqa: BLE001 - the training reads it
            self.error = error
        finally:
            self._has_ended.set()


def _collected(collect: Collect) -> tuple[Mapping[str, Tensor], Exception | None]:
    """Returns what this rank writes, or why it cannot."""
    try:
        return collect(), None
    except Exception as error:  # noqa: BLE001 - all ranks get it in the save
        return {}, error


def _complaint(folder: Path, step: int, error: BaseException) -> str:
    return (
        f"the checkpoint of step {step} cannot be written into {folder}: {failure_message(error)}"
    )


def failure_message(error: BaseException) -> str:
    """Returns why a save or a read failed: the message of the first rank that failed.

    Raises:
        KeyboardInterrupt: If that rank was interrupted.
    """
    if not isinstance(error, CheckpointException):
        return in_words(error)
    rank, (cause, _) = min(error.failures.items(), key=lambda failed: failed[0])
    if isinstance(cause, KeyboardInterrupt):
        raise cause from error
    return f"rank {rank}: {in_words(cause)}"
