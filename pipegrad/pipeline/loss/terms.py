"""The losses and metrics of one step on one rank, as loss_fn and the stages give them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real

import torch
from torch import Tensor

from pipegrad.errors import StepError

REDUCTIONS = MEAN, TOKEN_MEAN = ("mean", "token_mean")
Number = float | Tensor  # a tensor of one element
# A loss, its weight if losses are sums, and metrics by name.
LossParts = tuple[Tensor, Number | None, Mapping[str, Number]]
_NO_METRICS: Mapping[str, Number] = {}
_EXPECTED = (
    "a tensor of one element or (loss, metrics); for (sum of losses, weight) make the Scheduler "
    "with loss_reduction='token_mean'"
)
_EXPECTED_WEIGHTS = (
    "(sum of losses, weight) or (sum of losses, weight, metrics), for loss_reduction='token_mean'"
)


def loss_parts(returned: object, *, is_weighted: bool) -> LossParts:
    """Returns the parts of what loss_fn returned for a microbatch.

    Args:
        returned: A loss, or ``(loss, metrics)``; if losses have weights, ``(loss, weight)`` or
            ``(loss, weight, metrics)``.
        is_weighted: Whether losses are sums and have weights.

    Raises:
        StepError: If it is something else.
    """
    if type(returned) is Tensor and returned.numel() == 1 and not is_weighted:
        return returned, None, _NO_METRICS  # most do
    parts = tuple(returned) if isinstance(returned, tuple | list) else (returned,)
    loss, *rest = parts or (None,)
    weight = rest.pop(0) if is_weighted and rest else None
    metrics = rest.pop(0) if rest else _NO_METRICS
    if (
        rest
        or not (isinstance(loss, Tensor) and _is_number(loss) and isinstance(metrics, Mapping))
        or (is_weighted and not _is_number(weight))
    ):
        found = repr(returned) if parts == (returned,) else [type(part).__name__ for part in parts]
        expected = _EXPECTED_WEIGHTS if is_weighted else _EXPECTED
        raise StepError(f"loss_fn returned {found}, expected {expected}")
    if isinstance(weight, Real) and not 0 <= float(weight) < math.inf:
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


class LossTerms:
    """The losses and metrics of one step on this rank, of all microbatches.

    Args:
        divisor: The sum of all losses is divided by it.
        device: Where losses are.
        is_weighted: Whether losses are sums and have weights.
        is_last: Whether this rank has the last stage. If it then computes no loss, all is nan.
        expected: The names of loss_fn's metrics, if the ranks know them already.
        taken: The names of the losses of stages.

    Attributes:
        divisor: The argument.
        is_weighted: The argument.
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
        self._names = expected  # None until the first microbatch
        self._device = device
        self._is_last = is_last
        self._taken = taken
        # One number for each microbatch.
        self._losses = list[Tensor]()
        self._weights = list[Tensor]()
        self._metrics = dict[str, list[Tensor]]()
        self._auxiliary = dict[str, list[Tensor]]()  # and for each stage

    @property
    def metrics(self) -> tuple[str, ...] | None:
        """The names of loss_fn's metrics, in order; None if this rank has computed no loss."""
        return self._names if self._losses else None

    def add(self, parts: LossParts) -> None:
        """Adds what loss_fn returned for a microbatch.

        Raises:
            StepError: If metrics have other names than before, or that of a stage's loss.
        """
        loss, weight, metrics = parts
        # A copy: the loss may lie in memory that is written again.
        self._losses.append(loss.detach().to(torch.float64, copy=True).reshape(()))
        if metrics or self._names != ():
            self._check_names(metrics)
            for name, value in metrics.items():
                self._metrics.setdefault(name, []).append(self._number(value))
        if weight is not None:
            self._weights.append(self._number(weight))

    def add_auxiliary(self, name: str, loss: Tensor) -> None:
        """Adds a loss that a stage made for a microbatch."""
        self._auxiliary.setdefault(name, []).append(self._number(loss))

    @property
    def weight(self) -> Tensor:
        """The sum of all weights on this rank, a float64 scalar."""
        return self._sum(self._weights)

    @property
    def total(self) -> Tensor:
        """The sum of all losses on this rank, divided: a float64 scalar."""
        terms = self._losses or self._missing
        for losses in self._auxiliary.values():
            terms = terms + losses
        return self._sum(terms) / self.divisor

    def metric(self, name: str) -> Tensor:
        """Returns a metric on this rank, a float64 scalar.

        It is a mean over microbatches; with weights a sum, to be divided by all weights. The loss
        of a stage is its part of `total`.
        """
        if name in self._taken:
            return self._sum(self._auxiliary.get(name, [])) / self.divisor
        values = self._metrics.get(name)
        if values is None:
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
        """What takes the place of a loss, or of metrics, in an evaluation without a target."""
        return [self._number(math.nan)] if self._is_last else []

    def _number(self, value: Number) -> Tensor:
        """Returns a number that no one else writes, without a graph."""
        if isinstance(value, Tensor):
            return value.detach().to(self._device, torch.float64, copy=True).reshape(())
        return torch.full((), float(value), dtype=torch.float64, device=self._device)

    def _sum(self, terms: list[Tensor]) -> Tensor:
        if not terms:
            return torch.zeros((), dtype=torch.float64, device=self._device)
        return torch.stack(terms).sum()
