"""The loss of a step, on its way to all ranks beside whatever comes next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from pipegrad.comm.ending import Ending
from pipegrad.comm.process_groups import is_local, new_group
from pipegrad.errors import StepError
from pipegrad.topology import Topology

Tensor = torch.Tensor

_DIVISOR_ERROR = 1e-6  # far above what sums of float64 over any number of ranks round


class StepResult:
    """What a step found.

    Attributes:
        outputs: Of `Scheduler.evaluate`, on ranks with the last stage: each of its outputs, whole
            again. Elsewhere empty.

    Made by `Losses.send`, of which ``on_failure`` lets go of a step that failed on another rank
    after it had ended here, and returns that rank's words.
    """

    def __init__(
        self,
        told: Tensor,
        work: dist.Work | None,
        outputs: tuple[Tensor, ...] = (),
        on_failure: Callable[[], str] = str,
    ) -> None:
        self.outputs = outputs
        self._on_failure = on_failure
        self._told = told
        self._work = work
        self._read: list[float] | None = None

    def __repr__(self) -> str:
        arrived = self._work is None or (self._told.is_cpu and self._work.is_completed())
        loss = "is on its way"
        if self._read is not None or (arrived and self._told.is_cpu):
            try:
                loss = f"{self.loss:g}"
            except StepError:
                loss = "of a step that failed"
        return f"StepResult(loss {loss}, outputs {[tuple(out.shape) for out in self.outputs]})"

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
            self._read = self._told.tolist()
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
        return self._told[0].float()


class Losses:
    """Sends the losses of a Scheduler, on a communicator of their own.

    Args:
        topology: Over all ranks; all of them make it together, and send as often.
        device: Where losses are.
    """

    def __init__(self, topology: Topology, device: torch.device) -> None:
        ranks = sorted(topology.ranks)
        # Of the last stages: replicas' losses are of different data, others' of the same.
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
        outputs: tuple[Tensor, ...] = (),
        *,
        failed: bool = False,
        on_failure: Callable[[], str] = str,
    ) -> StepResult:
        """Adds this rank's part of the loss to that of the others; returns at once.

        Args:
            loss: Of this rank's last stage; zero elsewhere.
            divisor: What it was divided by, for comparison; None if this rank has no say in it.
            outputs: For the result.
            failed: Whether the step failed on this rank.
            on_failure: As that of `StepResult`.
        """
        given = [0.0] * 3 if divisor is None else [1.0, divisor, divisor**2]
        told = torch.tensor([0.0, float(failed), *given], dtype=torch.float64, device=self._device)
        told[0] = loss / self._num_copies
        work = None
        if self._group is not None:
            work = dist.all_reduce(told, group=self._group, async_op=True)
            _have_ended(self._leaving)
            self._leaving.append(work)
        return StepResult(told, work, outputs, on_failure)

    def close(self) -> None:
        """Destroys the communicator; every rank must call it."""
        self._ending.end()
        self._group = None


def _have_ended(leaving: deque[dist.Work]) -> bool:
    """Whether all of them have; lets go of the first that have."""
    while leaving and leaving[0].is_completed():
        leaving.popleft()
    return not leaving
