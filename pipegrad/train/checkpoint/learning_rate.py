"""Learning rate: the state of the learning-rate schedules in a checkpoint.

It is what all ranks have alike. A gradient scaler of the trainer would be an entry here, too.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from pipegrad.train.checkpoint.packed import pack, unpack_entry
from pipegrad.train.config import Config

KEY = "learning_rate"


class LearningRateState:
    """The state of the schedules, and what they set in the optimizer.

    Args:
        config: The configuration.
        optimizer: The optimizer of this rank.
        schedule: All schedules as one; None if there are none.
    """

    def __init__(
        self, config: Config, optimizer: torch.optim.Optimizer, schedule: LRScheduler | None
    ) -> None:
        self._configured = repr(config.optimizer)
        self._optimizer, self._schedule = optimizer, schedule

    def packed(self) -> Mapping[str, Tensor]:
        """Returns the state by its key; empty if there is none, or if it could not be read."""
        if self._schedule is None:
            return {}
        groups = [
            {name: value for name, value in group.items() if name != "params"}
            for group in self._optimizer.param_groups
        ]
        state = {
            "configured": self._configured,
            "schedule": self._schedule.state_dict(),
            "groups": groups,
        }
        try:
            return {KEY: pack(state)}
        except Exception:  # noqa: BLE001 - a schedule may keep any object; `restore` does without
            return {}

    def restore(self, read: Tensor | None, num_steps: int) -> None:
        """Sets the state after so many steps.

        Args:
            read: The state in the checkpoint; None if it has none.
            num_steps: How many steps the checkpoint has made.

        Raises:
            DamageError: If it cannot be read.
        """
        if self._schedule is None:
            return
        state: dict[str, Any] = {} if read is None else unpack_entry(KEY, read)
        if state.get("configured") == self._configured:
            self._schedule.load_state_dict(state["schedule"])
            for group, saved in zip(self._optimizer.param_groups, state["groups"], strict=True):
                group.update(saved)
            return
        # A run with other schedules has other states. They make the steps that have been made.
        with warnings.catch_warnings():
            # torch warns, because the optimizer makes no step between these.
            warnings.simplefilter("ignore")
            for _ in range(num_steps):
                self._schedule.step()
