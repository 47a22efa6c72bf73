"""Update: what a step does with its gradients: clip, then step the optimizer, skip, or refuse."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from pipegrad.errors import StepError
from pipegrad.gradients.grad_scaler import GradScaler
from pipegrad.gradients.norm import NonFinite, in_a_sentence
from pipegrad.gradients.sync import GradientSync
from pipegrad.train.config import Config

MOST_SKIPPED = 100  # steps in a row: a run that only skips ends in nothing


@dataclass(frozen=True)
class Updated:
    """What an update was, the same on all ranks.

    Attributes:
        grad_norm: Of all gradients before clipping.
        learning_rate: The largest of all parameter groups.
        note: Why the step was skipped; None if it was not, or if many before it were.
    """

    grad_norm: float
    learning_rate: float
    note: str | None = None


class Update:
    """Updates the parameters at the end of each step. Every rank must call it.

    Args:
        config: The configuration.
        sync: The gradient layer.
        optimizer: Made by ``sync.optimizer``.
        learning_rate: Its schedule; None for a constant one.
        scaler: Of the loss, with ``train.precision = "fp16"``. It skips steps by itself.

    Attributes:
        skipped: Steps of this run that changed nothing, because gradients were not finite.
    """

    def __init__(
        self,
        config: Config,
        sync: GradientSync,
        optimizer: torch.optim.Optimizer,
        learning_rate: LRScheduler | None,
        scaler: GradScaler | None = None,
    ) -> None:
        clip = config.gradients.clip_norm
        self.skipped = 0
        self._most_norm = math.inf if clip is None else clip
        self._skips = config.gradients.non_finite == "skip" or scaler is not None
        self._sync = sync
        self._optimizer = optimizer
        self._learning_rate = learning_rate
        self._scaler = scaler
        self._in_a_row = 0

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps. All ranks have the same."""
        scaler = {} if self._scaler is None else self._scaler.state_dict()
        return {"skipped": self.skipped, "in_a_row": self._in_a_row, "scaler": scaler}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets what a checkpoint has kept; a run without a loss scale leaves that out."""
        self.skipped, self._in_a_row = state["skipped"], state["in_a_row"]
        if self._scaler is not None and state["scaler"]:
            self._scaler.load_state_dict(state["scaler"])

    def make(self, number: int) -> Updated:
        """Updates the parameters with the gradients of a step, or skips that on all ranks.

        Args:
            number: Of the step.

        Raises:
            StepError: If the gradients are not finite and are not to be skipped, or if too many
                steps in a row were. On all ranks, and parameters are unchanged.
        """
        norm = self._sync.clip_grad_norm_(self._most_norm).item()
        learning_rate = max(float(group["lr"]) for group in self._optimizer.param_groups)
        note = None
        if math.isfinite(norm):
            self._in_a_row = 0
            self._step()
        else:
            note = self._skip(number, norm)
        return Updated(norm, learning_rate, note)

    def _step(self) -> None:
        # Parameters are sent as soon as they are stepped. They arrive during the next forwards.
        if self._scaler is None:
            self._optimizer.step()
        else:
            self._scaler.step(self._optimizer)
            self._scaler.update()
        self._optimizer.zero_grad()
        if self._learning_rate is not None:
            self._learning_rate.step()

    def _skip(self, number: int, norm: float) -> str | None:
        """Drops the gradients; returns a line about it, or None if there were many before."""
        # The norm has the same bits on all ranks. So all ranks come here, or none.
        found = self._sync.non_finite()
        if not self._skips:
            raise _refusal(number, norm, found)
        self.skipped += 1
        self._in_a_row += 1
        if self._in_a_row >= MOST_SKIPPED:
            raise _refusal(number, norm, found, in_a_row=self._in_a_row)
        lowered = ""
        if self._scaler is not None:
            self._scaler.step(self._optimizer)  # it finds the overflow, and steps nothing
            self._scaler.update()
            lowered = f", and the loss scale is {self._scaler.get_scale():g} now"
        self._sync.drop_gradients()
        if self._in_a_row & (self._in_a_row - 1):  # a line for the 1st, 2nd, 4th, 8th ... in a row
            return None
        row = f", {self._in_a_row} in a row" if self._in_a_row > 1 else ""
        return f"skipped{row}: {in_a_sentence(found)}{lowered}"


def _refusal(
    number: int, norm: float, found: tuple[NonFinite, ...], *, in_a_row: int = 0
) -> StepError:
    skipped = f" after {in_a_row - 1} steps that were skipped for that" if in_a_row else ""
    return StepError(
        f"step {number}: the norm of the gradients is {norm}{skipped}: {in_a_sentence(found)}. "
        f"This update would destroy the parameters: lower optimizer.lr, set gradients.clip_norm, "
        f"warm up, look at what the handlers send, or leave out single steps by "
        f"gradients.non_finite = 'skip'"
    )
