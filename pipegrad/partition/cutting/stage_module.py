"""Stage modules: the uncut model's own code, with placeholders of other stages' layers.

[Note: stage modules] A stage module is a shallow copy of the uncut model, of its class, with its
names. Its forward is the model's. It has the layers of the stage. Each other layer is replaced by a
placeholder: a module without parameters, which computes nothing. The placeholder returns:

- A received value, for an output that the stage needs.
- The argument, for an output that is an argument of the layer, such as the lengths of texts.
- A tensor filled with nan, for any other output. The code between layers may read its shape, dtype
  and device. If a result depended on its values in spite of [Note: flow], the loss would be nan.

An exception ends the forward after the last layer of the stage. The stage therefore runs the code
before its first layer, such as the making of masks, but no code after its last one.

[Note: skipped layers] A model's code skips the layers of a missing input. For example, it skips an
image encoder if there are no images. Therefore a forward may skip a call if it lacks all those
inputs of the sample from which the call was computed. All ranks skip the same calls, because they
have the same batch, and no later stage reads the missing outputs. One number travels instead of
such an output, with a gradient if the output has one in other microbatches, because in the schedule
each value has a gradient always or never. Any other missing call raises `StepError`, because it may
be skipped at random.
"""
# ruff: noqa: ANN401 - layers take and return anything

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import cache, partial
from itertools import islice
from numbers import Number
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from pipegrad.errors import StepError
from pipegrad.interop.private import TreeSpec, tree_flatten, tree_map
from pipegrad.partition.cutting.calls import (
    Call,
    Flow,
    Output,
    Source,
    Watch,
    apply,
    contents_of,
    find,
    kinds_of,
    restore,
    roots_of,
)
from pipegrad.partition.cutting.stand_ins import computed_leaves, filled

_MOST_SHAPES = 4096  # that a stage remembers
CPU = torch.device("cpu")


class _StageEndedError(BaseException):
    """Leaves the model's forward after the last layer of a stage.

    It is no Exception, because code of a model may catch every Exception and continue.
    """


class Run:
    """The forward of one stage, while it runs.

    Attributes:
        flow: The recorded run of the uncut model.
        first: Index of the stage's first call.
        layers: Layers of the stage, by name. Their tensors determine its device.
    """

    def __init__(
        self,
        flow: Flow,
        first: int,
        end: int,
        *,
        inputs: Sequence[Source],
        outputs: Sequence[Source],
    ) -> None:
        self.flow, self.first, self._end = flow, first, end
        self._inputs, self._outputs = tuple(inputs), tuple(outputs)
        self.layers: Mapping[str, nn.Module] = {}
        self._values = dict[Source, Tensor]()
        self._shapes = dict[object, list[Any]]()  # see _computed
        self._by_value = set[int]()  # calls whose shapes depend on values of integers
        self._number: int | None = None  # of the next call; None outside of a forward
        self._inside = ""  # the layer that runs now
        self._missing = frozenset[str]()  # inputs of the sample that this forward lacks
        self._given = set[str]()  # tensors that it has
        self._undo = list[Callable[[], None]]()  # undo changes by placeholders in this forward

    @property
    def is_running(self) -> bool:
        """True if the stage is in a forward."""
        return self._number is not None

    @property
    def is_last(self) -> bool:
        """True if the stage is the last one."""
        return self._end == len(self.flow.calls)

    @contextmanager
    def forward(self, edges: Sequence[Tensor], batch: Mapping[str, object]) -> Iterator[None]:
        """Holds the received values and the state of one forward inside of the context.

        Raises:
            StepError: If the number of `edges` is not the stage's number of inputs.
        """
        if len(edges) != len(self._inputs):
            names = [self.flow.calls[source.call].name_of(source.leaf) for source in self._inputs]
            raise StepError(f"the stage takes {names}, and was given {len(edges)} values")
        self._number = 0
        self._missing = frozenset(name for name in self.flow.sample if _lacks(batch.get(name)))
        self._given = {name for name, value in batch.items() if isinstance(value, Tensor)}
        self._values = dict(zip(self._inputs, edges, strict=True))
        try:
            yield
        finally:
            for back in reversed(self._undo):
                back()
            self._undo.clear()
            self._number, self._inside = None, ""
            # A value that is kept here would keep its memory.
            self._values = {}

    def results(self, module: nn.Module) -> Tensor | tuple[Tensor, ...]:
        """Returns the outputs of the stage, whose module is `module`."""
        if self._missing:
            sent = tuple(self._unskipped(source, module) for source in self._outputs)
        else:
            sent = tuple(self._values[source] for source in self._outputs)
        return sent[0] if len(sent) == 1 else sent

    def _unskipped(self, source: Source, module: nn.Module) -> Tensor:
        """Returns an output, or one number if its call was skipped."""
        value = self._values.get(source)
        if value is None:
            dtype = self.flow.calls[source.call].outputs[source.leaf].dtype
            assert dtype is not None
            value = torch.zeros(1, dtype=self.dtype_of(dtype, ()), device=self.device)
        is_real = value.is_floating_point() or value.is_complex()
        if not is_real or value.requires_grad or not torch.is_grad_enabled():
            return value
        # A clone, because a schedule that splits backwards treats leaves as parameters.
        is_trained = source.call in self._trained(module)
        return value.detach().requires_grad_().clone() if is_trained else value

    def _trained(self, module: nn.Module) -> set[int]:
        """Returns the calls whose outputs have a gradient in a forward that skips nothing."""
        trained, named = set[int](), dict(module.named_parameters())
        for number, call in enumerate(self.flow.calls[self.first : self._end], self.first):
            sources = call.origin.sources
            read = [self._values[source] for source in sources if source in self._inputs]
            read += [named[name] for name in call.origin.parameters & named.keys()]
            read += self.layers[call.layer].parameters()
            if any(x.requires_grad for x in read) or any(x.call in trained for x in sources):
                trained.add(number)
        return trained

    def enter(self, layer: str) -> int | None:
        """Returns the number of a layer's call; None outside of a forward or inside of a layer."""
        if self._number is None or self._inside:
            return None
        begin, number = self._number, self._number_of(layer, self._number)
        if begin < self._end <= number and not self.is_last:
            raise _StageEndedError  # the last calls of the stage are skipped
        if number >= self._end:
            raise self._refused(layer, "no further layer")
        self._number = number + 1
        return number

    def _number_of(self, layer: str, begin: int) -> int:
        """Returns the number of a layer's call, after skipped calls; see [Note: skipped layers]."""
        calls, inputs, ahead = self.flow.calls, self.flow.inputs, begin
        while ahead < len(calls) and inputs[ahead] and inputs[ahead] <= self._missing:
            ahead += 1
        # A layer may be called for several inputs. The expected call is the first one whose input
        # is there, but a model may also compute a replacement of a missing input.
        expected = calls[ahead].layer if ahead < len(calls) else "no further layer"
        skipped = [call.layer for call in calls[begin:ahead]]
        if layer not in (expected, *skipped):
            raise self._refused(layer, expected)
        return ahead if layer == expected else begin + skipped.index(layer)

    def _refused(self, layer: str, expected: str) -> StepError:
        """Returns the error for a call that was another one at the cut."""
        more = sorted(x for x in self._given - self.flow.sample.keys() if not x.endswith("labels"))
        lacks = f". That example had no {more}" if more else ""
        return StepError(
            f"the model calls layer {layer!r} where it called {expected!r} when it was cut: a "
            f"pipeline needs the same layers in the same order in each step. Switch off what "
            f"skips layers, such as layerdrop; or cut it with example= of the same "
            f"arguments{lacks}"
        )

    def run(self, number: int, layer: nn.Module, call: Any, args: Any, kwargs: Any) -> Any:
        """Runs a layer of the stage."""
        known = self.flow.calls[number]
        wanted = [source for source in self._outputs if source.call == number]
        at = known.structure.num_leaves
        reads = any(source.leaf >= at for source in wanted)
        reading = Watch(layer, args, kwargs, known.changes if reads else ())
        if known.cleared and not self.is_last:  # the stage ends before the code that clears them
            roots = roots_of(layer, args, kwargs)
            boxes = [find(roots, known.changes[number].path) for number in known.cleared]
            self._undo += [partial(restore, box, contents_of(box)) for box in boxes]
        self._inside = known.layer
        with reading.listening():
            result = call(*args, **kwargs)
        self._inside = ""
        if layer.training and not self.is_last and kinds_of(result) != known.kinds:
            raise _differs(known, result)
        if wanted:
            leaves, structure = tree_flatten(result)
            if structure != known.structure:
                raise _differs(known, result)
            if reads:
                leaves += self._changed(
                    known, layer, reading.values(), {source.leaf for source in wanted}
                )
            for source in wanted:
                if not isinstance(leaves[source.leaf], Tensor):
                    raise _differs(known, result)
                self._values[source] = self._own_memory(source, leaves[source.leaf])
        if number == self._end - 1 and not self.is_last:
            raise _StageEndedError
        return result

    def _changed(
        self, call: Call, layer: nn.Module, values: Sequence[list[Any]], wanted: Set[int]
    ) -> list[Any]:
        """Returns the leaves of a layer's changes; other stages read the leaves in `wanted`."""
        leaves = list[Any]()
        for change, structure, value in zip(call.changes, call.structures, values, strict=True):
            changed, spec = tree_flatten(value)
            at = call.structure.num_leaves + len(leaves)
            known = call.outputs[at : at + structure.num_leaves]
            lost = {at + i for i, x in enumerate(changed) if not isinstance(x, Tensor)} & wanted
            if spec == structure and not lost:
                leaves += changed
                continue
            if layer.training:
                raise StepError(
                    f"layer {call.layer!r} does not change {change} as it did "
                    f"when the model was cut, and another stage reads it: cut the model in the "
                    f"mode, and with the arguments, of the steps"
                )
            # Filled, because a layer that changes this only in training has no reader now.
            leaves += [
                self._filled(output.shape, output, ()) if output.shape is not None else output.value
                for output in known
            ]
        return leaves

    def other(
        self, number: int, standing: nn.Module, described: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        """Applies the changes of another stage's layer; returns placeholders of its outputs."""
        call = self.flow.calls[number]
        inputs = tree_flatten((args, kwargs))[0]
        computed = partial(self._computed, number, described, args, kwargs)
        leaves = list[Any]()
        # Compute all shapes first, because a change may be in an input of the next shape.
        for leaf in range(len(call.outputs) if self.flow.is_heard else call.num_returned):
            leaves.append(self._leaf(Source(number, leaf), inputs, leaves, computed))
        end = call.structure.num_leaves
        result = call.structure.unflatten(leaves[:end])
        roots = roots_of(standing, args, kwargs) if call.changes else {}
        is_own = isinstance(standing, OwnLayer)
        for change, structure in zip(call.changes, call.structures, strict=True):
            at, end = end, end + structure.num_leaves
            if end > len(leaves):
                break  # no code reads the values of hooks
            values = leaves[at:end]
            tensors = [i for i in range(at, end) if isinstance(leaves[i], Tensor)]
            is_received = all(Source(number, i) in self._values for i in tensors)
            if is_own and change.is_inside and not is_received:
                continue  # the layer is on this stage, and keeps its own state
            back = apply(change, structure.unflatten(values), find(roots, change.path))
            if change.is_inside and not is_own:
                self._undo.append(back)
        return result

    def _leaf(
        self,
        source: Source,
        inputs: Sequence[object],
        before: Sequence[object],
        computed: Callable[[], list[Any]],
    ) -> object:
        """Returns the placeholder of an output; `before` has the outputs before it."""
        call = self.flow.calls[source.call]
        output = call.outputs[source.leaf]
        if (received := self._values.get(source)) is not None:
            return self._own_memory(source, received)
        if output.same is not None:
            return before[output.same]
        if output.shape is None:
            # A number may be a size of the batch, except the arguments of a layer's own hooks.
            is_size = isinstance(output.value, Number) and source.leaf < call.num_returned
            return computed()[source.leaf] if is_size else output.value
        is_told = output.like is not None and len(inputs) == call.num_inputs
        near: Any = inputs[output.like or 0] if is_told else None
        if output.is_input and is_told:
            return self._own_memory(source, near) if isinstance(near, Tensor) else near
        shape: Any = output.shape
        if isinstance(near, Tensor):
            shape = near.shape
        elif shape:
            shape = computed()[source.leaf]
        if not isinstance(shape, torch.Size):
            return shape  # None in this batch
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        return self._own_memory(source, self._filled(shape, output, tensors))

    def _own_memory(self, source: Source, value: Tensor) -> Tensor:
        """Returns a value into which code may write, if the model does so."""
        return value.clone() if source in self.flow.written else value

    def _computed(self, number: int, described: nn.Module, args: Any, kwargs: Any) -> list[Any]:
        """Returns the result of `computed_leaves`, which runs once for each shape of the inputs.

        Results are kept, because a run on fake tensors takes longer than a small layer's forward.
        """
        inputs = tree_flatten((args, kwargs))[0]
        key: tuple[object, ...] = (number, *map(_kind_of, inputs))
        if number in self._by_value:
            key += tuple(f"{x.tolist()}" for x in inputs if _is_whole(x))
        if key not in self._shapes:
            if len(self._shapes) >= _MOST_SHAPES:
                self._shapes.clear()
            call = self.flow.calls[number]
            found, needs_values = computed_leaves(call, described, args, kwargs)
            if needs_values and number not in self._by_value:
                self._by_value.add(number)
                return found  # the next call has a key with values
            self._shapes[key] = found
        return self._shapes[key]

    def _filled(self, shape: Sequence[int], output: Output, inputs: Sequence[Tensor]) -> Tensor:
        """Returns a filled tensor for an output that the stage does not need."""
        assert output.dtype is not None
        dtype = self.dtype_of(output.dtype, inputs)
        return filled(shape, dtype, inputs[0].device if inputs else self.device)

    def dtype_of(self, dtype: torch.dtype, inputs: Sequence[Tensor]) -> torch.dtype:
        """Returns the dtype now for a dtype at the cut: the stage may have been converted."""
        if not dtype.is_floating_point:
            return dtype
        near = (*inputs, *self._values.values())
        return next((x.dtype for x in near if x.is_floating_point()), dtype)

    @property
    def device(self) -> torch.device:
        """The device of the stage."""
        held = (tensor for layer in self.layers.values() for tensor in layer.parameters())
        return next((x.device for x in (*self._values.values(), *islice(held, 1))), CPU)

    def refused_inside(self, layer: str) -> StepError:
        """Returns the error for a call of another stage's layer that no placeholder can serve."""
        if self._inside:
            return StepError(
                f"layer {self._inside!r} calls layer {layer!r}, which is on another stage: cut the "
                f"model where both are on one stage"
            )
        if self.is_running:
            return StepError(
                f"code outside of layers calls what is inside of layer {layer!r}, which is on "
                f"another stage: call the layer, or cut the model where both are on one stage"
            )
        return StepError(
            f"layer {layer!r}, which is on another stage, is called outside of a forward, as "
            f"torch.utils.checkpoint does in a backward: checkpoint layers, and not the code "
            f"between them"
        )


class OwnLayer(nn.Module):
    """A layer of the stage."""

    def _pipegrad_call(self, call: Any, args: Any, kwargs: Any) -> Any:
        """Runs the layer, or returns the outputs of an earlier stage's call."""
        run, layer, described = vars(self)["_pipegrad_run"]
        number = run.enter(layer)
        if number is None:
            return call(*args, **kwargs)
        if number < run.first:  # a layer of several stages
            return run.other(number, self, described, args, kwargs)
        return run.run(number, self, call, args, kwargs)


class StageModule(nn.Module):
    """The uncut model on one stage."""

    def forward(self, *edges: Tensor, **batch: object) -> Any:
        """Returns the outputs of the stage; on the last stage, the outputs of the model."""
        run: Run = vars(self)["_pipegrad_run"]
        if run.flow.writes_inputs:
            # Clone, because all stages of a rank, and a recomputed forward, get the same tensors.
            copied = cache(Tensor.clone)  # one clone for a tensor that is there twice
            batch = tree_map(lambda x: copied(x) if isinstance(x, Tensor) else x, batch)
        with run.forward(edges, batch):
            try:
                returned = super().forward(**batch)
            except _StageEndedError:
                return run.results(self)
        if not run.is_last:
            raise StepError("the model ended before the last layer of the stage: see layerdrop")
        return returned


def _differs(call: Call, result: object) -> StepError:
    """Returns the error for a result with other tensors than at the cut.

    It is an error, because stages without the layer would continue with the tensors of the cut.
    """
    found, structure = tree_flatten(result)
    known = [x.value if x.shape is None else True for x in call.outputs]
    return StepError(
        f"layer {call.layer!r} returns {_in_words(found, structure)}, and returned "
        f"{_in_words(known, call.structure)} when the model was cut: other stages need the same "
        f"tensors in each step. Return one always, such as zeros; or cut the model with the "
        f"example= and in the mode of the steps"
    )


def _in_words(leaves: Sequence[object], structure: TreeSpec) -> str:
    """Returns the structure of a layer's result in words, without values."""
    words = [
        None if x is None else "tensor" if x is True or isinstance(x, Tensor) else "other"
        for x in leaves[: structure.num_leaves]
    ]
    return f"{structure.unflatten(words)}"


def _lacks(value: object) -> bool:
    """True if an input is missing, or has no rows."""
    return value is None or (isinstance(value, Tensor) and value.dim() > 0 and not len(value))


def _is_whole(leaf: object) -> TypeGuard[Tensor]:
    """True if an input is a tensor of integers."""
    return isinstance(leaf, Tensor) and not (leaf.is_floating_point() or leaf.is_complex())


def _kind_of(leaf: object) -> object:
    """Returns a key of an input without its values, because shapes do not depend on them."""
    if isinstance(leaf, Tensor):
        return leaf.shape
    return leaf if isinstance(leaf, Number | str | None) else type(leaf)
