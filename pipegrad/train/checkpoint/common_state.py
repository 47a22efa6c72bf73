"""Common state: what all ranks have alike, in one entry of a checkpoint.

It is the state of the learning-rate schedules, of the loss scale, and of steps that were skipped.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from pipegrad.train.checkpoint.checksums import DamageError
from pipegrad.train.checkpoint.packed import pack, unpack_entry
from pipegrad.train.config import Config
from pipegrad.train.run.update import Update

KEY = "common"


class CommonState:
    """The state of the schedules and of updates.

    Args:
        config: The configuration.
        optimizer: The optimizer of this rank. Schedules set options in it.
        schedule: All learning-rate schedules as one; None if there are none.
        update: Has the loss scale, and counts the steps that were skipped.
    """

    def __init__(
        self,
        config: Config,
        optimizer: torch.optim.Optimizer,
        schedule: LRScheduler | None,
        update: Update,
    ) -> None:
        self._configured = repr(config.optimizer)
        self._optimizer, self._schedule, self._update = optimizer, schedule, update

    def packed(self) -> Tensor:
        """Returns the state as bytes."""
        state = {"update": self._update.state_dict()}
        if self._schedule is None:
            return pack(state)
        schedule = {
            "configured": self._configured,
            "schedule": self._schedule.state_dict(),
            "groups": [
                {name: value for name, value in group.items() if name != "params"}
                for group in self._optimizer.param_groups
            ],
        }
        try:
            return pack({**state, "learning_rate": schedule})
        except Exception:  # noqa: BLE001 - a schedule may keep any object; `restore` does without
            return pack(state)

    def restore(self, read: Tensor | None, num_steps: int) -> None:
        """Sets the state after so many steps.

        Args:
            read: The state in the checkpoint; None if it has none.
            num_steps: How many steps the checkpoint has made.

        Raises:
            DamageError: If it cannot be read.
        """
        state: dict[str, Any] = {} if read is None else unpack_entry(KEY, read)
        try:
            if "update" in state:
                self._update.load_state_dict(state["update"])
            if self._schedule is not None:
                self._restore(self._schedule, state.get("learning_rate", {}), num_steps)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise DamageError(f"its {KEY!r} is of another version: {error!r}") from error

    def _restore(self, schedule: LRScheduler, saved: dict[str, Any], num_steps: int) -> None:
        if saved.get("configured") == self._configured:
            schedule.load_state_dict(saved["schedule"])
            for group, options in zip(self._optimizer.param_groups, saved["groups"], strict=True):
                group.update(options)
            return
        # A run with other schedules has other states. They make the steps that have been made; a
        # skipped step was none for them.
        with warnings.catch_warnings():
            # torch warns, because the optimizer makes no step between these.
            warnings.simplefilter("ignore")
            for _ in range(num_steps - self._update.skipped):
                schedule.step()
