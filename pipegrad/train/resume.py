"""Resume: continues a run from a checkpoint, and says how this run differs from that one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipegrad import checkpoint
from pipegrad.comm.agreement import agree
from pipegrad.errors import CheckpointError
from pipegrad.train.config import Config, path_of
from pipegrad.train.optimizer import Update

KEY = "train.resume"


class Kept:
    """What a checkpoint keeps of the updates: an extra of `checkpoint.State`."""

    def __init__(self, update: Update) -> None:
        self._update, self._state = update, None

    def state_dict(self) -> Any:  # noqa: ANN401 - plain data
        return self._update.state_dict()

    def load_state_dict(self, state: Any) -> None:  # noqa: ANN401 - plain data
        self._state = state

    def restore(self, step: int) -> None:
        """Sets loss scale and learning rate after so many steps."""
        self._update.restore(self._state, step)


def resume(
    config: Config,
    state: checkpoint.State,
    kept: Kept,
    folder: Path,
    *,
    run: Mapping[str, str],
) -> tuple[int, list[str]]:
    """Loads a checkpoint; returns the number of its step, and notes. Every rank must call it.

    Args:
        config: The configuration.
        state: The state of this rank, which takes the values of the checkpoint.
        kept: Its extra state.
        folder: The checkpoint.
        run: Values of this run, as text.

    Raises:
        ConfigError: If the checkpoint is damaged, cannot be read, or is of another model; on all
            ranks.
    """

    def restore() -> None:
        try:
            kept.restore(resumed.step)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{folder} has another kind of state of 'update': {error!r}"
            ) from error

    try:
        resumed = checkpoint.resume(folder, state, options=False)
        agree("what all ranks have alike", restore)
    except CheckpointError as error:
        words = str(error).removeprefix(f"{folder} ")
        is_named = folder == path_of(config.train.resume or "")
        config.refuse(KEY, words if is_named else f"{folder}: {words}", cause=error)
    notes = [f"{KEY}: {note}" for note in (*_differences(resumed.run, run), *resumed.notes)]
    return resumed.step, notes


def _differences(saved: Mapping[str, str], run: Mapping[str, str]) -> list[str]:
    """Returns a note on differences between this run and the one that wrote a checkpoint."""
    changed = [
        f"{key} was {saved.get(key, '(default)')}, and is {run.get(key, '(default)')}"
        for key in sorted(saved.keys() | run.keys())
        # A checkpoint of an older version lacks keys that are new. They had no value then.
        if saved.get(key, "None") != run.get(key, "None")
    ]
    words = "this is not the run that wrote the checkpoint: "
    return [words + "; ".join(changed)] if changed else []
