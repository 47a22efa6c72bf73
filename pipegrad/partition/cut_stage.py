"""Cut stages: the stages of a cut that a Scheduler runs, and the loss of the uncut model.

Each stage gets the whole batch by name, because it runs the code of the uncut model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipegrad.errors import StepError
from pipegrad.partition.carried_cache import CarriedCache, shifted_loss
from pipegrad.partition.cutting.layers import Part
from pipegrad.partition.deferred_logits import deferred
from pipegrad.partition.hf.conventions import ASK, LOSS, SHIFTED, Conventions
from pipegrad.pipeline.activation_checkpoint import Recompute
from pipegrad.pipeline.stage import BatchRules, Stage, fields_of, inner_module

BATCH = "**batch"  # the inputs of a step by name that are no inputs of a stage
_MOST_OFF = 2e-4  # the error of a loss in parts, relative to the loss


class CutStage(Stage):
    """A stage of a cut, as a Scheduler runs it."""

    def __init__(
        self,
        part: Part,
        index: int,
        conventions: Conventions,
        *,
        is_last: bool,
        labels: Sequence[str],
        head: str,
        recompute: bool,
        layers: Mapping[str, float],
        carry: CarriedCache | None = None,
        shifts: bool = False,
    ) -> None:
        self._metrics = metrics_of(part) if labels else ()
        outputs = (*part.outputs, *self._metrics, LOSS) if labels else part.outputs
        inputs = (*part.inputs, BATCH)
        carried = ("cache",) if carry else ()
        super().__init__(part.module, index, inputs, outputs, recompute=recompute, carry=carried)
        self._carry, self._shifts = carry, shifts
        self.layers = layers
        self._conventions = conventions
        self._names = part.outputs if is_last else None
        self._labels = labels
        self._is_proven = not labels  # see [Note: one mean]
        self._head = head

    @property
    def rules(self) -> BatchRules:
        """The rules of the model for the batch of a step."""
        known = self._conventions
        return BatchRules(known.accepts, known.rows_of, known.samples_along, self._in_time)

    def _in_time(
        self, given: Mapping[str, object]
    ) -> tuple[Mapping[str, object], Mapping[str, int | None]]:
        """Returns the inputs to cut into sequence chunks; see `BatchRules`."""
        if self._carry is None:
            return given, {}
        conventions = self._conventions
        conventions.arguments({n: x for n, x in given.items() if n != "target"})
        if any(getattr(x, "gradient_checkpointing", False) for x in self.module.modules()):
            raise StepError(
                "transformers' gradient checkpointing gives layers no cache: switch it off, and "
                "take the stages of cut.stages(..., recompute=True)"
            )
        return self._carry.in_time(given, conventions.shifted if self._shifts else None)

    def forward(self, values: Sequence[object]) -> tuple[Any, ...]:
        """Returns the outputs; see `Stage.forward`."""
        if self._is_proven or not torch.is_grad_enabled():
            return self._forward(values)
        return self._proven(values)

    def _proven(self, values: Sequence[object]) -> tuple[Any, ...]:
        """Returns the outputs, and checks the loss against [Note: one mean].

        Raises:
            StepError: If the loss is no mean over the labels.
        """
        at = self.inputs.index(BATCH)
        batch: Any = values[at]
        found = self._conventions.parts(batch, self.module)
        parts = [[*values[:at], part, *values[at + 1 :]] for part in found]
        if not parts:
            self._is_proven = batch.get(self._labels[0]) is not None
            return self._forward(values)
        # Run before the step's own forward, with its random numbers and buffers, because the check
        # must change neither and two graphs must not live at once. Run with a graph, because
        # without one compiled code would be compiled again.
        replay, loss = Recompute(self.module, batch["labels"].device), self.outputs.index(LOSS)
        returned, first = replay.first(values, partial(self._forward, parts[0]))
        whole = returned[loss].item()
        sums = list[float]()
        for part in parts[1:]:
            with replay.again(first, values):
                sums.append(self._forward(part)[loss].item())
        with replay.again(first, values):
            outputs = self._forward(values)
        eps = torch.finfo(outputs[loss].dtype).eps
        most = (_MOST_OFF + 4 * eps) * (abs(whole) + sum(map(abs, sums)))
        if math.isfinite(whole) and not abs(whole - sum(sums)) <= most:
            raise StepError(
                f"the own loss of this model is no mean over its labels, by which microbatches "
                f"weigh: times its labels, the loss of a microbatch is {whole:.6g}, and "
                f"parts of the labels give {' + '.join(f'{x:.6g}' for x in sums)}: {ASK}"
            )
        self._is_proven = True
        return outputs

    def _forward(self, values: Sequence[object]) -> tuple[Any, ...]:
        if self._carry is None:
            *edges, batch = values
            return self._outputs_of(self._run(edges, batch))
        *edges, batch, state = values
        with self._carry.chunk(self.module, batch, state) as (given, cached, end):
            returned = self._run(edges, given, cached)
            carried = end()
        if isinstance(returned, Mapping):
            return self._outputs_of({**returned, "cache": carried})
        sent = returned if isinstance(returned, tuple) else (returned,)
        return self._outputs_of((*sent, carried))

    def _run(
        self, edges: Sequence[object], batch: object, cached: Mapping[str, object] | None = None
    ) -> object:
        """Returns the module's outputs, by name on the last stage."""
        assert isinstance(batch, Mapping)
        arguments = self._conventions.arguments(batch) | dict(cached or {})
        labels = {n: arguments[n] for n in self._labels if arguments.get(n) is not None}
        counted = {SHIFTED: labels.get("labels")} if cached else labels
        weight = self._conventions.weight(counted) if labels else None
        if weight is not None:
            self._conventions.check(labels, arguments)
            arguments |= self._conventions.safe(labels, weight)
        with ExitStack() as around:
            if weight is not None and self._head:
                if hasattr(self.module, "_orig_mod"):
                    raise StepError(
                        "the last stage is compiled, and its loss is 'chunked', which changes what "
                        "its head returns: compile its layers, or cut the model without "
                        "loss='chunked'"
                    )
                head = inner_module(self.module).get_submodule(self._head)
                around.enter_context(deferred(head))
            if weight is not None and cached:
                around.enter_context(shifted_loss(self.module, arguments))
            returned = self.module(*edges, **arguments)
        if self._names is None:
            return returned
        fields = fields_of(returned)
        if fields is not None and set(self._names) <= set(fields):
            named = dict(fields)
        else:
            values = list(returned) if isinstance(returned, tuple | list) else [returned]
            tensors = [value for value in values if isinstance(value, Tensor)]
            named = dict(zip(self._names, tensors, strict=False))
        if self._labels:
            named[LOSS] = _sum_of(named, weight)
            for name in self._metrics:  # nan without labels
                value = named.get(name)
                if not isinstance(value, Tensor) or value.numel() != 1:
                    value = torch.tensor(torch.nan)
                named[name] = value.detach().reshape(())
        return {name: named.get(name) for name in self.outputs}


def own_loss(
    conventions: Conventions,
    metrics: Sequence[str],
    *values: Any,  # noqa: ANN401 - outputs and labels
) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
    """Returns a model's own loss, summed over a microbatch, its number of labels, and metrics."""
    *outputs, loss, target = values
    labels = target if isinstance(target, Mapping) else {conventions.labels[0]: target}
    found = outputs[len(outputs) - len(metrics) :]
    return loss, conventions.weight(labels), dict(zip(metrics, found, strict=True))


def metrics_of(part: Part) -> tuple[str, ...]:
    """Returns the names of the metrics of a model's own loss."""
    return tuple(name for name in part.beside if name.endswith(f"_{LOSS}"))


def _sum_of(named: Mapping[str, object], weight: Tensor | None) -> Tensor:
    """Returns the sum of the losses whose mean a model returned; nan if there are no labels."""
    loss = named.get(LOSS)
    if weight is None:
        first = next(value for value in named.values() if isinstance(value, Tensor))
        return first.new_full((), torch.nan)
    if not isinstance(loss, Tensor):
        raise StepError("the model returned no loss for these labels")
    return (loss * weight).reshape(())
