"""Saving: when a checkpoint is written, and how the training goes on meanwhile.

[Note: a save beside the steps] All ranks call `Saver.save` after the same step. Each copies its
values to CPU memory, and a thread writes the copies while the training goes on. The threads
coordinate over a group of their own, so their messages never meet the collectives of the training.
A rank that cannot even collect its state brings the error into the save. So ranks never wait for
each other outside of the save.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist

from pipegrad import run_files
from pipegrad.checkpoint.files import Part
from pipegrad.checkpoint.folders import prune
from pipegrad.checkpoint.state import State
from pipegrad.checkpoint.writing import write_checkpoint
from pipegrad.comm import sync_points
from pipegrad.comm.comm_stream import CommStream, Ticket
from pipegrad.comm.ending import Ending
from pipegrad.comm.watch import Bounded
from pipegrad.errors import CheckpointError

_WRITE_SECONDS = 1800.0  # timeout for the slowest rank to write its part


class Saver:
    """Writes checkpoints, one at a time. All ranks make it, and call it, together.

    For example, ``Saver(state, "runs/first", keep_last=2).save(step)`` after every 100th step.

    Args:
        state: Of this rank.
        folder: Of the run, made if it is not there: `save` writes ``checkpoint-N`` into it.
        keep_last: Number of the newest checkpoints that are kept; all by default.
        keep_every: Steps between older checkpoints that are kept, too; else none.
        run: Values that describe the run, by name, as text. `resume` returns them.
        note: Called on rank 0 with a line of text, if the training waits for a save, or goes on
            without a checkpoint that failed; a warning by default.
    """

    def __init__(
        self,
        state: State,
        folder: str | Path | None = None,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        run: Mapping[str, str] | None = None,
        note: Callable[[str], object] = warnings.warn,
    ) -> None:
        self.state, self.folder, self.note = state, folder, note
        self._keep_last, self._keep_every, self._run = keep_last, keep_every, dict(run or {})
        if folder is not None:
            run_files.make_folder(Path(folder))
        self._pending: tuple[Path, Ticket] | None = None
        self._failure: BaseException | None = None

    def save(self, step: int, *, wait: bool = False) -> Path:
        """Saves the state after a number of steps; returns the folder of the checkpoint.

        It returns when the values are copied, and a thread writes them. With `wait` nothing is
        copied, and the checkpoint is whole when it returns. It waits for the save before it.

        Sync: blocks the host until values are copied. Every rank must call it, between two steps.

        Raises:
            CheckpointError: With `wait`, if a rank cannot write it; on all ranks.
        """
        folder = Path(self.folder or ".") / f"checkpoint-{step}"
        if wait:
            self.wait()
            self._write_bounded(folder, step, self._of_run)
            return folder
        if self.is_writing:
            self._say(
                f"step {step}: the checkpoint before this one is still being written, and the "
                f"training waits for it: save less often"
            )
        self.wait()
        error: Exception | None = None
        copies: dict[str, Part] = {}
        try:
            for key, part in self._of_run().items():
                values = part.values.to("cpu", non_blocking=True, copy=True)
                copies[key] = part._replace(values=values)
        except Exception as caught:  # noqa: BLE001 - all ranks get it in the save
            error = caught
        sync_points.finish_device(self.state.sync.device)

        def collected() -> Mapping[str, Part]:
            if error is not None:
                raise error
            return copies

        def run() -> None:
            try:
                self._write(folder, step, collected)
            except BaseException as failure:  # noqa: BLE001 - `wait` says it
                self._failure = failure

        self._pending = folder, self._background[0].submit(run, [])
        return folder

    def write(self, folder: str | Path, step: int) -> None:
        """Writes a checkpoint into a folder of any name, and returns when it is whole.

        Raises:
            CheckpointError: If a rank cannot write it; on all ranks.
        """
        self.wait()
        self._write_bounded(Path(folder), step, self.state.parts)

    @property
    def is_writing(self) -> bool:
        """Whether a save that was begun has not ended."""
        return self._pending is not None and not self._pending[1].done.done()

    def wait(self) -> None:
        """Waits for a save that was begun. `note` says why it failed, if so."""
        if self._pending is None:
            return
        (folder, ticket), self._pending = self._pending, None
        with Bounded(f"the checkpoint {folder}", within_seconds=_WRITE_SECONDS):
            ticket.wait(_WRITE_SECONDS)
        if self._failure is not None:
            self._say(f"{self._failure}: the run goes on without this checkpoint")
        self._failure = None

    def close(self) -> None:
        """Waits for a save, and ends its thread and process group; every rank must call it."""
        self.wait()
        if "_background" in self.__dict__:
            self._background[2].end()

    @cached_property
    def _background(self) -> tuple[CommStream, dist.ProcessGroup, Ending]:
        """A thread, the group of the ranks' threads, and their end. The first save makes them."""
        timeout = timedelta(seconds=_WRITE_SECONDS)
        made = dist.new_group(timeout=timeout, backend="gloo", group_desc="pipegrad checkpoint")
        group = cast("dist.ProcessGroup", made)
        thread = CommStream("pipegrad checkpoint", torch.device("cpu"), threaded=True)
        # A thread that waits for a rank that is gone ends with the process; see
        # [Note: how threads end].
        return thread, group, Ending(self, threads=[thread], groups=[group])

    def _of_run(self) -> Mapping[str, Part]:
        if not Path(self.folder or ".").is_dir():
            raise CheckpointError("the run's folder was removed or renamed while it ran")
        return self.state.parts()

    def _write_bounded(
        self, folder: Path, step: int, collect: Callable[[], Mapping[str, Part]]
    ) -> None:
        with Bounded(f"the checkpoint of step {step}", within_seconds=_WRITE_SECONDS):
            self._write(folder, step, collect)

    def _write(self, folder: Path, step: int, collect: Callable[[], Mapping[str, Part]]) -> None:
        head = {"step": step, "layout": self.state.layout, "tied": self.state.tied}
        try:
            write_checkpoint(folder, collect, {**head, "run": self._run}, self._background[1])
        except CheckpointError as error:
            complaint = f"the checkpoint of step {step} cannot be written into {folder}: {error}"
            raise CheckpointError(complaint) from error
        if dist.get_rank() == 0 and self.folder and folder.parent == Path(self.folder):
            prune(folder.parent, keep_last=self._keep_last, keep_every=self._keep_every)

    def _say(self, text: str) -> None:
        if dist.get_rank() == 0:
            self.note(text)
