"""Feedback: the errors of encoded gradients, which are added to the next ones.

[Note: errors of a step] If a step fails, its gradients are dropped on all ranks. Then its errors
must be dropped, too, and the errors of the step before must stay. So the errors of a step are
pending until the next step begins. A rank may have ended a step that fails on another rank
later, or whose replicas divided by different numbers. The message of the loss says that on all
ranks alike, so it decides. That a rank reads it there costs little: a step cannot begin on the last
rank before it has ended on the first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from pipegrad.errors import PlanError


class Position(NamedTuple):
    """Where an error belongs: a gradient of the same microbatch of the next step.

    Attributes:
        link: The value whose gradient it is. A rank sends one gradient of a value.
        microbatch: Of the step.
    """

    link: int
    microbatch: int


class Feedback:
    """The errors of all gradients that this rank has encoded, each as large as its gradient.

    See [Note: errors of a step].
    """

    def __init__(self) -> None:
        self._errors: dict[Position, Tensor] = {}
        self._pending: dict[Position, Tensor] = {}  # of the last step
        self._has_failed: Callable[[], bool] | None = None  # None: it has not ended on this rank

    def settle(self) -> None:
        """Takes the errors of the last step, or drops them if it failed; called between steps.

        If there are any, the host waits for the message of the loss.
        """
        pending, has_failed = self._pending, self._has_failed
        self._pending, self._has_failed = {}, None
        if pending and has_failed is not None and not has_failed():
            self._errors |= pending

    def end(self, has_failed: Callable[[], bool]) -> None:
        """Notes that a step has ended on this rank.

        Args:
            has_failed: Returns whether its gradients are wrong; it may wait for other ranks.
        """
        self._has_failed = has_failed if self._pending else None

    def drop_pending(self) -> None:
        """Drops the errors of the last step, which has failed on all ranks."""
        self._pending, self._has_failed = {}, None

    def total(self, position: Position, gradient: Tensor) -> Tensor:
        """Returns a gradient and the error of the one before it; the gradient if there is none."""
        error = self._errors.get(position)
        # An error of another shape belongs to another batch.
        if error is None or (error.shape, error.dtype) != (gradient.shape, gradient.dtype):
            return gradient
        return gradient + error.to(gradient.device)

    def note(self, position: Position, total: Tensor, decoded: Tensor) -> None:
        """Keeps the error of a gradient, if its step ends well; `decoded` is overwritten.

        nan and inf must not stay: a step that overflowed would spoil all that follow.
        """
        error = decoded.neg_().add_(total)
        self._pending[position] = error.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def clear(self) -> None:
        """Forgets all errors."""
        self._errors.clear()
        self._pending.clear()
        self._has_failed = None

    def state_dict(self) -> dict[str, Any]:
        """Returns copies of all errors, on the host, by position; empty if there are none.

        They are those of steps that ended well: see `settle`.
        """
        self.settle()
        return {
            f"{link} of {microbatch}": error.detach().to("cpu", copy=True)
            for (link, microbatch), error in self._errors.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the errors of a `state_dict`, in place of its own.

        Raises:
            PlanError: If it is something else. Then there are no errors.
        """
        self.clear()
        loaded = dict[Position, Tensor]()
        for key, error in state.items():
            found = re.fullmatch(r"(\d+) of (\d+)", str(key))
            if found is None or not isinstance(error, Tensor):
                raise PlanError(
                    f"{key!r} is no error of a codec, but {type(error).__name__}: expected what "
                    f"state_dict() returns"
                )
            loaded[Position(*map(int, found.groups()))] = error.clone()
        self._errors = loaded
