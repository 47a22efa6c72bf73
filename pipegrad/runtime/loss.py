"""The loss of a step, on its way to all ranks beside whatever comes next."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist

from pipegrad.errors import StepError
from pipegrad.topology import Topology

Tensor = torch.Tensor


class StepResult:
    """What a step found.

    Attributes:
        outputs: Of `Scheduler.evaluate`, on ranks with the last stage: each of its outputs, whole
            again. Elsewhere empty.
    """

    def __init__(
        self,
        told: Tensor,
        work: dist.Work | None,
        outputs: tuple[Tensor, ...],
        divisors: float,
    ) -> None:
        self.outputs = outputs
        self.on_failure: Callable[[], str] = str  # lets go of the step; says why, if it can
        self._told = told
        self._work = work
        self._divisors = divisors

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
        _, failed, divisors = self._told.tolist()
        if failed:
            why = self.on_failure()
            raise StepError(f"the step failed on another rank after this one had ended it{why}")
        if not math.isclose(divisors, self._divisors, rel_tol=1e-5):
            raise StepError(
                f"loss_divisor differs between ranks: {self._divisors:g} in all if all were as "
                f"this one's, found {divisors:g}; gradients are wrong"
            )
        return self._told[0]


class Losses:
    """Sends the losses of a Scheduler, on a communicator of their own.

    Args:
        topology: Over all ranks; all of them make it together, and send as often.
        device: Where losses are.
    """

    def __init__(self, topology: Topology, device: torch.device) -> None:
        ranks = sorted(topology.ranks)
        self._num_ranks = len(ranks)
        # Of the last stages: replicas' losses are of different data, others' of the same.
        self._num_copies = len(topology.pipelines)
        self._device = device
        self._group: dist.ProcessGroup | None = None
        if len(ranks) > 1:
            self._group = dist.new_group(ranks, group_desc="pipegrad loss")

    def send(
        self,
        loss: Tensor,
        divisor: float,
        outputs: tuple[Tensor, ...] = (),
        *,
        failed: bool = False,
    ) -> StepResult:
        """Adds this rank's part of the loss to that of the others; returns at once.

        Args:
            loss: Of this rank's last stage; zero elsewhere.
            divisor: What it was divided by, for comparison.
            outputs: For the result.
            failed: Whether the step failed on this rank.
        """
        told = torch.tensor([0.0, float(failed), divisor], device=self._device)
        told[0] = loss / self._num_copies
        work = None
        if self._group is not None:
            work = dist.all_reduce(told, group=self._group, async_op=True)
        return StepResult(told, work, outputs, divisor * self._num_ranks)

    def close(self) -> None:
        """Destroys the communicator; every rank must call it."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
