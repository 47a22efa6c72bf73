"""Recorder: sees every operator of a run of the model, and every call of a layer.

What it notes, and why, is in [Note: flow] in `flow`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from pipegrad.errors import TopologyError
from pipegrad.interop.private import (
    TorchDispatchMode,
    TreeSpec,
    storage_key,
    tree_flatten,
)
from pipegrad.partition.structural.calls import Call, Like, Output, Returned, Source
from pipegrad.partition.structural.shallow import as_kind, twin
from pipegrad.pipeline.stage import fields_of

_REPEATS = 3  # of a layer that is measured; the shortest time counts


class RecordedLayer(nn.Module):
    """A layer whose calls are recorded."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever the layer takes
        recorder = vars(self)["_recorder"]
        return recorder.call(vars(self)["_layer_name"], self, super().__call__, args, kwargs)


def recorded_layer(recorder: Recorder, name: str, layer: nn.Module) -> nn.Module:
    """Returns a layer that tells the recorder of its calls."""
    # A twin, as in stages: neither sees a layer that the model keeps in a plain list.
    copied = as_kind(twin(layer), RecordedLayer)
    vars(copied).update(_recorder=recorder, _layer_name=name)
    return copied


@dataclass(frozen=True)
class _Origin:
    """What a tensor was computed from."""

    sources: frozenset[Source] = frozenset()
    parameters: frozenset[str] = frozenset()
    draws: frozenset[int] = frozenset()
    writers: frozenset[str] = frozenset()  # layers that wrote into a tensor that they were given

    def __or__(self, other: _Origin) -> _Origin:
        return _Origin(
            self.sources | other.sources,
            self.parameters | other.parameters,
            self.draws | other.draws,
            self.writers | other.writers,
        )


class Recorder(TorchDispatchMode):
    """Sees every operator, and every call of a layer.

    Args:
        model: The model, which nobody else uses.
        timed: Whether to measure layers.
    """

    def __init__(self, model: nn.Module, *, timed: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        named = (*model.named_parameters(), *model.named_buffers())
        self._names = {id(tensor): name for name, tensor in named}
        self._buffers = {
            storage_key(buffer.untyped_storage()): name for name, buffer in model.named_buffers()
        }
        self._timed = timed
        self.calls: list[Call] = []
        self._times: dict[str, int] = {}  # how often each layer was called
        self._origins: dict[int, _Origin] = {}  # by id of a tensor
        self._sources: dict[int, Source] = {}  # by id of a tensor that a layer returned
        # By storage: a write into a view changes all tensors of its memory. They are kept alive,
        # so no id and no key of a storage is used again.
        self._by_storage: dict[int, list[Tensor]] = {}
        self.written = set[Source]()
        self._num_draws = 0
        # What code decided by the values of tensors: everything behind it depends on these.
        self._decided = _Origin()
        self._is_inside = False  # of a layer
        # Storages of what the layer was given, and those into which it wrote.
        self._given: dict[int, Tensor] = {}
        self._overwritten = set[int]()
        self._flops = 0  # of the layer

    # ANN401: an operator takes and returns anything.
    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: object,
        args: Any = (),  # noqa: ANN401
        kwargs: Any = None,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        written = [
            value
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if self._is_inside:
            if count := flop_registry.get(func._overloadpacket):
                self._flops += count(*args, **kwargs, out_val=result)
            keys = {storage_key(tensor.untyped_storage()) for tensor in _tensors(written)}
            self._overwritten |= keys & self._given.keys()
            return result
        origin = self._origin_of((args, kwargs))
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._num_draws += 1
            origin |= _Origin(draws=frozenset({self._num_draws}))
        if torch.Tag.data_dependent_output in func.tags and not _tensors(result):
            self._decided |= origin
        for tensor in _tensors(result):
            self._set(tensor, origin)
        for tensor in _tensors(written):
            self._write(tensor, origin)
        return result

    def call(
        self,
        name: str,
        layer: nn.Module,
        function: Callable[..., Any],
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> Any:  # noqa: ANN401 - whatever the layer returns
        """Runs a layer, and notes it."""
        if self._is_inside:
            return function(*args, **kwargs)  # a layer inside of a layer
        inputs = _tensors((args, kwargs))
        origin = self._origin_of(inputs) | self._decided
        _refuse_hidden(name, "is given", (args, kwargs))
        _refuse_overwritten(origin)
        self._is_inside, self._flops, seconds = True, 0, 0.0
        self._overwritten.clear()
        try:
            own_args, own_kwargs = _differentiable(args, kwargs)
            copies = _tensors((own_args, own_kwargs))
            self._given = {
                storage_key(copied.untyped_storage()): tensor
                for copied, tensor in zip(copies, inputs, strict=True)
            }
            leaves, structure, saved = _outputs_of(layer, function, own_args, own_kwargs)
            flops, overwritten = self._flops, [self._given[key] for key in self._overwritten]
            if self._timed:
                seconds = min(_seconds(layer, function, args, kwargs) for _ in range(_REPEATS))
        finally:
            self._is_inside = False
        number, before = len(self.calls), self._times.get(name, 0)
        self._times[name] = before + 1
        self.calls.append(
            Call(
                name=f"{name}#{before}" if before else name,
                layer=name,
                needs=origin.sources,
                parameters=origin.parameters,
                draws=origin.draws,
                outputs=tuple(_output(layer, leaf, inputs) for leaf in leaves),
                structure=structure,
                flops=flops,
                saved_bytes=sum(saved.values()),
                seconds=seconds,
            )
        )
        for leaf, value in enumerate(leaves):
            if isinstance(value, Tensor):
                self._sources[id(value)] = Source(number, leaf)
                self._set(value, _Origin(frozenset({Source(number, leaf)})))
        for tensor in overwritten:
            self._write(tensor, _Origin(writers=frozenset({name})))
        _refuse_hidden(name, "returns", leaves)
        return structure.unflatten(leaves)

    def seen(self, returned: object) -> object:
        """Returns what a model returned, with `Returned` in the place of tensors."""
        leaves, structure = tree_flatten(returned)
        _refuse_overwritten(self._origin_of(leaves))
        return structure.unflatten(
            [
                Returned(*_fields(self._origin_of(leaf) | self._decided))
                if isinstance(leaf, Tensor)
                else leaf
                for leaf in leaves
            ]
        )

    def refuse_new_buffers(self, before: Mapping[str, Tensor], run: nn.Module) -> None:
        """Refuses code outside of layers that put other tensors in the place of buffers.

        A buffer that is not saved may be made anew, if it does not depend on layers: a cache.
        """
        saved = run.state_dict(keep_vars=True)
        for name, buffer in run.named_buffers():
            origin = self._origins.get(id(buffer))  # None inside of layers
            if buffer is not before.get(name) and origin and (name in saved or origin.sources):
                raise TopologyError(_writes(name))

    def _origin_of(self, values: object) -> _Origin:
        origin = _Origin()
        for tensor in _tensors(values):
            if tensor_name := self._names.get(id(tensor)):
                origin |= _Origin(parameters=frozenset({tensor_name}))
            origin |= self._origins.get(id(tensor), _Origin())
        return origin

    def _set(self, tensor: Tensor, origin: _Origin) -> None:
        self._origins[id(tensor)] = origin
        self._by_storage.setdefault(storage_key(tensor.untyped_storage()), []).append(tensor)

    def _write(self, tensor: Tensor, origin: _Origin) -> None:
        """Notes that a tensor outside of layers was written into."""
        key = storage_key(tensor.untyped_storage())
        if key in self._buffers:
            raise TopologyError(_writes(self._buffers[key]))
        self._set(tensor, self._origins.get(id(tensor), _Origin()) | origin)
        for other in self._by_storage[key]:
            self._origins[id(other)] = self._origins[id(other)] | origin
            if id(other) in self._sources:
                self.written.add(self._sources[id(other)])


def _outputs_of(
    layer: nn.Module,
    function: Callable[..., Any],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
) -> tuple[list[object], TreeSpec, dict[int, int]]:
    """Runs a layer with a graph, so that it shows what it keeps for its backward.

    Args:
        layer: The layer.
        function: Runs it.
        args: Of the layer, as `_differentiable` returns them.
        kwargs: Likewise.

    Returns:
        The leaves of what it returns, how they hang together, and the bytes of each storage that it
        keeps.
    """
    saved, alive = dict[int, int](), list[object]()

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage_key(storage)] = storage.nbytes()
        alive.append(storage)  # its key is not used again
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        leaves, structure = tree_flatten(function(*args, **kwargs))
    for parameter in layer.parameters():
        saved.pop(storage_key(parameter.untyped_storage()), None)
    leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return leaves, structure, saved


def _seconds(
    layer: nn.Module,
    function: Callable[..., Any],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
) -> float:
    """Returns how long a layer's forward and backward take. No gradient is kept."""
    args, kwargs = _differentiable(args, kwargs)
    began = time.perf_counter()
    with torch.enable_grad():
        outputs = [x for x in _tensors(function(*args, **kwargs)) if x.requires_grad]
        wanted = [x for x in (*_tensors((args, kwargs)), *layer.parameters()) if x.requires_grad]
        made: list[Tensor | None] = [*outputs]
        if outputs:
            ones = [torch.ones_like(output) for output in outputs]
            made += torch.autograd.grad(outputs, wanted, ones, allow_unused=True)
    for tensor in [x for x in made if x is not None][-1:]:
        tensor.flatten()[:1].tolist()  # the host waits for the device
    return time.perf_counter() - began


def _fields(origin: _Origin) -> tuple[frozenset[Source], frozenset[str], frozenset[int]]:
    return origin.sources, origin.parameters, origin.draws


def _tensors(values: object) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(values)[0] if isinstance(leaf, Tensor)]


@torch.enable_grad()
def _differentiable(args: tuple[object, ...], kwargs: Mapping[str, object]) -> Any:  # noqa: ANN401
    """Returns arguments whose tensors are in a graph and in memory of their own.

    They are no leaves of the graph, because a layer may write into them.
    """
    leaves, structure = tree_flatten((args, kwargs))
    return structure.unflatten([_copy(x) if isinstance(x, Tensor) else x for x in leaves])


def _copy(tensor: Tensor) -> Tensor:
    has_gradient = tensor.is_floating_point() or tensor.is_complex()
    return tensor.detach().requires_grad_(has_gradient).clone()


def _refuse_hidden(layer: str, verb: str, values: object) -> None:
    """Refuses tensors inside of objects in which torch does not look for tensors."""
    for leaf in tree_flatten(values)[0]:
        inside = fields_of(leaf) or getattr(leaf, "__dict__", None) or {}
        if not isinstance(leaf, Tensor | nn.Module) and _tensors([*inside.values()]):
            raise TopologyError(
                f"layer {layer!r} {verb} a {type(leaf).__name__}, and torch does not see the "
                f"tensors inside: take a tuple or a dict, or register a dataclass with "
                f"torch.export.register_dataclass"
            )


def _refuse_overwritten(origin: _Origin) -> None:
    """Refuses values that a layer has changed in place, behind that layer."""
    if origin.writers:
        raise TopologyError(
            f"layers {sorted(origin.writers)} change a tensor in place that they are given, and "
            f"code behind them uses it: stages would have different values of it. Use what the "
            f"layers return"
        )


def _writes(buffer: str) -> str:
    return (
        f"code outside of layers writes into buffer {buffer!r}: every stage runs this code, and "
        f"stages would have different values of it. Put the buffer and the code into a module of "
        f"its own, which is then a layer"
    )


def _output(layer: nn.Module, leaf: object, inputs: Sequence[Tensor]) -> Output:
    if not isinstance(leaf, Tensor):
        return Output(value=leaf)
    # Most layers keep the shape, an embedding adds a dimension, and a Linear changes the last one.
    # Others may change it too, such as a convolution, but not to the same size in each batch.
    lengths = {length for tensor in inputs for length in tensor.shape}
    candidates = [
        Like(number, kept, tuple(leaf.shape[kept:]))
        for lost in ((0, 1) if isinstance(layer, nn.Linear) else (0,))
        for number, tensor in enumerate(inputs)
        for kept in [tensor.dim() - lost]
        if kept > 0 and tensor.shape[:kept] == leaf.shape[:kept] and leaf.dim() - kept <= 1
        # What is new is a constant only if the sample has no such length.
        if lengths.isdisjoint(leaf.shape[kept:])
    ]
    like = min(candidates, key=lambda one: len(one.more), default=None)
    return Output(shape=leaf.shape, dtype=leaf.dtype, like=like)


def shapes_of(sample: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the tensors of a sample, by name."""
    return {name: tuple(x.shape) for name, x in sample.items() if isinstance(x, Tensor)}
