"""CutStage: a stage of a cut, as a Scheduler runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipegrad.errors import StepError
from pipegrad.partition.conventions import Conventions
from pipegrad.partition.part import Part
from pipegrad.pipeline.stage import Stage, fields_of

BATCH = "**batch"  # what a step is given by name, and no stage names
LOSS = "loss"


class CutStage(Stage):
    """A stage that is given everything that no stage names, as the uncut model would be.

    Args:
        part: The stage.
        index: Which one.
        conventions: What the model takes and returns.
        is_last: Whether it is the last one.
        labels: Names of what the model's own loss needs; empty if it is not wanted.
        recompute: As `Stage`.
    """

    def __init__(
        self,
        part: Part,
        index: int,
        conventions: Conventions,
        *,
        is_last: bool,
        labels: Sequence[str],
        recompute: bool,
    ) -> None:
        outputs = (*part.outputs, LOSS) if labels else part.outputs
        inputs = (*part.inputs, BATCH)
        super().__init__(part.module, index, inputs, outputs, recompute=recompute)
        self.accepts = conventions.accepts
        self._conventions = conventions
        self._names = part.outputs if is_last else None
        self._labels = labels

    def forward(self, values: Sequence[object]) -> tuple[Tensor, ...]:
        """Returns the outputs; see `Stage.forward`."""
        *edges, batch = values
        assert isinstance(batch, Mapping)
        arguments = self._conventions.arguments(batch)
        labels = {n: arguments[n] for n in self._labels if arguments.get(n) is not None}
        weight = self._conventions.weight(labels) if labels else None
        if weight is not None:
            self._conventions.check(labels, arguments)
            arguments |= self._conventions.safe(labels, weight)
        returned = self.module(*edges, **arguments)
        if self._names is None:
            return self._outputs_of(returned)
        named = _named(returned, self._names)
        if self._labels:
            named[LOSS] = _sum_of(named.get(LOSS), weight, named)
        return self._outputs_of({name: named.get(name) for name in self.outputs})


@dataclass(frozen=True)
class OwnLoss:
    """The model's own loss: takes the outputs of the last stage and labels.

    Attributes:
        conventions: What the model takes and returns.
        labels: Names of the labels.
    """

    conventions: Conventions
    labels: Sequence[str]

    def __call__(self, *values: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401 - outputs and labels
        """Returns the sum of the losses of a microbatch, and how many there are."""
        *_, loss, target = values
        labels = target if isinstance(target, Mapping) else {self.labels[0]: target}
        return loss, self.conventions.weight(labels)


def _sum_of(loss: object, weight: Tensor | None, named: Mapping[str, object]) -> Tensor:
    """Returns the sum of losses that a mean stands for; nan if there are no labels."""
    if weight is None:
        first = next(value for value in named.values() if isinstance(value, Tensor))
        return first.new_full((), torch.nan)
    if not isinstance(loss, Tensor):
        raise StepError("the model returned no loss for these labels")
    return (loss * weight).reshape(())


def _named(returned: object, names: Sequence[str]) -> dict[str, object]:
    """Returns what a model returned, by name."""
    fields = fields_of(returned)
    if fields is not None and set(names) <= set(fields):
        return dict(fields)
    values = list(returned) if isinstance(returned, tuple | list) else [returned]
    tensors = [value for value in values if isinstance(value, Tensor)]
    return dict(zip(names, tensors, strict=False))
