"""The loss of a step, which is sent to all ranks while the next step runs.

[Note: message of a loss] Each rank adds five float64 numbers to one all-reduce. They are sums:

    0  the loss, divided by the number of pipelines
    1  how many ranks have failed in this step
    2  how many ranks have a divisor; 3 the sum of these divisors; 4 the sum of their squares

If all divisors are equal, the mean of the squares is the square of the mean. So any number of ranks
is compared with one message, and a failure is noticed by ranks that ended the step before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from pipegrad.comm.ending import Ending
from pipegrad.comm.process_groups import is_local, new_group
from pipegrad.errors import StepError
from pipegrad.topology import Topology

Tensor = torch.Tensor
Outputs = tuple[Any, ...]  # tensors, or tuples of them

_DIVISOR_ERROR = 1e-6  # far above what sums of float64 over any number of ranks round


class StepResult:
    """The loss of a step, and the outputs of an evaluation.

    Attributes:
        outputs: Of `Scheduler.evaluate`, on ranks with the last stage: each of its outputs, all
            microbatches in one tensor, or in a tuple if they differ beyond the first dimension.
            Elsewhere empty.

    Made by `Losses.send`. If the step failed on another rank after it had ended here,
    ``on_failure`` drops what it left on this rank, and returns the words of that rank.
    """

    def __init__(
        self,
        message: Tensor,
        work: dist.Work | None,
        outputs: Outputs = (),
        on_failure: Callable[[], str] = str,
    ) -> None:
        self.outputs = outputs
        self._on_failure = on_failure
        self._message = message
        self._work = work
        self._read: list[float] | None = None

    def __repr__(self) -> str:
        arrived = self._work is None or (self._message.is_cpu and self._work.is_completed())
        loss = "is on its way"
        if self._read is not None or (arrived and self._message.is_cpu):
            try:
                loss = f"{self.loss:g}"
            except StepError:
                loss = "of a step that failed"
        shapes = [
            tuple(out.shape) if isinstance(out, Tensor) else [tuple(part.shape) for part in out]
            for out in self.outputs
        ]
        return f"StepResult(loss {loss}, outputs {shapes})"

    @property
    def loss(self) -> Tensor:
        """The loss, a float32 scalar: mean over microbatches and data ranks, on every rank.

        Sync: waits for it, the first time.

        Raises:
            StepError: If a rank failed in this step, after this one had ended it: gradients are
                None then, unless another step has begun. Or if ranks gave different
                ``loss_divisor``.
        """
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self._read is None:
            self._read = self._message.tolist()
        _, failed, number, total, squares = self._read
        if failed:
            why = self._on_failure()
            raise StepError(f"the step failed on another rank after this one had ended it{why}")
        mean = total / number
        if abs(squares / number - mean**2) > (_DIVISOR_ERROR * mean) ** 2:
            raise StepError(
                f"loss_divisor differs between the {number:g} ranks that compute a loss or gave "
                f"one: the mean of theirs is {mean:g}. The gradients are wrong. Give the same one "
                f"on all ranks of a last stage"
            )
        return self._message[0].float()


class Losses:
    """Sends the losses of a Scheduler, on a communicator of their own.

    Args:
        topology: Over all ranks; all of them make it together, and send as often.
        device: Where losses are.
    """

    def __init__(self, topology: Topology, device: torch.device) -> None:
        ranks = sorted(topology.ranks)
        # Each pipeline has a last stage, and the loss is the mean of theirs. Pipelines that are
        # replicas have different data; others have the same data and the same loss.
        self._num_copies = len(topology.pipelines)
        self._device = device
        self._group: dist.ProcessGroup | None = None
        self._leaving: deque[dist.Work] = deque()
        if len(ranks) > 1:
            self._group = new_group(ranks, "pipegrad loss", device)
        self._ending = Ending(
            self,
            groups=[self._group] if self._group else [],
            is_local=is_local(device),
            is_idle=partial(_have_ended, self._leaving),
        )

    def send(
        self,
        loss: Tensor,
        divisor: float | None,
        outputs: Outputs = (),
        *,
        failed: bool = False,
        on_failure: Callable[[], str] = str,
    ) -> StepResult:
        """Adds this rank's part of the loss to that of the others; returns at once.

        Args:
            loss: Of the last stage, if it is on this rank; zero elsewhere.
            divisor: What the loss was divided by; None if this rank has no divisor to compare.
            outputs: For the result.
            failed: Whether the step failed on this rank.
            on_failure: As that of `StepResult`.
        """
        terms = [0.0] * 3 if divisor is None else [1.0, divisor, divisor**2]
        # See [Note: message of a loss].
        numbers = [0.0, float(failed), *terms]
        message = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        message[0] = loss / self._num_copies  # stays on its device: the host waits for nothing
        work = None
        if self._group is not None:
            work = dist.all_reduce(message, group=self._group, async_op=True)
            # A result may be thrown away unread. Its work must live until it has ended.
            _have_ended(self._leaving)
            self._leaving.append(work)
        return StepResult(message, work, outputs, on_failure)

    def close(self) -> None:
        """Destroys the communicator; every rank must call it."""
        self._ending.end()
        self._group = None


def _have_ended(leaving: deque[dist.Work]) -> bool:
    """Returns whether all works have ended; removes those at the front that have."""
    while leaving and leaving[0].is_completed():
        leaving.popleft()
    return not leaving
