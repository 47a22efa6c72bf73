"""Saving: when a run saves, how the training goes on meanwhile, and what happens if it cannot.

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

torch's ``async_save`` is not used. Python waits for its thread at exit, also if another rank never
answers, and that is half an hour. This thread ends with the process.

[Note: what waits for the copy] The copies of a device run on a side stream. It first waits for an
event of the current stream, because the optimizer and the parameter sync may still write. The next
optimizer waits for the copies, because it overwrites what they read. Forwards and backwards do not
wait: they only read parameters and the optimizer's state. They write buffers, and so the state has
copies of buffers. The thread that writes the checkpoint blocks until all copies are there. On CPU
the copies are made at once.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from pipegrad import run_files
from pipegrad.comm import sync_points
from pipegrad.comm.comm_stream import CommStream, Ticket
from pipegrad.comm.ending import Ending
from pipegrad.comm.watch import Bounded
from pipegrad.errors import PlanError
from pipegrad.gradients.main_params import Chunk
from pipegrad.train.checkpoint.storage import (
    CheckpointWriter,
    checkpoint_folder,
    failure_message,
    prune,
    unfinished,
)
from pipegrad.train.checkpoint.training_state import TrainingState
from pipegrad.train.config import Config

WRITTEN = sync_points.Record(
    "checkpoint.written", "the copy for a checkpoint reads what the step has just written"
)
_WRITE_SECONDS = 1800.0  # timeout for the slowest rank to write its part
_COPY_SECONDS = 600.0
Note = Callable[[str], object]


class Status(IntEnum):
    """What the thread of a rank does. The largest one of all ranks says what the save does."""

    IDLE = 0
    DONE = 1  # well or not
    BUSY = 2


class Saving:
    """The checkpoints of a run, one at a time. All ranks make it, and call it, together.

    Args:
        config: The configuration.
        state: Of this rank.
        device: Of this rank's stages.
        run: Values of the run, as text; see `CheckpointWriter`.
    """

    def __init__(
        self, config: Config, state: TrainingState, device: torch.device, run: Mapping[str, str]
    ) -> None:
        self._config, self._state, self._device, self._run = config, state, device, run
        self._staging = Staging(device)
        self._folder: Path | None = None
        self._place: tuple[int, int] | None = None  # the device and number of that folder
        self._note: Note = _nothing
        self._has_waited = False  # for a save before another one
        self._writing: list[_Writing] = []  # one at most
        self._ending: Ending | None = None

    def begin_run(self, folder: Path, note: Note) -> None:
        """Takes the folder of a run.

        Args:
            folder: Of the run.
            note: Prints a line. Called on rank 0 alone.
        """
        self._folder, self._place = folder, _place_of(folder)
        self._note = note if dist.get_rank() == 0 else _nothing

    @property
    def status(self) -> Status:
        """What the save of this rank does, for the message of metrics."""
        return self._writing[0].status if self._writing else Status.IDLE

    def end_if_done(self, status: float) -> None:
        """Ends a save if all ranks have.

        Args:
            status: The largest `status` of all ranks.
        """
        if status == Status.DONE:
            self._wait()

    def begin(self, number: int) -> None:
        """Begins to save the run after a step; see [Note: a save beside the steps].

        Sync: as `Staging.copy`. The caller calls `wait_copied` before the next optimizer.
        """
        assert self._folder is not None
        if self._writing and not self._has_waited:
            self._has_waited = True
            self._note(
                f"step {number}: the checkpoint before this one is still being written, and the "
                f"training waits for it: set train.save_every higher"
            )
        self._wait_bounded()
        folder, group = checkpoint_folder(self._folder, number), self._group
        state, error = self._collected(number)
        staged = self._staging.copy(state)

        def write() -> None:
            if self._device.type != "cpu":
                torch.accelerator.set_device_index(self._device.index)
            self._staging.finish()
            self._write(folder, staged, error, group)

        self._writing.append(_Writing(folder, number, write))

    def wait_copied(self) -> None:
        """Orders the current stream behind the copies of a save.

        Sync: the current stream waits; at once if there are none.
        """
        self._staging.wait()

    def finish(self, number: int) -> Path:
        """Writes the last checkpoint of a run; returns its folder.

        Raises:
            ConfigError: If a rank cannot write it; on all ranks.
        """
        assert self._folder is not None
        self._wait_bounded()
        folder = checkpoint_folder(self._folder, number)
        self.save(folder, number, "the last checkpoint of this run is lost: ")
        return folder

    def save(self, folder: Path, number: int, prefix: str = "") -> None:
        """Writes a checkpoint after a step, and returns when it is whole.

        Raises:
            ConfigError: If a rank cannot write it; on all ranks.
            PlanError: If the state of a handler on some rank could not be read again; on all ranks.
        """
        with _bounded(f"the checkpoint of step {number}"):
            state, error = self._collected(number)
            try:
                self._write(folder, state, error, self._group)
                return
            except CheckpointException as failure:
                cause, _ = failure.failures[min(failure.failures)]
                if isinstance(cause, PlanError):
                    raise cause from failure
                complaint = _complaint(folder, number, failure)
        self._config.refuse(
            "train.output",
            f"{prefix}{complaint}. Go on with train.resume from the last checkpoint that is whole",
        )

    def close(self) -> None:
        """Waits for a save, and ends its process group; every rank must call it."""
        self._wait()
        if self._ending is not None:
            self._ending.end()

    @cached_property
    def _group(self) -> dist.ProcessGroup:
        """The group of the threads. The first save makes it, on all ranks."""
        timeout = timedelta(seconds=_WRITE_SECONDS)
        group = dist.new_group(timeout=timeout, backend="gloo", group_desc="pipegrad checkpoint")
        # A thread that waits for a rank that is gone ends with the process; see
        # [Note: how threads end].
        groups = [cast("dist.ProcessGroup", group)]
        self._ending = Ending(self, threads=self._writing, groups=groups)
        return groups[0]

    def _collected(self, number: int) -> tuple[Mapping[str, Tensor], Exception | None]:
        """Returns what this rank writes, or why it cannot."""
        try:
            if self._folder is not None and _place_of(self._folder) != self._place:
                words = "the run's folder was removed or renamed while it ran"
                raise FileNotFoundError(errno.ENOENT, words, str(self._folder))
            return self._state.state_dict(number), None
        except Exception as error:  # noqa: BLE001 - all ranks get it in the save
            return {}, error

    def _write(
        self,
        folder: Path,
        state: Mapping[str, Tensor],
        error: Exception | None,
        group: dist.ProcessGroup,
    ) -> None:
        """Writes a checkpoint, then removes older ones of the run."""
        train, is_first = self._config.train, dist.get_rank() == 0
        try:
            writer = CheckpointWriter(folder, self._run, error)
            save(dict(state), storage_writer=writer, process_group=group)
        except BaseException:
            # Also the disk may be full, so what was written gives its space back. No rank writes
            # any more: torch raises when all ranks have replied.
            if is_first:
                run_files.remove(unfinished(folder))
            raise
        if is_first and folder.parent == self._folder:
            prune(folder.parent, keep_last=train.keep_last, keep_every=train.keep_every)

    def _wait_bounded(self) -> None:
        with _bounded("the checkpoint that is being written"):
            self._wait()

    def _wait(self) -> None:
        """Waits for a save that was begun, and says why it failed, if so."""
        if self._writing:
            [ended] = self._writing
            ended.join()
            self._writing.clear()
            if ended.error is not None:
                complaint = _complaint(ended.folder, ended.number, ended.error)
                self._note(f"{complaint}: the run goes on without this checkpoint")


class _Writing:
    """A thread that writes one checkpoint.

    Attributes:
        folder: Of the checkpoint.
        number: Of the step after which it is written.
        error: Why it failed; None if it has not.
    """

    def __init__(self, folder: Path, number: int, write: Callable[[], None]) -> None:
        self.folder, self.number, self._write = folder, number, write
        self.error: BaseException | None = None
        # Python does not wait for a daemon at exit, and the ending does.
        self._thread = threading.Thread(
            target=self._run, name="pipegrad checkpoint", daemon=True
        )  # fmt: skip
        self._thread.start()

    @property
    def status(self) -> Status:
        """What this thread does."""
        return Status.BUSY if self._thread.is_alive() else Status.DONE

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


class Staging:
    """CPU memory for the values of one checkpoint. The next one uses it again.

    Args:
        device: Of this rank's stages.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = CommStream("pipegrad checkpoint", device, threaded=False)
        self._memory: dict[str, Tensor] = {}
        self._ticket: Ticket | None = None
        self._is_ordered = True  # whether the current stream waits for the copies
        # What is copied stays alive until it is copied, whatever the optimizer drops.
        self._sources: Mapping[str, Tensor] = {}

    def copy(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns copies in CPU memory. Nobody may use the copies of the call before it any more.

        Sync: enqueues the copies behind the current stream, on a side stream. `wait` orders what
        overwrites the values; `finish` blocks the host until the copies are there.
        """
        staged = {key: self._copy_of(key, tensor) for key, tensor in state.items()}
        self._memory = {key: _local(tensor) for key, tensor in staged.items()}
        self._sources = dict(state)

        def copy_all() -> None:
            for key, tensor in self._sources.items():
                self._memory[key].copy_(_local(tensor), non_blocking=True)

        event = WRITTEN(self._device)
        self._ticket = self._stream.submit(copy_all, [] if event is None else [event])
        self._is_ordered = False
        return staged

    def wait(self) -> None:
        """Orders the current stream behind the copies.

        Sync: the current stream waits. The host does not.
        """
        if not self._is_ordered and self._ticket is not None:
            self._ticket.wait(_COPY_SECONDS)
        self._is_ordered = True

    def finish(self) -> None:
        """Blocks the calling thread until the copies are there."""
        if self._ticket is not None:
            event, _ = self._ticket.done.result()
            sync_points.finish_event(event)
        self._sources = {}

    def _copy_of(self, key: str, tensor: Tensor) -> Tensor:
        """Returns memory for a value; that of the checkpoint before it if it fits."""
        local, memory = _local(tensor), self._memory.get(key)
        if memory is None or (memory.shape, memory.dtype) != (local.shape, local.dtype):
            # A device copies beside the host only into memory that is pinned.
            is_pinned = local.device.type != "cpu"
            memory = torch.empty(local.shape, dtype=local.dtype, pin_memory=is_pinned)
        return tensor.with_local(memory) if isinstance(tensor, Chunk) else memory


def _local(tensor: Tensor) -> Tensor:
    """Returns the values that a rank has of a tensor."""
    return tensor.local if isinstance(tensor, Chunk) else tensor


def _place_of(folder: Path) -> tuple[int, int] | None:
    """Returns the device and number of a folder, which stay if it is renamed; None if gone."""
    try:
        found = folder.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _bounded(what: str) -> Bounded:
    return Bounded(what, within_seconds=_WRITE_SECONDS)


def _nothing(_: str) -> None:
    pass


def _complaint(folder: Path, number: int, error: BaseException) -> str:
    words = failure_message(error)
    return f"the checkpoint of step {number} cannot be written into {folder}: {words}"
