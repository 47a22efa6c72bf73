"""Losses: collects losses, weights and metrics, and sends them to all ranks in the background.

`loss_parts` reads the values that loss_fn returned, and `LossTerms` collects them over a step.
`Losses.send` adds the terms of all ranks. A `StepResult` gives the sums to every rank.

[Note: message of a loss] Each rank sends float64 numbers to all others. Their sums are:

    0  the losses, divided by the number of pipelines
    1  the number of ranks that failed in this step
    2  the weight of the result in a mean of several, divided by the number of pipelines
    3  the number of second forwards on devices that differ: [Note: second forwards]
    then the metrics, in the order of their names, divided by the number of pipelines
    then the times of the step, if the schedule wants them: [Note: times of a step]

Ranks that ended the step before another rank failed find the failure in this message.

[Note: names of metrics] The messages of all ranks must have one length. The names of the losses of
stages are known when the Scheduler is made. But a rank without the last stage cannot know the
metrics of loss_fn. All ranks learn their names when the first step of a kind has ended, and send
its message after that: see [Note: first step]. From then on other names are an error of the step.

[Note: divided at the end] With "token_mean" the total weight is unknown before the last forward of
the last replica. Backwards begin with one, and gradients are sums, because the divisor comes later.
When the computes of a rank have ended, it adds its weight to an all-reduce of one number.
`GradientSync.finish` then divides the results, or a GradScaler does where it unscales them.
Gradients that accumulate over several steps are divided by all their weights.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from numbers import Real
from typing import Any, NoReturn, SupportsIndex

import torch
import torch.distributed as dist
from torch import Tensor

from pipegrad.comm.activity import Tape
from pipegrad.comm.collectives import start_sum, summed
from pipegrad.comm.ending import Ending
from pipegrad.comm.process_groups import is_local, new_group
from pipegrad.comm.sync_points import Started
from pipegrad.errors import StepError, following
from pipegrad.pipeline.activation_checkpoint import DIFFERENT
from pipegrad.pipeline.shares import Number, Shares, counted
from pipegrad.topology import Topology

REDUCTIONS = MEAN, TOKEN_MEAN = ("mean", "token_mean")
# A loss, its weight if losses are sums, and metrics by name.
LossParts = tuple[Tensor, Number | None, Mapping[str, Number]]
Outputs = tuple[Any, ...]  # of tensors, and of tuples of tensors
_METRICS = 4  # where metrics begin: [Note: message of a loss]
_NO_METRICS: Mapping[str, Number] = {}
_EXPECTED = (
    "a tensor of one element or (loss, metrics); for (sum of losses, weight) make the Scheduler "
    "with loss_reduction='token_mean'"
)
_EXPECTED_WEIGHTS = (
    "(sum of losses, weight) or (sum of losses, weight, metrics), for loss_reduction='token_mean'"
)


def loss_parts(returned: object, *, is_weighted: bool) -> LossParts:
    """Returns the loss, weight and metrics that loss_fn returned for a microbatch.

    Args:
        returned: A loss, or ``(loss, metrics)``; if losses have weights, ``(loss, weight)`` or
            ``(loss, weight, metrics)``.
        is_weighted: Whether losses are sums and have weights.

    Raises:
        StepError: If it has another form.
    """
    if type(returned) is Tensor and returned.numel() == 1 and not is_weighted:
        return returned, None, _NO_METRICS  # the most frequent form
    return _checked_parts(returned, is_weighted=is_weighted)


def _checked_parts(returned: object, *, is_weighted: bool) -> LossParts:
    parts = tuple(returned) if isinstance(returned, tuple | list) else (returned,)
    loss, *rest = parts or (None,)
    weight = rest.pop(0) if is_weighted and rest else None
    metrics = rest.pop(0) if rest else _NO_METRICS
    if (
        rest
        or not (isinstance(loss, Tensor) and _is_number(loss) and isinstance(metrics, Mapping))
        or (is_weighted and not _is_number(weight))
    ):
        returns = (
            repr(returned) if parts == (returned,) else [type(part).__name__ for part in parts]
        )
        expected = _EXPECTED_WEIGHTS if is_weighted else _EXPECTED
        raise StepError(f"loss_fn returned {returns}, expected {expected}")
    is_here = getattr(weight, "is_cpu", True)  # the host waits for no device
    if weight is not None and is_here and not 0 <= float(weight) < math.inf:
        raise StepError(f"loss_fn returned the weight {weight}, expected a number from 0 on")
    for name, value in metrics.items():
        if not isinstance(name, str) or not _is_number(value):
            raise StepError(
                f"loss_fn returned the metric {name!r} as {value!r}, expected a name, and a number "
                f"or a tensor of one element"
            )
    return loss, weight, metrics


def _is_number(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, Real)


def _scalar(value: Number, device: torch.device) -> Tensor:
    """Returns a number without a graph, float64, in memory that no one else writes.

    Sync: on the current stream; the host waits for nothing.
    """
    if isinstance(value, Tensor):
        return value.detach().to(device, torch.float64, copy=True).reshape(())
    return torch.full((), float(value), dtype=torch.float64, device=device)


class LossTerms:
    """The losses and metrics of one step on this rank, of all microbatches.

    Attributes:
        divisor: The divisor of the sum of all losses.
        is_weighted: Whether losses are sums and have weights.
        shares: The share of each microbatch's loss, see `shares.py`; None if all are equal.
        rows: Rows of each microbatch, the shares of stages' losses; empty if all are equal.
        count: The weight of this step in a mean of several steps, if losses have no weights.
        num_different: The number of second forwards that differ from the first without an error.
    """

    def __init__(
        self,
        divisor: float,
        device: torch.device,
        *,
        is_weighted: bool,
        is_last: bool,
        expected: tuple[str, ...] | None,
        taken: Sequence[str],
    ) -> None:
        self.divisor = divisor
        self.is_weighted = is_weighted
        self.shares: Shares | None = None
        self.rows: Sequence[float] = ()
        self.count: Number = divisor if is_last else 0
        self.num_different: int | Tensor = 0
        self._names = expected  # None until the first microbatch
        self._device = device
        self._is_last = is_last
        self._taken = taken
        # One number for each microbatch; for losses of stages one for each stage, too.
        self._losses = list[Tensor]()
        self._weights = list[Tensor]()
        self._metrics = defaultdict[str, list[Tensor]](list)

    @property
    def metrics(self) -> tuple[str, ...] | None:
        """The names of loss_fn's metrics, in order; None if this rank has computed no loss."""
        return self._names if self._losses else None

    def share_of_rows(self, microbatch: int) -> float:
        """Returns the share of a stage's loss in a microbatch."""
        return self.rows[microbatch] * len(self.rows) / sum(self.rows) if self.rows else 1.0

    def add(self, parts: LossParts, share: Number = 1.0) -> None:
        """Adds the loss, weight and metrics of a microbatch, by its share.

        Raises:
            StepError: If metrics have other names than before, or the name of a stage's loss.
        """
        loss, weight, metrics = parts
        self._losses.append(counted(_scalar(loss, self._device), share))
        if metrics or self._names != ():
            self._check_names(metrics)
        for name in metrics:
            self._metrics[name].append(counted(_scalar(metrics[name], self._device), share))
        if weight is not None:
            self._weights.append(_scalar(weight, self._device))

    def add_auxiliary(self, name: str, loss: Tensor, microbatch: int) -> None:
        """Adds a loss that a stage made for a microbatch, by its share of the rows."""
        self._metrics[name].append(
            counted(_scalar(loss, self._device), self.share_of_rows(microbatch))
        )

    @property
    def weight(self) -> Tensor:
        """The sum of all weights on this rank, a float64 scalar."""
        return self._sum(self._weights)

    @property
    def total(self) -> Tensor:
        """The sum of all losses on this rank, divided: a float64 scalar."""
        of_stages = [loss for name in self._taken for loss in self._metrics[name]]
        return self._sum([*(self._losses or self._missing), *of_stages]) / self.divisor

    def metric(self, name: str) -> Tensor:
        """Returns a metric on this rank, a float64 scalar.

        It is a mean over microbatches, by their shares; if losses have weights, a weighted sum, to
        be divided by all weights. The loss of a stage is its part of `total`.
        """
        values = self._metrics[name]
        if name in self._taken:
            return self._sum(values) / self.divisor
        if not values:
            return self._sum(self._missing)
        if not self.is_weighted:
            return torch.stack(values).mean()
        # A microbatch that counts nothing may have a metric of 0 / 0.
        weights = torch.stack(self._weights)
        return torch.where(weights != 0, torch.stack(values) * weights, 0.0).sum()

    def _check_names(self, metrics: Mapping[str, Number]) -> None:
        names = tuple(sorted(metrics))
        if doubled := sorted(set(names).intersection(self._taken)):
            raise StepError(
                f"loss_fn returned the metrics {doubled}, which are names of losses of stages"
            )
        self._names = names if self._names is None else self._names
        if names != self._names:
            raise StepError(
                f"loss_fn returned the metrics {list(names)}, expected {list(self._names)}, which "
                f"all ranks know from earlier: return the same names for all microbatches of all "
                f"steps. If the first evaluation has no target, training must have had the names"
            )

    @property
    def _missing(self) -> list[Tensor]:
        """The nan that replaces a loss, or metrics, in an evaluation without a target."""
        return [_scalar(math.nan, self._device)] if self._is_last else []

    def _sum(self, terms: list[Tensor]) -> Tensor:
        return torch.stack([_scalar(0.0, self._device), *terms]).sum()


class Losses:
    """Sends the losses of a Scheduler, on a communicator of their own.

    Attributes:
        is_weighted: Whether losses are sums and have weights.
        learned: The names of loss_fn's metrics by forward_only, the same on all ranks; None if no
            rank has computed a loss in the first step. Then the names from the other kind of step
            are expected, if they are known.
    """

    def __init__(
        self,
        topology: Topology,
        device: torch.device,
        *,
        is_weighted: bool = False,
        auxiliary: Sequence[str] = (),
        tape: Tape,
        bounded: AbstractContextManager[object] | None = None,
    ) -> None:
        self._tape = tape
        self._bounded = bounded or nullcontext()
        self._ranks = ranks = sorted(topology.ranks)
        # Each pipeline has a last stage, and the loss is the mean over pipelines. Pipelines that
        # are replicas have different data; others have the same data and the same loss.
        self._num_copies = len(topology.pipelines)
        self._device = device
        self.is_weighted = is_weighted
        self._auxiliary = auxiliary
        self.learned = dict[bool, tuple[str, ...] | None]()
        # The weight of this step, and of all steps that it continues.
        self._weight = torch.zeros((), dtype=torch.float64, device=device)
        self._owes_weight = False  # whether other ranks wait for the weight of this step
        self._group: dist.ProcessGroup | None = None
        self._leaving: deque[Started] = deque()
        if len(ranks) > 1:
            self._group = new_group(ranks, "pipegrad loss", device)
        self._ending = Ending(
            self,
            groups=[self._group] if self._group else [],
            is_local=is_local(device),
            is_idle=partial(_have_ended, self._leaving),
        )

    def begin(self, *, continues: bool, reduces: bool) -> None:
        """Begins a step with weights, before anything of it can fail."""
        if not continues:
            self._weight = torch.zeros_like(self._weight)
        # Set before anything can fail, because a rank whose step fails must send its part too, in
        # `send_owed_weight`. Otherwise the others would wait for it in this all-reduce.
        self._owes_weight = reduces

    def terms(self, divisor: float, *, forward_only: bool, is_last: bool) -> LossTerms:
        """Returns empty terms, which collect the losses of a step."""
        return LossTerms(
            divisor,
            self._device,
            is_weighted=self.is_weighted,
            is_last=is_last,
            expected=self._names(forward_only),
            taken=self._auxiliary,
        )

    def _names(self, forward_only: bool) -> tuple[str, ...] | None:
        """Returns the names of loss_fn's metrics; None in the first step of a kind."""
        if forward_only not in self.learned:
            return None
        learned = (self.learned.get(kind) for kind in (forward_only, not forward_only))
        return next((names for names in learned if names is not None), ())

    def divisor(self, terms: LossTerms) -> Tensor | None:
        """Returns the divisor of complete gradients; None in a step that only accumulates.

        It is the weight of a data rank's losses, as a mean over data ranks: a float64 scalar. All
        ranks call it when the computes of a step have ended. See [Note: divided at the end].

        Sync: one all-reduce of one number. The current stream waits for it, on CPU the host.
        """
        self._weight = self._weight + terms.weight
        if not self._owes_weight:
            return None
        total = self._send_weight(self._weight / self._num_copies).sums()[0]
        # If everything is ignored, gradients become zero, as in torch's cross_entropy.
        return torch.where(total == 0, math.inf, total)

    def send(
        self,
        terms: LossTerms,
        *,
        forward_only: bool,
        failed: bool = False,
        times: Sequence[float] = (),
        outputs: Outputs = (),
        on_failure: Callable[[], str] = str,
    ) -> StepResult:
        """Adds this rank's part of the loss to the parts of the others; returns at once.

        It sends the numbers in [Note: message of a loss].
        """
        names, number = (*self._auxiliary, *(self._names(forward_only) or ())), self._num_copies
        numbers = [
            terms.total / number,
            failed,
            (terms.weight if self.is_weighted else terms.count) / number,
            terms.num_different,
            *(terms.metric(name) / number for name in names),
            *times,
        ]
        return StepResult(
            self._reduced(numbers),
            names,
            is_weighted=self.is_weighted,
            outputs=outputs,
            on_failure=on_failure,
        )

    def send_owed_weight(self) -> None:
        """Sends a weight of 0, if the step failed before this rank sent its own."""
        if self._owes_weight:
            self._send_weight(torch.zeros(()))

    def close(self) -> None:
        """Destroys the communicator; every rank must call it."""
        self._ending.end()
        self._group = None

    def _send_weight(self, weight: Tensor) -> Message:
        self._owes_weight = False
        return self._reduced([weight])

    def _reduced(self, numbers: Sequence[Number]) -> Message:
        """Starts to send this rank's numbers to all ranks; returns at once."""
        message = torch.stack([_scalar(number, self._device) for number in numbers])
        work: Started | None = None
        if self._group is not None:
            # Do not wait, because most loops read a loss some steps later or never, and the next
            # step can begin at once.
            work, message = start_sum(message, self._group)
            # A result may be thrown away unread. Its work must live until it has ended.
            _have_ended(self._leaving)
            self._leaving.append(work)
        return Message(message, work, self._tape, self._bounded)


def _have_ended(leaving: deque[Started]) -> bool:
    """Returns True if all works have ended; removes those at the front that have."""
    while leaving and leaving[0].is_completed():
        leaving.popleft()
    return not leaving


class Message:
    """Sums over all ranks, still in flight.

    Args:
        numbers: ``(number,)``, float64, or ``(ranks, number)``: see `summed`. They are there when
            the work has ended.
        work: The collective that brings them; None if there is one rank.
        tape: Records the wait for it.
        bounded: Limits the wait for other ranks.
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
        """True if `read` waits for nothing."""
        return self._numbers.is_cpu and (self._work is None or self._work.is_completed())

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
            # On a device only this waits for it, and detects a step that hangs there.
            with nullcontext() if sums.is_cpu else self._bounded:
                self._read = sums.tolist()
        return self._read

    @property
    def has_failed(self) -> bool:
        """True if a rank has failed in the step. The host waits for the sums, the first time."""
        return self.read()[1] > 0

    @property
    def wrong(self) -> str | None:
        """A description of the first invalid number of a step; None if all are valid."""
        weight, num_different = self.read()[2:_METRICS]
        if not 0 <= weight < math.inf:
            return (
                f"the weights that loss_fn gave on a data rank sum to {weight:g}, expected a "
                f"number from 0 on"
            )
        return f"{num_different:g} times in the step {DIFFERENT}" if num_different else None

    def times(self, num_metrics: int) -> list[float] | None:
        """Returns the sums of times, which follow the metrics; None if a rank failed."""
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
        outputs: Outputs of an evaluation, or of a step with ``outputs=True``, on ranks with the
            last stage: for each output the values of all microbatches, in order and detached. They
            are one tensor, joined along the first dimension. If they differ in another dimension,
            they are a tuple with a tensor for each microbatch. Elsewhere it is empty, and an index
            raises an IndexError that names the ranks with outputs. If loss_fn changes them in
            place, they are changed here, too.
        message: The sums of all ranks, for readers that need no more of the result.
        names: The names of the metrics in the message.

    Made by `Losses.send`. If the step failed on another rank after it had ended here,
    ``on_failure`` drops its gradients on this rank, and returns the error text of that rank.
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
        """Raises an error, because the step has run backward already.

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
        sums = self._sums()
        loss: Tensor = sums[0] / sums[2] if self._is_weighted else sums[0]
        return loss.float()

    @property
    def weight(self) -> Tensor:
        """The weight of `loss` in a mean of several steps or evaluations: a float64 scalar.

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
        return self._sums()[2].clone()

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics by name, on every rank: metrics of loss_fn, and losses of stages.

        A metric of loss_fn is a mean as the loss is. With ``loss_reduction="token_mean"`` each
        microbatch counts with its weight, and not at all if the weight is 0. The loss of a stage is
        its part of `loss`. If several stages give a loss of one name, it is their sum.

        Sync: the host waits for them, the first time.

        Raises:
            StepError: As `loss`.
        """
        sums = self._sums().tolist()
        weight = sums[2] if self._is_weighted else 1.0
        return {
            name: value / weight if weight else math.nan
            for name, value in zip(self.names, sums[_METRICS:], strict=False)
        }

    def _sums(self) -> Tensor:
        """Returns the sums of a step that has not failed, and whose numbers are valid."""
        # See [Note: message of a loss].
        if self.message.has_failed:
            why = self._on_failure()
            words = f"the step failed on another rank after this one had ended it{why}"
            raise following(StepError(words))
        if (wrong := self.message.wrong) is not None:
            raise StepError(f"{wrong}. The gradients are wrong")
        return self.message.sums()
