"""Recorder: sees every operator of a run of the model, and every call of a layer.

What it notes, and why, is in [Note: flow] in `flow`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from pipegrad.errors import TopologyError
from pipegrad.interop.private import (
    TorchDispatchMode,
    storage_key,
    tree_flatten,
    weak_storage,
)
from pipegrad.partition.structural.calls import Call, Like, Output, Returned, Source
from pipegrad.partition.structural.changes import Change, Watch, contents_of, find, put, roots_of
from pipegrad.partition.structural.shallow import as_kind
from pipegrad.pipeline.stage import fields_of

_REPEATS = 3  # of a layer that is measured; the shortest time counts


class RecordedLayer(nn.Module):
    """A layer whose calls are recorded."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever the layer takes
        recorder = vars(self)["_recorder"]
        return recorder.call(vars(self)["_layer_name"], self, super().__call__, args, kwargs)


def recorded_layer(recorder: Recorder, name: str, layer: nn.Module) -> None:
    """Makes a layer of a model that nobody else uses tell the recorder of its calls."""
    vars(as_kind(layer, RecordedLayer)).update(_recorder=recorder, _layer_name=name)


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
        self._inputs = set[int]()  # storages of what the model was given
        self.writes_inputs = False
        self._num_draws = 0
        # What code decided by the values of tensors: everything behind it depends on these.
        self._decided = _Origin()
        self._layer = ""  # that runs now
        self._is_quiet = False  # what runs is the recorder's own
        self._followed: list[tuple[nn.Module, list[tuple[Change, list[Any]]]]] = []  # of each call
        self._heard = set[int]()  # by id: what hooks heard
        self.is_heard = False  # whether any of that is used
        # By storage: the layer that made it of what it was given or holds, or wrote into it.
        # No key is used again as long as there is a weak reference.
        self._made: dict[int, tuple[str, object]] = {}
        self._named = {storage_key(tensor.untyped_storage()) for _, tensor in named}
        # Of the layer that runs, by storage: what it was given, what it made, what else it read,
        # and into which of what it was given it wrote.
        self._given: dict[int, Tensor] = {}
        self._fresh = set[int]()
        self._known = set[int]()
        self._overwritten = set[int]()
        self._reads = _Origin()
        self._flops = 0

    # ANN401: an operator takes and returns anything.
    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: object,
        args: Any = (),  # noqa: ANN401
        kwargs: Any = None,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        if self._is_quiet:
            return func(*args, **kwargs)
        if self._layer:
            self._read((args, kwargs))
        result = func(*args, **kwargs)
        written = [
            value
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if self._layer:
            if count := flop_registry.get(func._overloadpacket):
                self._flops += count(*args, **kwargs, out_val=result)
            self._computed((args, kwargs), result, written)
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
        if self._layer:
            return function(*args, **kwargs)  # a layer inside of a layer
        inputs = _tensors((args, kwargs))
        origin = self._origin_of(_direct((args, *kwargs.values()))) | self._decided
        _refuse_overwritten(origin)
        self._layer, self._reads, self._flops, seconds = name, origin, 0, 0.0
        self._fresh, self._known, self._overwritten = set(), set(), set()
        try:
            clones = _Clones()
            with self._quietly():
                own_args, own_kwargs = clones.of(args), clones.of(kwargs)
            self._given = clones.given
            watch = Watch(layer, own_args, own_kwargs)
            with watch.listening():
                returned, saved = _outputs_of(layer, function, own_args, own_kwargs)
            flops, overwritten = self._flops, [self._given[key] for key in self._overwritten]
            followed, lost = _followed(name, watch.changes())
            clones.put_back()
            if self._timed:
                watch = Watch(layer, args, kwargs)
                with self._quietly():
                    seconds = min(_seconds(layer, function, args, kwargs) for _ in range(_REPEATS))
                watch.restore()
        finally:
            self._layer = ""
        leaves, structure = tree_flatten(returned)
        _refuse_hidden(name, "returns", leaves)
        handed = [tree_flatten(values) for _, values in followed]
        every = [*leaves, *(leaf for more, _ in handed for leaf in more)]
        for tensor in _tensors(every):  # what is handed on unread
            if (given := self._given.get(_key(tensor))) is not None:
                self._reads |= self._origin_of(given)
        _refuse_overwritten(self._reads)
        number, before = len(self.calls), self._times.get(name, 0)
        self._times[name] = before + 1
        first = _first(every)
        self.calls.append(
            Call(
                name=f"{name}#{before}" if before else name,
                layer=name,
                needs=self._reads.sources,
                parameters=self._reads.parameters,
                draws=self._reads.draws,
                outputs=tuple(
                    _output(layer, leaf, i, first, inputs) for i, leaf in enumerate(every)
                ),
                structure=structure,
                changes=tuple(change for change, _ in followed),
                structures=tuple(spec for _, spec in handed),
                cleared=frozenset(),  # see `cleared`
                lost=lost,
                flops=flops,
                saved_bytes=sum(saved.values()),
                seconds=seconds,
            )
        )
        self._followed.append((layer, followed))
        for (change, _), (more, _) in zip(followed, handed, strict=True):
            for tensor in _tensors(more):
                self._hand(tensor, Source(number, first[id(tensor)]), is_heard=change.is_heard)
        for leaf, value in enumerate(leaves):
            if isinstance(value, Tensor):
                with self._quietly():
                    leaves[leaf] = value.detach()
                self._hand(leaves[leaf], Source(number, first[id(value)]))
        for tensor in overwritten:
            self._write(tensor, _Origin(writers=frozenset({name})))
        return structure.unflatten(leaves)

    def given(self, inputs: Mapping[str, object]) -> None:
        """Takes what the model is called with."""
        self._inputs = _keys(inputs)

    def cleared(self) -> tuple[Call, ...]:
        """Returns the calls, with what code behind them took out of their containers again."""
        calls = list[Call]()
        for call, (layer, followed) in zip(self.calls, self._followed, strict=True):
            roots = roots_of(layer, (), {})
            numbers = frozenset(
                number
                for number, (change, values) in enumerate(followed)
                if change.is_inside and len(change.path) > 2
                if not _hold(contents_of(find(roots, change.path)), values)
            )
            calls.append(replace(call, cleared=numbers))
        return tuple(calls)

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
            origin = self._origins.get(id(buffer))
            if buffer is before.get(name) or id(buffer) in self._sources:
                continue  # or of a layer
            if origin and (name in saved or origin.sources):
                raise TopologyError(_writes(name))

    def _origin_of(self, values: object) -> _Origin:
        origin = _Origin()
        for tensor in _tensors(values):
            if tensor_name := self._names.get(id(tensor)):
                origin |= _Origin(parameters=frozenset({tensor_name}))
            found = self._origins.get(id(tensor))
            if found is None and (maker := self._made.get(_key(tensor))) and not tensor_name:
                raise TopologyError(_leaked(maker[0], self._layer))
            origin |= found or _Origin()
            self.is_heard |= id(tensor) in self._heard
        return origin

    def _read(self, values: object) -> None:
        """Notes what an operator inside of a layer reads, however the layer came by it."""
        for tensor in _tensors(values):
            key = _key(tensor)
            if key in self._given:
                self._reads |= self._origin_of(self._given[key])
            elif not (key in self._fresh or key in self._known or key in self._named):
                self._reads |= self._origin_of(tensor)
                self._known |= {key} - {0}

    def _computed(self, inputs: object, result: object, written: object) -> None:
        """Notes into which memory an operator inside of a layer wrote, unless it is a constant."""
        before = _keys(inputs)
        self._fresh |= _keys(result) - before
        self._overwritten |= _keys(written) & self._given.keys()
        if not any(k in self._given or k in self._named or k in self._made for k in before):
            return
        for tensor in _tensors((result, written)):
            key = _key(tensor)
            if key and key not in self._given and key not in self._named:
                self._made[key] = self._layer, weak_storage(tensor.untyped_storage())

    def _hand(self, tensor: Tensor, source: Source, *, is_heard: bool = False) -> None:
        """Notes that a layer hands a tensor on."""
        self._sources[id(tensor)] = source
        self._set(tensor, _Origin(frozenset({source})))
        if is_heard:
            self._heard.add(id(tensor))

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        self._is_quiet = True
        try:
            yield
        finally:
            self._is_quiet = False

    def _set(self, tensor: Tensor, origin: _Origin) -> None:
        self._origins[id(tensor)] = origin
        self._by_storage.setdefault(storage_key(tensor.untyped_storage()), []).append(tensor)

    def _write(self, tensor: Tensor, origin: _Origin) -> None:
        """Notes that a tensor outside of layers was written into."""
        key = storage_key(tensor.untyped_storage())
        if key in self._buffers:
            raise TopologyError(_writes(self._buffers[key]))
        self.writes_inputs |= key in self._inputs
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
) -> tuple[object, dict[int, int]]:
    """Runs a layer with a graph, so that it shows what it keeps for its backward.

    Args:
        layer: The layer.
        function: Runs it.
        args: Of the layer, in a graph.
        kwargs: Likewise.

    Returns:
        What it returns, and the bytes of each storage that it keeps.
    """
    saved, alive = dict[int, int](), list[object]()

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage_key(storage)] = storage.nbytes()
        alive.append(storage)  # its key is not used again
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        returned = function(*args, **kwargs)
    for parameter in layer.parameters():
        saved.pop(storage_key(parameter.untyped_storage()), None)
    return returned, saved


def _followed(
    layer: str, changes: Sequence[tuple[Change, list[Any]]]
) -> tuple[list[tuple[Change, list[Any]]], frozenset[tuple[str, str]]]:
    """Returns what a layer changes that can be done elsewhere, and which attributes it loses.

    An attribute that is no tensor, such as a counter, is the layer's own affair. It depends on
    what was before.
    """
    followed, lost = list[tuple[Change, list[Any]]](), set[tuple[str, str]]()
    for change, values in changes:
        if change.is_heard:
            plain = [leaf if _is_plain(leaf) else None for leaf in tree_flatten(values)[0]]
            followed.append((change, tree_flatten(values)[1].unflatten(plain)))
        elif not change.is_inside:
            _refuse_hidden(layer, "hands on", values)
            followed.append((change, values))
        elif _tensors(values):
            followed.append((change, values))
        else:
            attributes = change.path[2:3] or (*change.keys, *change.gone)
            lost |= {(change.path[1], name) for name in attributes}
    return followed, frozenset(lost)


def _hold(contents: Any, values: Sequence[object]) -> bool:  # noqa: ANN401 - of `contents_of`
    held = contents.values() if isinstance(contents, dict) else contents or ()
    return bool({id(x) for x in values} & {id(x) for x in held})


def _is_plain(leaf: object) -> bool:
    return isinstance(leaf, Tensor | nn.Module) or not contents_of(leaf)


class _Clones:
    """What a layer is given, with tensors in a graph and in memory of their own.

    They are no leaves of the graph, because a layer may write into them. Containers are the same
    ones, so what a layer writes into them is where it would be.

    Attributes:
        given: Storage of a clone -> what it was cloned from.
    """

    def __init__(self) -> None:
        self.given: dict[int, Tensor] = {}
        self._seen = set[int]()
        self._put = list[tuple[Any, Any, object, object]]()

    def of(self, value: Any) -> Any:  # noqa: ANN401 - whatever a layer takes
        """Returns a value with clones in the place of tensors."""
        if isinstance(value, Tensor):
            clone = _copy(value)
            if key := _key(clone):
                self.given[key] = value
            return clone
        contents = None if isinstance(value, nn.Module | set) else contents_of(value)
        if contents is None or id(value) in self._seen:
            return value
        if isinstance(value, tuple):
            items = [self.of(x) for x in value]
            if all(x is y for x, y in zip(items, value, strict=True)):
                return value
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        self._seen.add(id(value))
        for key, x in contents.items() if isinstance(contents, dict) else enumerate(contents):
            clone = self.of(x)
            if clone is not x:
                put(value, key, clone)
                self._put.append((value, key, clone, x))
        return value

    def put_back(self) -> None:
        """Puts the tensors back where their clones still are."""
        for value, key, clone, x in self._put:
            contents = contents_of(value)
            is_there = key in contents if isinstance(contents, dict) else key < len(contents)
            if is_there and contents[key] is clone:
                put(value, key, x)


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


def _direct(values: tuple[object, ...]) -> list[Tensor]:
    """Returns the tensors that a layer is given itself; of those in containers it may read none."""
    return [
        x
        for value in values
        for x in (_direct(value) if isinstance(value, tuple) else [value])
        if isinstance(x, Tensor)
    ]


def _key(tensor: Tensor) -> int:
    """Returns that of a tensor's storage; 0 of one that has none, such as a sparse one."""
    return storage_key(tensor.untyped_storage()) if tensor.layout is torch.strided else 0


def _keys(values: object) -> set[int]:
    return {_key(tensor) for tensor in _tensors(values)} - {0}


def _first(leaves: Sequence[object]) -> dict[int, int]:
    """Returns where each tensor stands first, by id."""
    first: dict[int, int] = {}
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            first.setdefault(id(leaf), number)
    return first


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


def _leaked(maker: str, reader: str) -> str:
    who = f"layer {reader!r}" if reader else "code outside of layers"
    return (
        f"layer {maker!r} hands a tensor to {who} by a way that no stage can follow, such as a "
        f"global variable or memory that it writes into: return it, append it to a list that the "
        f"layer is given, or set it as an attribute of the layer"
    )


def _writes(buffer: str) -> str:
    return (
        f"code outside of layers writes into buffer {buffer!r}: every stage runs this code, and "
        f"stages would have different values of it. Put the buffer and the code into a module of "
        f"its own, which is then a layer"
    )


def _output(
    layer: nn.Module, leaf: object, number: int, first: Mapping[int, int], inputs: Sequence[Tensor]
) -> Output:
    if not isinstance(leaf, Tensor):
        return Output(value=leaf)
    same = first[id(leaf)] if first[id(leaf)] < number else None
    if not leaf.dim() and inputs:
        return Output(shape=leaf.shape, dtype=leaf.dtype, like=Like(0, 0, ()), same=same)
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
    return Output(shape=leaf.shape, dtype=leaf.dtype, like=like, same=same)


def shapes_of(sample: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the tensors of a sample, by name."""
    return {name: tuple(x.shape) for name, x in sample.items() if isinstance(x, Tensor)}
