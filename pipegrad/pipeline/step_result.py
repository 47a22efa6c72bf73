"""StepResult: the loss, the metrics and the outputs of a step, as every rank reads them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn, SupportsIndex

from torch import Tensor

from pipegrad.comm.activity import Tape
from pipegrad.comm.collectives import summed
from pipegrad.comm.sync_points import Started
from pipegrad.errors import StepError, following
from pipegrad.pipeline.activation_checkpoint import DIFFERENT

Outputs = tuple[Any, ...]  # of tensors, and of tuples of tensors

_METRICS = 4  # where metrics begin: [Note: message of a loss]


class Message:
    """Sums over all ranks that are on their way.

    Args:
        numbers: ``(number,)``, float64, or ``(ranks, number)``: see `summed`. They are there when
            the work has ended.
        work: What brings them; None if there is one rank.
        tape: Where the wait for it is recorded.
        bounded: What waits for the ranks whose numbers they are.
    """

    def __init__(
        self,
        numbers: Tensor,
        work: Started | None,
        tape: Tape,
        bounded: AbstractContextManager[object],
    ) -> None:
        self._numbers = numbers
        self._work = work
        self._tape = tape
        self._bounded = bounded
        self._read: list[float] | None = None

    @property
    def has_arrived(self) -> bool:
        """Whether `read` waits for nothing."""
        ended = self._work is None or (self._numbers.is_cpu and self._work.is_completed())
        return self._read is not None or (ended and self._numbers.is_cpu)

    def sums(self) -> Tensor:
        """Returns the sums.

        Sync: waits for them, the first time: the current stream, on CPU the host.
        """
        if self._work is not None:
            began = self._tape.now()
            with self._bounded:
                self._work.wait()
            self._tape.note("wait for ranks", "the loss of all ranks", began)
            self._work, self._numbers = None, summed(self._numbers)
        return self._numbers

    def read(self) -> list[float]:
        """Returns the sums. The host waits for them, the first time."""
        if self._read is None:
            sums = self.sums()
            # On a device only this waits for it: a step that hangs there is seen here.
            with nullcontext() if sums.is_cpu else self._bounded:
                self._read = sums.tolist()
        return self._read

    @property
    def has_failed(self) -> bool:
        """Whether a rank has failed in the step. The host waits for the sums, the first time."""
        return self.read()[1] > 0

    @property
    def wrong(self) -> str | None:
        """What cannot be, of the numbers of a step; None if all can."""
        weight, num_different = self.read()[2:_METRICS]
        if not 0 <= weight < math.inf:
            return (
                f"the weights that loss_fn gave on a data rank sum to {weight:g}, expected a "
                f"number from 0 on"
            )
        return f"{num_different:g} times in the step {DIFFERENT}" if num_different else None

    def is_wrong(self) -> bool:
        """Returns whether the gradients of the step are wrong: reading `loss` raises."""
        return self.has_failed or self.wrong is not None

    def metrics(self, number: int) -> list[float]:
        """Returns the sums of so many metrics."""
        return self.read()[_METRICS : _METRICS + number]

    def times(self, num_metrics: int) -> list[float] | None:
        """Returns the sums of times, which are behind the metrics; None if a rank failed."""
        return None if self.has_failed else self.read()[_METRICS + num_metrics :]


class _Elsewhere(tuple[Any, ...]):
    """The outputs of a result that has none."""

    __slots__ = ()

    def __getitem__(self, index: SupportsIndex | slice) -> Any:  # noqa: ANN401
        """Raises IndexError, but for a slice."""
        if isinstance(index, slice):
            return ()
        raise IndexError(
            "this result has no outputs on this rank: ranks of the last stage have them, after "
            "evaluate() and step(outputs=True). Read them there: if result.outputs: ..."
        )


class StepResult:
    """The loss of a step, its metrics, and on request the outputs of the last stage.

    Attributes:
        outputs: Of an evaluation, or of a step with ``outputs=True``, on ranks with the last stage:
            for each of its outputs the values of all microbatches, in order and detached. They are
            one tensor, joined along the first dimension. If they differ in another dimension, they
            are a tuple with a tensor for each microbatch. Elsewhere it is empty, and an index
            raises an IndexError that says where they are. If loss_fn changes them in place, they
            are changed here, too.
        message: The sums of all ranks, for who needs no more of the result.
        names: Of the metrics in it.

    Made by `Losses.send`. If the step failed on another rank after it had ended here,
    ``on_failure`` drops what it left on this rank, and returns the words of that rank.
    """

    def __init__(
        self,
        message: Message,
        names: Sequence[str],
        *,
        is_weighted: bool,
        outputs: Outputs,
        on_failure: Callable[[], str],
    ) -> None:
        self.outputs: Outputs = outputs or _Elsewhere()
        self.message = message
        self.names = names
        self._is_weighted = is_weighted
        self._on_failure = on_failure

    def __repr__(self) -> str:
        loss = "is on its way"
        if self.message.has_arrived:
            try:
                loss = f"{self.loss:g}"
            except StepError:
                loss = "of a step that failed"
        metrics = f", metrics {[*self.names]}" if self.names else ""
        shapes = [
            tuple(out.shape) if isinstance(out, Tensor) else [tuple(part.shape) for part in out]
            for out in self.outputs
        ]
        return f"StepResult(loss {loss}{metrics}, outputs {shapes})"

    def backward(self) -> NoReturn:
        """Refuses: the step has run backward.

        Raises:
            StepError: Always.
        """
        raise StepError(
            "backward() of a StepResult: scheduler.step() has run forward and backward, and "
            "gradients are there. Leave it out"
        )

    @property
    def loss(self) -> Tensor:
        """The loss, a float32 scalar, on every rank.

        It is the mean over microbatches, by their rows, and data ranks. With
        ``loss_reduction="token_mean"`` it is the sum of all losses, divided by the sum of all
        weights; nan if that is 0.

        Inside `accumulate` it is this mean over the microbatches of this call alone: nothing is
        summed over calls. Gradients are: with ``"mean"`` they are of the sum of the losses of all
        calls, with ``"token_mean"`` of their mean. The mean of several results is in `weight`.

        Sync: waits for it, the first time.

        Raises:
            StepError: If a rank failed in this step, after this one had ended it: gradients are
                None then, unless another step has begun. Or if the sum of all weights is negative
                or not finite.
        """
        self._check()
        sums = self.message.sums()
        loss: Tensor = sums[0] / sums[2] if self._is_weighted else sums[0]
        return loss.float()

    @property
    def weight(self) -> Tensor:
        """How much `loss` counts in a mean of several steps or evaluations: a float64 scalar.

        That mean is ``sum(r.loss * r.weight for r in results)``, divided by
        ``sum(r.weight for r in results)``. The weight is a mean over data ranks, the same on every
        rank. It is the number of rows that were cut into microbatches; of labels, or of the weights
        of their classes, if loss_fn is torch's own; of microbatches, if the caller has cut them or
        loss_fn takes sums. With ``loss_reduction="token_mean"`` it is the sum of all weights. With
        ``loss_divisor`` it is that.

        Sync: as `loss`.

        Raises:
            StepError: As `loss`.
        """
        self._check()
        return self.message.sums()[2].clone()

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics by name, on every rank: those of loss_fn, and the losses of stages.

        A metric of loss_fn is a mean as the loss is. With
        ``loss_reduction="token_mean"`` each microbatch counts with its weight, and not at all if
        the weight is 0. The loss of a stage is what it adds to `loss`. If several stages give a
        loss of one name, it is their sum.

        Sync: the host waits for them, the first time.

        Raises:
            StepError: As `loss`.
        """
        self._check()
        weight = self.message.read()[2] if self._is_weighted else 1.0
        values = zip(self.names, self.message.metrics(len(self.names)), strict=True)
        return {name: value / weight if weight else math.nan for name, value in values}

    def _check(self) -> None:
        """Refuses a step that failed on another rank, and numbers that cannot be."""
        # See [Note: message of a loss].
        if self.message.has_failed:
            why = self._on_failure()
            words = f"the step failed on another rank after this one had ended it{why}"
            raise following(StepError(words))
        if (wrong := self.message.wrong) is not None:
            raise StepError(f"{wrong}. The gradients are wrong")
