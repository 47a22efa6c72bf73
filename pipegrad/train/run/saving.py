"""Saving: when a run saves, where, and what happens if it cannot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from pipegrad.comm.agreement import agree
from pipegrad.comm.watch import Bounded
from pipegrad.train.checkpoint.checkpoint import TrainingState
from pipegrad.train.checkpoint.folders import checkpoint_folder, checkpoints, prune, step_of
from pipegrad.train.checkpoint.writer.kept import num_new
from pipegrad.train.checkpoint.writer.saver import WRITE_SECONDS, Saver, Status
from pipegrad.train.checkpoint.writer.space import shortage, size_of
from pipegrad.train.config import Config

Note = Callable[[str], object]


class Saving:
    """The checkpoints of a run. All ranks make it, and call it, together.

    Args:
        config: The configuration.
        state: Of this rank.
        device: Of this rank's stages.
        run: Values of the run, as text; see `CheckedWriter`.
        state_numel: Elements that the optimizer keeps for each element of a parameter.
    """

    def __init__(
        self,
        config: Config,
        state: TrainingState,
        device: torch.device,
        run: Mapping[str, str],
        *,
        state_numel: int,
    ) -> None:
        self._config, self._state, self._device, self._run = config, state, device, run
        self._state_numel = state_numel
        self._saver: Saver | None = None
        self._folder: Path | None = None
        self._note: Note = _nothing
        self._has_waited = False  # for a save before another one
        self._nbytes = 0  # of a checkpoint, about; on rank 0

    def begin_run(self, folder: Path, first_step: int, note: Note) -> None:
        """Takes the folder of a run, and warns if its checkpoints will not fit.

        Args:
            folder: Of the run.
            first_step: Number of its first step.
            note: Prints a line. Called on rank 0 alone.
        """
        self._folder = folder
        if not self._config.train.save:
            return
        self._note = note if dist.get_rank() == 0 else _nothing
        sizes = agree("the bytes of a checkpoint", self._state.nbytes)
        every: dict[str, tuple[int, int]] = {}
        for of_rank in sizes:
            for key, both in of_rank.items():
                every[key] = max(every.get(key, both), both)
        self._nbytes = sum(own + kept * self._state_numel for own, kept in every.values())
        present = [step for step in map(step_of, checkpoints(folder)) if step is not None]
        self._warn(num_new(self._config, first_step, present))

    @property
    def status(self) -> Status:
        """What the save of this rank does, for the message of metrics."""
        return Status.IDLE if self._saver is None else self._saver.status

    def settle(self, status: float) -> None:
        """Ends a save if all ranks have.

        Args:
            status: The largest `status` of all ranks.
        """
        if self._saver is not None:
            self._say(self._saver.settle(Status(int(status))))

    def begin(self, number: int) -> None:
        """Begins to save the run after a step; see [Note: a save beside the steps].

        Sync: the caller calls `wait_copied` before the next optimizer.
        """
        assert self._folder is not None
        saver = self._made()
        if saver.is_busy:
            self._warn_once(
                f"step {number}: the checkpoint before this one is still being written, and the "
                f"training waits for it: set train.save_every higher"
            )
            self._say(self._waited())
        self._warn()
        saver.begin(
            checkpoint_folder(self._folder, number), number, partial(self._state.state_dict, number)
        )

    def wait_copied(self) -> None:
        """Orders the current stream behind the copies of a save.

        Sync: the current stream waits; at once if there are none.
        """
        if self._saver is not None:
            self._saver.wait_copied()

    def finish(self, number: int) -> Path:
        """Writes the last checkpoint of a run; returns its folder.

        Raises:
            ConfigError: If a rank cannot write it; on all ranks.
        """
        assert self._folder is not None
        self._say(self._waited())
        self._warn()
        folder = checkpoint_folder(self._folder, number)
        self.save(folder, number, "the last checkpoint of this run is lost: ")
        return folder

    def save(self, folder: Path, number: int, prefix: str = "") -> None:
        """Writes a checkpoint after a step, and returns when it is whole.

        Raises:
            ConfigError: If a rank cannot write it; on all ranks.
        """
        collect = partial(self._state.state_dict, number)
        with _bounded(f"the checkpoint of step {number}"):
            complaint = self._made().save(folder, number, collect)
        if complaint:
            self._config.refuse(
                "train.output",
                f"{prefix}{complaint}. Go on with train.resume from the last checkpoint that is "
                f"whole",
            )

    def close(self) -> None:
        """Waits for a save, and ends its process group; every rank must call it."""
        if self._saver is not None:
            self._say(self._saver.wait())
            self._saver.close()

    def _waited(self) -> str:
        """Waits for a save that was begun; returns why it failed, or ""."""
        with _bounded("the checkpoint that is being written"):
            return self._made().wait()

    def _made(self) -> Saver:
        """Returns the saver. The first save makes it, on all ranks."""
        if self._saver is None:
            self._saver = Saver(self._device, self._run, self._written)
        return self._saver

    def _written(self, folder: Path) -> None:
        """Removes older checkpoints of the run; on rank 0, when a new one is whole."""
        train = self._config.train
        if folder.parent == self._folder:
            prune(folder.parent, keep_last=train.keep_last, keep_every=train.keep_every)

    def _warn_once(self, line: str) -> None:
        if not self._has_waited:
            self._note(line)
        self._has_waited = True

    def _say(self, complaint: str) -> None:
        if complaint:
            self._note(f"{complaint}: the run goes on without this checkpoint")

    def _warn(self, number: int = 1) -> None:
        if self._folder is None or self._note is _nothing:
            return
        newest = checkpoints(self._folder)[:1]
        nbytes = size_of(newest[0]) if newest else self._nbytes
        if warning := shortage(self._folder, nbytes, number):
            self._note(warning)


def _bounded(what: str) -> Bounded:
    return Bounded(what, within_seconds=WRITE_SECONDS)


def _nothing(_: str) -> None:
    pass
