"""ModelRecorder: records every operator of a run of the model, and every call of a layer.

[Note: flow] in `flow` describes the recorded values, with reasons.
"""
# ruff: noqa: ANN401 - layers and operators take and return values of any type

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.flop_counter import flop_registry

from pipegrad.errors import TopologyError
from pipegrad.interop.private import (
    FakeTensor,
    TorchDispatchMode,
    storage_key,
    tree_flatten,
    tree_map,
    weak_storage,
)
from pipegrad.partition.cutting.calls import (
    Call,
    Change,
    Origin,
    Output,
    PutIn,
    Source,
    Watch,
    contents_of,
    find,
    kinds_of,
    put_back,
    replaced,
    roots_of,
)
from pipegrad.partition.cutting.copies import with_class
from pipegrad.pipeline.stage import fields_of

_INDEXED = (
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put.default,
    torch.ops.aten.index_put_.default,
)
_GLUE = "code outside of layers"

Changes = Sequence[tuple[Change, list[Any]]]  # with the new values


class RecordedLayer(nn.Module):
    """A layer whose calls are recorded."""

    def _pipegrad_call(self, call: Any, args: Any, kwargs: Any) -> Any:
        """Runs the layer, and records it."""
        return vars(self)["_recorder"].call(vars(self)["_layer_name"], self, call, args, kwargs)


@dataclass
class _Known:
    """A tensor outside of layers. It is kept alive, because its id and storage are keys.

    Attributes:
        tensor: The tensor.
        origin: The values from which it was computed.
        source: The layer's output that it is; None if it is none.
        is_heard: True if a hook got it.
    """

    tensor: Tensor
    origin: Origin
    source: Source | None = None
    is_heard: bool = False


@dataclass
class _Running:
    """The layer that runs now.

    Attributes:
        layer: Its name.
        reads: The values from which all tensors that it reads were computed.
        inputs: Storage of a clone -> the original input. The layer runs on clones of its inputs.
        clones: Id of a clone -> the original input.
        known: Storages that it made, and storages of other tensors that it has read.
        overwritten: Keys of `inputs` into which it wrote.
        flops: Floating-point operations so far.
    """

    layer: str
    reads: Origin
    inputs: dict[int, Tensor] = field(default_factory=dict)
    clones: dict[int, Tensor] = field(default_factory=dict)
    known: set[int] = field(default_factory=set)
    overwritten: set[int] = field(default_factory=set)
    flops: int = 0


class ModelRecorder(TorchDispatchMode):
    """Records every operator, and every call of a layer.

    `Flow` describes `written`, `writes_inputs` and `is_heard`.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[str],
        inputs: Mapping[str, object],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        for name in layers:
            layer = with_class(model.get_submodule(name), RecordedLayer)
            vars(layer).update(_recorder=self, _layer_name=name)
        self._model = model
        self._buffers = dict(model.named_buffers())
        self._buffer_names = {_key(buffer): name for name, buffer in self._buffers.items()}
        named = {**dict(model.named_parameters()), **self._buffers}
        self._names = {id(tensor): name for name, tensor in named.items()}
        self._named = _keys([*named.values()])
        self._inputs = _keys(inputs)
        self._calls: list[Call] = []
        self._changes: list[tuple[nn.Module, Changes]] = []  # of each call
        self._running: _Running | None = None
        self._function = ""  # the autograd function that runs outside of layers
        self._is_quiet = False  # True while the recorder's own code runs
        self._known: dict[int, _Known] = {}  # by id of a tensor
        # By storage, because a write into a view changes all tensors of its memory.
        self._by_storage = defaultdict[int, list[_Known]](list)
        # Storage -> the layer that made it from its inputs or parameters, or wrote into it, and a
        # weak reference, because a key is not used again while there is one.
        self._makers: dict[int, tuple[str, object]] = {}
        # Origin of values that decided branches of the code: all later values depend on it.
        self._decided = Origin()
        self._num_draws = 0
        self.written = set[Source]()
        self.writes_inputs = False
        self.is_heard = False
        for name, value in inputs.items():
            for tensor in _tensors(value):
                self._set(tensor, Origin(inputs=frozenset({name})))

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_quiet:
            return func(*args, **kwargs)
        running = self._running
        if running is not None:
            self._read(running, (args, kwargs))
        result = func(*(_in_places(args) if func in _INDEXED else args), **kwargs)
        written = [
            value
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if running is not None:
            if count := flop_registry.get(func._overloadpacket):
                running.flops += count(*args, **kwargs, out_val=result)
            self._computed(running, (args, kwargs), result, written)
            return result
        origin = self._origin_of((args, kwargs))
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._num_draws += 1
            origin |= Origin(draws=frozenset({self._num_draws}))
        if torch.Tag.data_dependent_output in func.tags and not _tensors(result):
            # Without inputs, because for example a grid of images decides about all later layers,
            # and is no input of all these.
            self._decided |= replace(origin, inputs=frozenset())
        for tensor in _tensors(result):
            self._set(tensor, origin)
        for tensor in _tensors(written):
            self._write(tensor, origin)
        return result

    @contextmanager
    def noticing_functions(self) -> Iterator[None]:
        """Notes the model's autograd functions, because layers run without a graph inside."""
        original: Any = vars(torch.autograd.Function)["apply"]

        def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
            outer = self._function
            # Except checkpoints, because they run their layers again in backward, with a graph.
            self._function = "" if cls is CheckpointFunction else cls.__name__
            try:
                return original.__get__(None, cls)(*args, **kwargs)
            finally:
                self._function = outer

        with mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)):
            yield

    def call(
        self,
        name: str,
        layer: nn.Module,
        function: Callable[..., Any],
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> Any:
        """Runs a layer, and records it."""
        if self._running is not None:
            return function(*args, **kwargs)  # a layer inside of a layer
        if self._function:
            raise TopologyError(
                f"layer {name!r} is called inside of the autograd function {self._function}, whose "
                f"own backward needs the layers of all stages: such a model cannot be cut there"
            )
        origin = self._origin_of(_direct((args, *kwargs.values()))) | self._decided
        _refuse_overwritten(origin)
        inputs, running = tree_flatten((args, kwargs))[0], _Running(name, origin)
        self._running = running
        try:
            with _saved(layer) as saved:
                returned, changes = self._run(running, layer, function, args, kwargs)
            flops = running.flops
            overwritten = [running.inputs[key] for key in running.overwritten]
        finally:
            self._running = None
        leaves, structure = tree_flatten(returned)
        _refuse_hidden(name, "returns", leaves)
        followed, lost = _followed(name, changes)
        handed = [tree_flatten(values) for _, values in followed]
        every = [*leaves, *(leaf for more, _ in handed for leaf in more)]
        for tensor in _tensors(every):  # inputs that are outputs, and that it did not read
            if (unread := running.inputs.get(_key(tensor))) is not None:
                running.reads |= self._origin_of(unread)
        _refuse_overwritten(running.reads)
        written = {id(x) for x in overwritten}
        unchanged = {key: x for key, x in running.clones.items() if id(x) not in written}
        number, before = len(self._calls), sum(call.layer == name for call in self._calls)
        # Id of each tensor -> index of its first leaf.
        first = {id(x): i for i, x in reversed([*enumerate(every)]) if isinstance(x, Tensor)}
        self._calls.append(
            Call(
                name=f"{name}#{before}" if before else name,
                layer=name,
                origin=running.reads,
                outputs=tuple(
                    _output(leaf, i, first, inputs, given=unchanged.get(id(leaf)))
                    for i, leaf in enumerate(every)
                ),
                structure=structure,
                kinds=kinds_of(returned),
                num_inputs=len(inputs),
                changes=tuple(change for change, _ in followed),
                structures=tuple(spec for _, spec in handed),
                cleared=frozenset(),  # see `calls`
                lost=lost,
                flops=flops,
                saved_bytes=sum(saved.values()),
            )
        )
        self._changes.append((layer, followed))
        for (change, _), (more, _) in zip(followed, handed, strict=True):
            for tensor in _tensors(more):
                source = Source(number, first[id(tensor)])
                self._set(tensor, Origin(frozenset({source})), source, is_heard=change.is_heard)
        # Code after the layer gets new tensors, because a layer may return its input.
        with self._quietly():
            others = {id(x): x.detach() for x in _tensors(leaves)}
        for key, tensor in others.items():
            source = Source(number, first[key])
            self._set(tensor, Origin(frozenset({source})), source)
        for tensor in overwritten:
            self._write(tensor, Origin(writers=frozenset({name})))
        return structure.unflatten([others.get(id(leaf), leaf) for leaf in leaves])

    def _run(
        self,
        running: _Running,
        layer: nn.Module,
        function: Callable[..., Any],
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> tuple[object, Changes]:
        """Runs a layer on clones, in a graph. Returns its result and its changes."""

        def clone(tensor: Tensor) -> Tensor:
            copied = _copy(tensor)
            running.clones[id(copied)] = tensor
            if key := _key(copied):
                running.inputs[key] = tensor
            return copied

        put_in: PutIn = {}
        with self._quietly():
            args, kwargs = replaced((args, kwargs), clone, put_in)
        watch = Watch(layer, args, kwargs)
        with watch.listening(), torch.enable_grad():
            returned = function(*args, **kwargs)
        changes = watch.changes()
        # Always true with hooks of transformers, because they collect results of modules, and the
        # model may test whether there are any without using their values.
        self.is_heard |= any(
            getattr(hook, "__module__", "").startswith("transformers.")
            for part in layer.modules()
            for hook in part._forward_hooks.values()
        )
        put_back(put_in)
        return returned, changes

    def calls(self) -> tuple[Call, ...]:
        """Returns the calls, with `Call.cleared`: changes that later code has undone."""
        calls = list[Call]()
        for call, (layer, changes) in zip(self._calls, self._changes, strict=True):
            roots = roots_of(layer, (), {})
            cleared = set[int]()
            for number, (change, values) in enumerate(changes):
                if change.is_inside and len(change.path) > 2:
                    contents = contents_of(find(roots, change.path)) or ()
                    there = contents.values() if isinstance(contents, dict) else contents
                    if {id(x) for x in values}.isdisjoint(id(x) for x in there):
                        cleared.add(number)
            calls.append(replace(call, cleared=frozenset(cleared)))
        return tuple(calls)

    def seen(self, returned: object) -> tuple[dict[str, Origin], frozenset[str]]:
        """Returns the origin of each of a model's outputs by name, and names of nested outputs."""
        _refuse_overwritten(self._origin_of(returned))
        made: dict[str, object] = {f"output{i}": x for i, x in enumerate(_tensors(returned))}
        if isinstance(returned, Tensor):
            made = {"output": returned}
        elif isinstance(returned, Mapping):
            made = {name: x for name, x in returned.items() if _tensors(x)}
        origins = {name: self._origin_of(x) | self._decided for name, x in made.items()}
        return origins, frozenset(name for name, x in made.items() if not isinstance(x, Tensor))

    def refuse_new_buffers(self) -> None:
        """Refuses code outside of layers that has replaced buffers by other tensors.

        A buffer that is not saved may be replaced if its value does not depend on layers, because
        it is a cache.
        """
        saved = self._model.state_dict(keep_vars=True)
        for name, buffer in self._model.named_buffers():
            known = self._known.get(id(buffer))
            if known is None or known.source or buffer is self._buffers.get(name):
                continue  # of the model, or of a layer
            if name in saved or known.origin.sources:
                raise TopologyError(_writes(name))

    def _origin_of(self, values: object) -> Origin:
        origin = Origin()
        for tensor in _tensors(values):
            name = self._names.get(id(tensor))
            if name:
                origin |= Origin(parameters=frozenset({name}))
            known = self._known.get(id(tensor))
            if known is None and (maker := self._makers.get(_key(tensor))) and not name:
                reader = f"layer {self._running.layer!r}" if self._running else _GLUE
                raise TopologyError(
                    f"layer {maker[0]!r} hands a tensor to {reader} by a way that no stage can "
                    f"follow, such as a global variable or memory that it writes into: return it, "
                    f"append it to a list that the layer is given, or set it as an attribute of "
                    f"the layer"
                )
            if known is not None:
                origin |= known.origin
                self.is_heard |= known.is_heard
        return origin

    def _read(self, running: _Running, values: object) -> None:
        """Records the inputs of an operator inside of a layer, also if they are no arguments."""
        for tensor in _tensors(values):
            key = _key(tensor)
            if key in running.inputs:
                running.reads |= self._origin_of(running.inputs[key])
            elif key not in running.known and key not in self._named:
                running.reads |= self._origin_of(tensor)
                running.known |= {key} - {0}

    def _computed(self, running: _Running, inputs: object, result: object, written: object) -> None:
        """Records the memory into which an operator inside of a layer wrote, except constants."""
        before = _keys(inputs)
        running.known |= _keys(result) - before
        running.overwritten |= _keys(written) & running.inputs.keys()
        if not any(k in running.inputs or k in self._named or k in self._makers for k in before):
            return
        for tensor in _tensors((result, written)):
            key = _key(tensor)
            if key and key not in running.inputs and key not in self._named:
                self._makers[key] = running.layer, weak_storage(tensor.untyped_storage())

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        self._is_quiet = True
        try:
            yield
        finally:
            self._is_quiet = False

    def _set(
        self,
        tensor: Tensor,
        origin: Origin,
        source: Source | None = None,
        *,
        is_heard: bool = False,
    ) -> None:
        known = self._known[id(tensor)] = _Known(tensor, origin, source, is_heard)
        self._by_storage[_key(tensor)].append(known)

    def _write(self, tensor: Tensor, origin: Origin) -> None:
        """Records that a tensor outside of layers was written into."""
        key = storage_key(tensor.untyped_storage())
        if key in self._buffer_names:
            raise TopologyError(_writes(self._buffer_names[key]))
        self.writes_inputs |= key in self._inputs
        if id(tensor) not in self._known:
            self._set(tensor, origin)
        for other in self._by_storage[key]:
            other.origin |= origin
            if other.source is not None:
                self.written.add(other.source)


@contextmanager
def _saved(layer: nn.Module) -> Iterator[dict[int, int]]:
    """Yields the bytes of each storage that autograd saves for backward inside of the context.

    The layer's parameters do not count.
    """
    saved, alive = dict[int, int](), list[object]()

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage_key(storage)] = storage.nbytes()
        alive.append(storage)  # its key is not used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield saved
    for key in _keys([*layer.parameters()]):
        saved.pop(key, None)


def _followed(layer: str, changes: Changes) -> tuple[Changes, frozenset[tuple[str, str]]]:
    """Returns the changes that placeholders of a layer can repeat, and the attributes they lose.

    An attribute that is no tensor, such as a counter, cannot be repeated, because it depends on its
    former value.
    """
    followed, lost = list[tuple[Change, list[Any]]](), set[tuple[str, str]]()
    for change, values in changes:
        if change.is_heard:
            # Without objects that hold others, because other stages cannot pass these to hooks.
            plain = tree_map(
                lambda x: x if isinstance(x, Tensor | nn.Module) or not contents_of(x) else None,
                values,
            )
            followed.append((change, plain))
        elif not change.is_inside:
            _refuse_hidden(layer, "hands on", values)
            followed.append((change, values))
        elif _tensors(values):
            followed.append((change, values))
        else:
            attribute = change.path[2] if len(change.path) > 2 else change.key
            lost.add((change.path[1], attribute))
    return followed, frozenset(lost)


@torch.enable_grad()
def _copy(tensor: Tensor) -> Tensor:
    """Returns a tensor in a graph and in memory of its own.

    It is no leaf of the graph, because a layer may write into it.
    """
    has_gradient = tensor.is_floating_point() or tensor.is_complex()
    return tensor.detach().requires_grad_(has_gradient).clone()


def _tensors(values: object) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(values)[0] if isinstance(leaf, Tensor)]


def _in_places(args: Any) -> Any:
    """Returns arguments of an index operator with the indices of each mask instead of the mask.

    Fake tensors need them, because the number of a mask's elements depends on values.
    """
    tensor, indices, *values = args
    places = [
        place
        for index in indices
        for place in (
            index.nonzero().unbind(1)
            if isinstance(index, Tensor)
            and index.dtype == torch.bool
            and not isinstance(index, FakeTensor)
            else [index]
        )
    ]
    return tensor, places, *values


def _direct(values: tuple[object, ...]) -> list[Tensor]:
    """Returns tensors in values and tuples; other containers may hold tensors that stay unread."""
    return [
        x
        for value in values
        for x in (_direct(value) if isinstance(value, tuple) else [value])
        if isinstance(x, Tensor)
    ]


def _key(tensor: Tensor) -> int:
    """Returns the key of a tensor's storage; 0 if it has none, such as a sparse tensor."""
    return storage_key(tensor.untyped_storage()) if tensor.layout is torch.strided else 0


def _keys(values: object) -> set[int]:
    return {_key(tensor) for tensor in _tensors(values)} - {0}


def _refuse_hidden(layer: str, verb: str, values: object) -> None:
    """Refuses tensors inside of objects that are no pytrees, because torch does not see them."""
    for leaf in tree_flatten(values)[0]:
        inside = fields_of(leaf) or getattr(leaf, "__dict__", None) or {}
        if not isinstance(leaf, Tensor | nn.Module) and _tensors([*inside.values()]):
            raise TopologyError(
                f"layer {layer!r} {verb} a {type(leaf).__name__}, and torch does not see the "
                f"tensors inside: take a tuple or a dict, or register a dataclass with "
                f"torch.export.register_dataclass"
            )


def _refuse_overwritten(origin: Origin) -> None:
    """Refuses the use of values that a layer has changed in place."""
    if origin.writers:
        raise TopologyError(
            f"layers {sorted(origin.writers)} change a tensor in place that they are given, and "
            f"code behind them uses it: stages would have different values of it. Use what the "
            f"layers return"
        )


def _writes(buffer: str) -> str:
    return (
        f"{_GLUE} writes into buffer {buffer!r}: every stage runs this code, and "
        f"stages would have different values of it. Put the buffer and the code into a module of "
        f"its own, which is then a layer"
    )


def _output(
    leaf: object,
    number: int,
    first: Mapping[int, int],
    inputs: Sequence[object],
    *,
    given: Tensor | None,
) -> Output:
    """Returns the description of a leaf; `given` is the input that it is, if it is one."""
    if not isinstance(leaf, Tensor):
        return Output(value=leaf)
    same = first[id(leaf)] if first[id(leaf)] < number else None
    tensors = [(i, x) for i, x in enumerate(inputs) if isinstance(x, Tensor)]
    at = [i for i, x in tensors if x is given]
    # Most layers keep the shape of hidden states. Masks have other lengths in sequence chunks.
    alike = [i for i, x in tensors if x.shape == leaf.shape and x.is_floating_point()]
    like = next(iter([*at, *alike]), None)
    return Output(shape=leaf.shape, dtype=leaf.dtype, like=like, is_input=bool(at), same=same)
