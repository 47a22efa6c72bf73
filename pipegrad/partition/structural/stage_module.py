"""Stage modules: the uncut model's own code, in which other stages' layers only stand.

[Note: stage modules] A stage module is a shallow copy of the uncut model, of its class, with its
names. Its forward is the model's. The layers of the stage are there. In the place of each other
layer stands a module without parameters, which computes nothing:

- An output that the stage needs was received, and is returned.
- Any other output is filled with nan. The code between layers may ask for its shape, dtype and
  device. If a result depended on its values in spite of [Note: flow], the loss would be nan.

The forward ends behind the last layer of the stage, by an exception. So a stage runs the code
before its first layer, such as the making of masks, but nothing behind its last one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from numbers import Number
from typing import Any

import torch
from torch import Tensor, nn

from pipegrad.errors import StepError
from pipegrad.interop.private import FakeTensorMode, tree_flatten
from pipegrad.partition.structural.calls import Call, Output, Source
from pipegrad.partition.structural.shallow import as_kind, isolated, twin

_MOST_SHAPES = 4096  # that a stage remembers


class _StageEndedError(BaseException):
    """Leaves the model's forward behind the last layer of a stage; no error of the model."""


class Run:
    """The forward of one stage, while it runs.

    Args:
        calls: The calls of all layers of the model.
        first: The first call of the stage.
        end: The call behind its last one.
        inputs: What the stage receives.
        outputs: What it sends.
        written: Outputs of layers into which code outside of layers writes. That code runs on each
            stage, so each has memory of its own for them.

    Attributes:
        first: The argument.
    """

    def __init__(
        self,
        calls: Sequence[Call],
        first: int,
        end: int,
        inputs: Sequence[Source],
        outputs: Sequence[Source],
        *,
        written: Collection[Source],
    ) -> None:
        self._calls = calls
        self.first, self._end = first, end
        self._inputs = tuple(inputs)
        self._outputs = tuple(outputs)
        self._written = written
        self._wanted = {source.call for source in outputs}
        self._values = dict[Source, Tensor]()
        self._shapes = dict[object, Any]()  # see _leaf_of
        self._number: int | None = None  # of the next call; None outside of a forward
        self._inside = ""  # the layer that runs now

    @property
    def is_last(self) -> bool:
        """Whether the stage is the last one."""
        return self._end == len(self._calls)

    @contextmanager
    def forward(self, edges: Sequence[Tensor]) -> Iterator[None]:
        """Takes what the stage receives, for one forward.

        Raises:
            StepError: If it is not as much as the stage takes, or if the model called fewer layers
                than it was cut for.
        """
        if len(edges) != len(self._inputs):
            names = [self._calls[source.call].name_of(source.leaf) for source in self._inputs]
            raise StepError(f"the stage takes {names}, and was given {len(edges)} values")
        self._number = 0
        self._values = dict(zip(self._inputs, edges, strict=True))
        try:
            yield
        finally:
            self._number, self._inside = None, ""
            # A value that is kept here would keep its receive buffer.
            self._values = {}

    def results(self) -> Tensor | tuple[Tensor, ...]:
        """Returns what the stage sends."""
        sent = tuple(self._values[source] for source in self._outputs)
        return sent[0] if len(sent) == 1 else sent

    def enter(self, layer: str) -> int | None:
        """Returns the number of a layer's call; None if it is none that counts."""
        if self._number is None or self._inside:
            return None
        number = self._number
        if number >= self._end or self._calls[number].layer != layer:
            expected = self._calls[number].layer if number < self._end else "no further layer"
            raise StepError(
                f"the model calls layer {layer!r} where it called {expected!r} when it was cut: a "
                f"pipeline needs the same layers in the same order in each step. Switch off what "
                f"skips layers, such as layerdrop; or cut it with example= of the same arguments"
            )
        self._number += 1
        return number

    def own(self, number: int, layer: str, call: Any, args: Any, kwargs: Any) -> Any:  # noqa: ANN401
        """Runs a layer of the stage."""
        self._inside = layer
        result = call(*args, **kwargs)
        self._inside = ""
        if number in self._wanted:
            leaves, structure = tree_flatten(result)
            if structure != self._calls[number].structure:
                raise StepError(
                    f"layer {layer!r} returns {structure}, and returned "
                    f"{self._calls[number].structure} when the model was cut"
                )
            for source in self._outputs:
                if source.call == number:
                    self._values[source] = self._own_memory(source, leaves[source.leaf])
        if number == self._end - 1 and not self.is_last:
            raise _StageEndedError
        return result

    def other(self, number: int, described: nn.Module, args: Any, kwargs: Any) -> Any:  # noqa: ANN401
        """Returns what stands for the outputs of a layer of another stage."""
        call = self._calls[number]
        if call.is_like_first and args and _is_float(args[0]):
            inputs = args[:1]  # to flatten all takes longer than the rest of this function
        else:
            inputs = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        leaves = list[object]()
        for leaf, output in enumerate(call.outputs):
            received = self._values.get(Source(number, leaf))
            if received is not None:
                leaves.append(received)
            elif output.shape is None:
                value = output.value
                if isinstance(value, Number):  # it may be a size of the batch
                    value = self._leaf_of(number, leaf, described, args, kwargs)
                leaves.append(value)
            elif output.like is not None and output.like.leaf < len(inputs):
                tensor = inputs[output.like.leaf]
                shape = (*tensor.shape[: output.like.kept], *output.like.more)
                leaves.append(self._filled(shape, output, inputs))
            else:
                shape = self._leaf_of(number, leaf, described, args, kwargs)
                leaves.append(self._filled(shape, output, inputs))
        for leaf, value in enumerate(leaves):
            if isinstance(value, Tensor):
                leaves[leaf] = self._own_memory(Source(number, leaf), value)
        return call.structure.unflatten(leaves)

    def _own_memory(self, source: Source, value: Tensor) -> Tensor:
        """Returns a value into which code may write, if the model does so."""
        return value.clone() if source in self._written else value

    def _leaf_of(
        self,
        number: int,
        leaf: int,
        described: nn.Module,
        args: Any,  # noqa: ANN401
        kwargs: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401 - a shape, or what is no tensor
        """Returns the shape of an output that no input tells, or a number; once for each shape.

        A run of the layer on fake tensors takes longer than a forward of a small layer.
        """
        inputs = [_kind_of(leaf) for leaf in tree_flatten((args, kwargs))[0]]
        key = (number, leaf, *inputs)
        if key not in self._shapes:
            if len(self._shapes) >= _MOST_SHAPES:
                self._shapes.clear()
            self._shapes[key] = _leaf_of(described, args, kwargs, leaf)
        return self._shapes[key]

    def _filled(self, shape: Sequence[int], output: Output, inputs: Sequence[Tensor]) -> Tensor:
        """Returns what stands for an output that the stage does not need."""
        assert output.dtype is not None
        dtype = self.dtype_of(output.dtype, inputs)
        return filled(shape, dtype, inputs[0].device if inputs else self.device)

    def dtype_of(self, dtype: torch.dtype, inputs: Sequence[Tensor]) -> torch.dtype:
        """Returns the dtype of what had one at the cut: the stage may have been converted."""
        if not dtype.is_floating_point:
            return dtype
        near = (*inputs, *self._values.values())
        return next((x.dtype for x in near if x.is_floating_point()), dtype)

    @property
    def device(self) -> torch.device:
        """Where the values of the stage are."""
        return next((value.device for value in self._values.values()), torch.device("cpu"))

    def refuse_inside(self, layer: str) -> None:
        """Refuses a layer of another stage that is called inside of a layer, or in a backward."""
        if not self._inside:
            raise StepError(
                f"layer {layer!r}, which is on another stage, is called outside of a forward, as "
                f"torch.utils.checkpoint does in a backward: checkpoint layers, and not the code "
                f"between them"
            )
        raise StepError(
            f"layer {self._inside!r} calls layer {layer!r}, which is on another stage: cut the "
            f"model where both are on one stage"
        )


def without_end_hooks(module: nn.Module) -> None:
    """Takes the hooks from a stage before the last one that see what the model returns."""
    for name in ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks"):
        vars(module)[name] = OrderedDict[int, Any]()


class OwnLayer(nn.Module):
    """A layer of the stage."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever the layer takes
        run, layer, described = vars(self)["_pipegrad_run"]
        number = run.enter(layer)
        if number is None:
            return super().__call__(*args, **kwargs)
        if number < run.first:  # a layer of several stages
            return run.other(number, described, args, kwargs)
        return run.own(number, layer, super().__call__, args, kwargs)


class OtherLayer(nn.Module):
    """What stands in the place of another stage's layer. It has no parameters."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever the layer takes
        run, layer, described = vars(self)["_pipegrad_run"]
        number = run.enter(layer)
        if number is None:
            run.refuse_inside(layer)
        return run.other(number, described, args, kwargs)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the layer has
        try:
            return nn.Module.__getattr__(self, name)
        except AttributeError:
            run, _, described = vars(self)["_pipegrad_run"]
            value = getattr(described, name)
            if isinstance(value, Tensor):
                return filled(value.shape, run.dtype_of(value.dtype, ()), run.device)
            return value


class StageModule(nn.Module):
    """The uncut model on one stage."""

    def forward(self, *edges: Tensor, **batch: object) -> Any:  # noqa: ANN401 - as the model
        """Returns what the stage sends; on the last stage what the model returns.

        Args:
            *edges: What earlier stages send.
            **batch: The arguments of the uncut model's forward, the same on every stage.
        """
        run: Run = vars(self)["_pipegrad_run"]
        with run.forward(edges):
            try:
                returned = super().forward(**batch)
            except _StageEndedError:
                return run.results()
        if not run.is_last:
            raise StepError("the model ended before the last layer of the stage: see layerdrop")
        return returned


def own_layer(layer: nn.Module, name: str, described: nn.Module, run: Run) -> nn.Module:
    """Returns a layer that counts its calls. It has the tensors of `layer`, in the same tables.

    Args:
        layer: The layer.
        name: Of the layer.
        described: As `other_layer`.
        run: Of the stage.
    """
    result = as_kind(twin(layer), OwnLayer)
    vars(result)["_pipegrad_run"] = run, name, described
    return result


def other_layer(name: str, described: nn.Module, run: Run) -> nn.Module:
    """Returns what stands in the place of a layer.

    Args:
        name: Of the layer.
        described: The layer, on the meta device; see `without_memory`.
        run: Of the stage.
    """
    result = as_kind(nn.Module(), OtherLayer, type(described))
    vars(result)["_pipegrad_run"] = run, name, described
    return result


def without_memory(layer: nn.Module) -> nn.Module:
    """Returns a copy of a layer on the meta device."""

    def on_meta(tensor: Tensor) -> Tensor:
        copied = torch.empty_like(tensor, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        return nn.Parameter(copied, tensor.requires_grad) if is_parameter else copied

    return isolated(layer, on_meta)


def _is_float(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def filled(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a tensor of nan, or of zeros if there is none, with the memory of one number."""
    value = torch.nan if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), value, dtype=dtype, device=device).expand(tuple(shape))


def _kind_of(leaf: object) -> object:
    """Returns that of an input on which shapes depend, in place of values and of their memory."""
    if isinstance(leaf, Tensor):
        return leaf.shape
    return leaf if isinstance(leaf, Number | str | None) else type(leaf)


def _leaf_of(described: nn.Module, args: Any, kwargs: Any, leaf: int) -> Any:  # noqa: ANN401
    """Returns a leaf of what a layer returns, and of a tensor the shape. Nothing is computed."""
    leaves, structure = tree_flatten((args, kwargs))
    state = {**dict(described.named_parameters()), **dict(described.named_buffers())}
    with FakeTensorMode(), torch.no_grad():
        fake = [
            torch.empty(leaf.shape, dtype=leaf.dtype) if isinstance(leaf, Tensor) else leaf
            for leaf in leaves
        ]
        tensors = {name: torch.empty(x.shape, dtype=x.dtype) for name, x in state.items()}
        args, kwargs = structure.unflatten(fake)
        returned = torch.func.functional_call(described, tensors, args, kwargs)
    result = tree_flatten(returned)[0][leaf]
    return result.shape if isinstance(result, Tensor) else result
