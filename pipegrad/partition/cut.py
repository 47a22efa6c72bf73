"""cut: an uncut model into the stages of a pipeline, in one call.

cut = pipegrad.cut(model, num_stages=4)
scheduler = pipegrad.Scheduler(cut, topology, schedule="1f1b", num_microbatches=8)
result = scheduler.step(input_ids=ids, attention_mask=mask, labels=labels)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipegrad.comm.agreement import agree
from pipegrad.errors import StepError, TopologyError
from pipegrad.model.ties import find_tied
from pipegrad.partition.boundaries import Layer, starts_of
from pipegrad.partition.conventions import Conventions, sample_of
from pipegrad.partition.flow import Call, flow_of
from pipegrad.partition.layers import has_state, layers_of
from pipegrad.partition.part import Part
from pipegrad.partition.report import report
from pipegrad.partition.sequential import (
    is_sequential,
    only_layers,
    sequential_layers,
    sequential_parts,
)
from pipegrad.partition.structural import parts_of, returned_tensors
from pipegrad.pipeline.stage import Stage, fields_of

BATCH = "**batch"  # what a step is given by name, and no stage names
WAYS = ("structural", "traced", "sequential")
_LOSS = "loss"


class Cut:
    """A model in stages. Stages share the uncut model's tensors, and have its names.

    `Scheduler` takes it in the place of stages. In other runtimes, such as those of
    ``torch.distributed.pipelining``, `modules` are the stages: each takes what earlier stages send
    by position, and the arguments of the uncut model by name.

    Attributes:
        modules: Stage -> its module.
        tied: Parameters that several stages hold, or that the uncut model holds several times, by
            name: what `GradientSync` and `attach` take as ``tied``.
        boundaries: Index of the first layer of every stage but the first.
        layers: Where stages may begin.
        how: In which way the model was cut.
        loss_fn: The model's own loss; None if it has none.
        labels: Names of what `loss_fn` needs of a batch.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Sequence[Part],
        layers: Sequence[Layer],
        boundaries: Sequence[int],
        *,
        how: str,
        by: str,
    ) -> None:
        self.modules: Mapping[int, nn.Module] = {i: part.module for i, part in enumerate(parts)}
        self.tied = _ties_of(model, parts)
        self.boundaries = tuple(boundaries)
        self.layers = tuple(layers)
        self.how = how
        self._by = by
        self._parts = tuple(parts)
        self._conventions = Conventions(model)
        self.labels = () if how == "sequential" else self._conventions.labels
        self.loss_fn: Callable[..., object] | None = self._own_loss if self.labels else None

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self._parts)

    def report(self) -> str:
        """Returns why the model is cut where it is: a table with a line for each stage."""
        return report(self._parts, self.layers, self.boundaries, how=self.how, by=self._by)

    def __repr__(self) -> str:
        return f"Cut({self.num_stages} stages, {self.how}, begin with {self._begins})"

    @property
    def _begins(self) -> list[str]:
        return [self.layers[start].name for start in (0, *self.boundaries)]

    def stages(self, indices: Sequence[int], *, own_loss: bool = False) -> list[Stage]:
        """Returns some stages for a `Scheduler`.

        Args:
            indices: Which ones.
            own_loss: Whether the last stage also returns the model's own loss.
        """
        return [self._stage(index, own_loss=own_loss) for index in indices]

    def _stage(self, index: int, *, own_loss: bool) -> Stage:
        part, module = self._parts[index], self.modules[index]
        if self.how == "sequential":
            return Stage(module, index)
        is_last = index == self.num_stages - 1
        return _CutStage(
            Part(module, part.inputs, part.outputs),
            index,
            self._conventions,
            is_last=is_last,
            labels=self.labels if own_loss and is_last else (),
        )

    def _own_loss(self, *values: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401 - outputs and labels
        """Returns the sum of the losses of a microbatch, and how many there are."""
        *_, loss, target = values
        labels = target if isinstance(target, Mapping) else {self.labels[0]: target}
        return loss, self._conventions.weight(labels)


class _CutStage(Stage):
    """A stage that is given everything that no stage names, as the uncut model would be.

    Args:
        part: The stage.
        index: Which one.
        conventions: What the model takes and returns.
        is_last: Whether it is the last one.
        labels: Names of what the model's own loss needs; empty if it is not wanted.
    """

    def __init__(
        self,
        part: Part,
        index: int,
        conventions: Conventions,
        *,
        is_last: bool,
        labels: Sequence[str],
    ) -> None:
        outputs = (*part.outputs, _LOSS) if labels else part.outputs
        super().__init__(part.module, index, (*part.inputs, BATCH), outputs)
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
            arguments |= self._conventions.safe(labels, weight)
        returned = self.module(*edges, **arguments)
        if self._names is None:
            return self._outputs_of(returned)
        named = _named(returned, self._names)
        if self._labels:
            named[_LOSS] = _sum_of(named.get(_LOSS), weight, named)
        return self._outputs_of({name: named.get(name) for name in self.outputs})


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


def _ties_of(model: nn.Module, parts: Sequence[Part]) -> list[list[str]]:
    """Returns what the model ties, and parameters that several stages hold under one name."""
    tied = find_tied(model)
    known = {name for names in tied for name in names}
    seen, alone = set[str](), list[list[str]]()
    for part in parts:
        for name, _ in part.module.named_parameters():
            if name in seen and name not in known:
                alone.append([name])
                known.add(name)
            seen.add(name)
    return [*tied, *alone]


class Cutter:
    """`pipegrad.cut`: a function, with others under its name."""

    def __call__(
        self,
        model: nn.Module,
        num_stages: int,
        *,
        by: str | Sequence[float] = "parameters",
        boundaries: Sequence[int | str] | None = None,
        how: str | None = None,
        example: Mapping[str, object] | None = None,
    ) -> Cut:
        """Returns `model` cut into stages.

        Nothing is copied: stages share the model's tensors. All ranks must call it with the same
        arguments.

        Args:
            model: The uncut model, of transformers, an ``nn.Sequential``, or any other.
            num_stages: How many stages, each of at least one layer.
            by: What is to be even: ``"parameters"``; ``"time"``, estimated by operations and by
                memory traffic; ``"measured"``, the time of each layer's forward and backward on
                the sample, as a mean over ranks; ``"memory"``, of parameters with their gradients
                and two moments, and of the activations of as many microbatches as a stage of 1f1b
                has in flight; or a number for each layer.
            boundaries: Index or name of the first layer of stages 1, 2, ..., in place of `by`.
                `Cut.layers` has the names.
            how: ``"structural"`` runs the model's own code on each stage, for any shapes.
                ``"traced"`` cuts the graph that ``torch.export`` makes of `example`; each
                microbatch must have its shapes. ``"sequential"`` cuts an ``nn.Sequential``. By
                default sequential for those, and structural for all others.
            example: Keyword arguments of the model's forward, for a small batch; for
                ``"traced"`` a microbatch. Models of transformers need none, but for ``"traced"``.

        Raises:
            TopologyError: If the model cannot be cut so.
        """
        way = how or ("sequential" if is_sequential(model) else "structural")
        if way not in WAYS:
            raise TopologyError(f"how is {how!r}, expected one of {list(WAYS)}")
        if not isinstance(model, nn.Module):
            raise TopologyError(f"the model is a {type(model).__name__}, expected an nn.Module")
        if way == "sequential":
            return _sequential(model, num_stages, by, boundaries)
        if way == "traced":
            return _traced(model, num_stages, by, boundaries, example)
        return _structural(model, num_stages, by, boundaries, example)


cut = Cutter()


def _sequential(
    model: nn.Module,
    num_stages: int,
    by: str | Sequence[float],
    boundaries: Sequence[int | str] | None,
) -> Cut:
    plain = only_layers(model)
    named = sequential_layers(plain, num_stages)
    layers = [Layer(name, _sizes(layer)) for name, layer in named]
    starts = starts_of(layers, num_stages, by=by, boundaries=boundaries)
    parts = sequential_parts(plain, named, starts)
    return Cut(model, parts, layers, starts, how="sequential", by=_words(by, boundaries))


def _structural(
    model: nn.Module,
    num_stages: int,
    by: str | Sequence[float],
    boundaries: Sequence[int | str] | None,
    example: Mapping[str, object] | None,
) -> Cut:
    conventions = Conventions(model)
    sample = conventions.arguments(sample_of(model) if example is None else example)
    modules = layers_of(model, num_stages)
    flow = flow_of(model, modules, sample, timed=by == "measured")
    blocks = list(_blocks(flow.calls, modules))
    layers = [_layer(flow.calls[a:b], modules) for a, b in blocks]
    if by == "measured":
        layers = _agreed(layers)
    starts = starts_of(layers, num_stages, by=by, boundaries=boundaries)
    returned = returned_tensors(flow.returned)
    returned = {name: value for name, value in returned.items() if name != _LOSS}
    if "logits" in returned:
        returned = {"logits": returned["logits"]}
    if not returned:
        raise TopologyError(f"{type(model).__name__} returns no tensor")
    parts = parts_of(model, modules, flow, [blocks[start][0] for start in starts], returned)
    return Cut(model, parts, layers, starts, how="structural", by=_words(by, boundaries))


def _traced(
    model: nn.Module,
    num_stages: int,
    by: str | Sequence[float],
    boundaries: Sequence[int | str] | None,
    example: Mapping[str, object] | None,
) -> Cut:
    raise NotImplementedError


def _words(by: object, boundaries: object) -> str:
    if boundaries is not None:
        return "boundaries"
    return by if isinstance(by, str) else "numbers"


def _blocks(calls: Sequence[Call], modules: Mapping[str, nn.Module]) -> Iterator[tuple[int, int]]:
    """Yields where stages may begin, and the call behind the last one up to the next such place.

    A dropout between layers belongs to the layer before it.
    """
    begins = [i for i, call in enumerate(calls) if has_state(modules[call.layer])]
    if not begins:
        return
    begins[0] = 0
    yield from zip(begins, [*begins[1:], len(calls)], strict=True)


def _layer(calls: Sequence[Call], modules: Mapping[str, nn.Module]) -> Layer:
    first = next(call for call in calls if has_state(modules[call.layer]))
    return Layer(
        first.name,
        {k: v for call in calls for k, v in _sizes(modules[call.layer]).items()},
        sum(call.flops for call in calls),
        sum(call.saved_bytes for call in calls),
        sum(call.seconds for call in calls),
    )


def _agreed(layers: Sequence[Layer]) -> list[Layer]:
    """Returns layers with the mean of the times that all ranks have measured."""
    seconds = [layer.seconds for layer in layers]
    if dist.is_initialized():
        replies = agree("the times of layers", lambda: seconds)
        seconds = [sum(times) / len(times) for times in zip(*replies, strict=True)]
    return [replace(layer, seconds=time) for layer, time in zip(layers, seconds, strict=True)]


def _sizes(layer: nn.Module) -> dict[int, tuple[int, int]]:
    return {id(p): (p.nbytes, p.numel()) for p in layer.parameters()}
