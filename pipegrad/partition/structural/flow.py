"""Flow: which layers a model calls, in which order, and which values go from layer to layer.

[Note: flow] The model runs once, on a sample. Outside of layers, every operator of torch is seen,
and for each of its results it is noted from which outputs of layers it was computed. So when a
layer is called, its inputs say which outputs of which earlier calls it needs, however far away
these are. The code between layers need not be understood: each stage runs it again.

The tensors of the sample, and the model's parameters and buffers, are fake. Fake tensors have a
shape, a dtype and a device, but no memory. So the run costs no memory, changes no buffer, draws no
random number, and works for a model on the meta device. If the model's code needs values of
tensors, it runs on the real ones, under a random state and with buffers that are put back.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from pipegrad.errors import TopologyError, in_words
from pipegrad.interop.private import (
    FakeTensorMode,
    TorchDispatchMode,
    TreeSpec,
    quiet_fake_tensors,
    storage_key,
    tree_flatten,
)
from pipegrad.partition.structural.shallow import as_kind, shallow, twin

_REPEATS = 3  # of a layer that is measured; the shortest time counts


class Source(NamedTuple):
    """An output of a layer's call: its leaf of this number."""

    call: int
    leaf: int


@dataclass(frozen=True)
class Like:
    """The shape of an output, told by an input of the same call.

    Attributes:
        leaf: Number of the input among the call's tensors.
        kept: How many dimensions of the input the output has; the first ones.
        more: Dimensions behind these.
    """

    leaf: int
    kept: int
    more: tuple[int, ...]


@dataclass(frozen=True)
class Output:
    """A leaf of what a call returns.

    Attributes:
        value: What it is, if it is no tensor.
        shape: Of a tensor, in the sample.
        dtype: Of a tensor, in the sample.
        like: How to tell its shape in another batch; None if no input tells it.
    """

    value: object = None
    shape: torch.Size | None = None
    dtype: torch.dtype | None = None
    like: Like | None = None


@dataclass(frozen=True)
class Call:
    """A call of a layer.

    Attributes:
        name: Of the layer, with the number of the call behind it if it is called more than once.
        layer: The layer.
        needs: Outputs of earlier calls that its inputs were computed from.
        parameters: Names of parameters that its inputs were computed from outside of layers.
        draws: Numbers of random operators outside of layers that its inputs were computed from.
        outputs: The leaves of what it returns.
        structure: How they hang together.
        flops: Floating-point operations of its forward on the sample.
        saved_bytes: What its forward keeps for its backward, on the sample.
        seconds: How long its forward and backward took on the sample; 0 if that was not measured.
    """

    name: str
    layer: str
    needs: frozenset[Source]
    parameters: frozenset[str]
    draws: frozenset[int]
    outputs: tuple[Output, ...]
    structure: TreeSpec
    flops: int
    saved_bytes: int
    seconds: float

    def name_of(self, leaf: int) -> str:
        """Returns the name of an output."""
        tensors = [i for i, output in enumerate(self.outputs) if output.shape is not None]
        return self.name if tensors == [leaf] else f"{self.name}:{leaf}"


@dataclass(frozen=True)
class Flow:
    """What a model does.

    Attributes:
        calls: The calls of its layers, in order.
        returned: What it returns, with `Returned` in the place of tensors.
        written: Outputs of layers into which code outside of layers writes, in place.
        sample: Name -> shape of the tensors of the sample.
    """

    calls: tuple[Call, ...]
    returned: object
    written: frozenset[Source]
    sample: dict[str, tuple[int, ...]]


class Returned(NamedTuple):
    """A tensor that the model returns, and what it was computed from outside of layers."""

    needs: frozenset[Source]
    parameters: frozenset[str]
    draws: frozenset[int]


def flow_of(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    sample: Mapping[str, object],
    *,
    timed: bool = False,
) -> Flow:
    """Returns what a model does with a sample.

    Args:
        model: The uncut model. It is as before afterwards.
        layers: Its layers, by name.
        sample: Keyword arguments of its forward.
        timed: Whether to measure how long layers take.

    Raises:
        TopologyError: If the model fails, or if layers without memory are to be measured.
    """
    is_meta = any(tensor.is_meta for tensor in _state(model).values())
    if timed and is_meta:
        raise TopologyError(
            "by='measured' runs the layers, and those of a model on the meta device cannot run: "
            "take by='time', or a number for each layer"
        )
    # Some operators, such as the grouped products of experts, know fake tensors of bfloat16 alone.
    attempts: list[Callable[[], Flow]] = (
        []
        if timed
        else [
            partial(_fake_run, model, layers, sample),
            partial(_fake_run, model, layers, sample, dtype=torch.bfloat16),
        ]
    )
    if not is_meta:
        attempts.append(partial(_real_run, model, layers, sample, timed=timed))
    failures = list[Exception]()
    for attempt in attempts:
        try:
            return attempt()
        except Exception as error:  # noqa: BLE001 - raised below
            failures.append(error)
    raise TopologyError(_failed(model, sample, failures[0])) from failures[0]


def _failed(model: nn.Module, sample: Mapping[str, object], error: Exception) -> str:
    return (
        f"{type(model).__name__} fails on a sample of {_shapes(sample)}: {in_words(error)}. Give "
        f"example={{...}}, the keyword arguments of its forward for a small batch"
    )


def _shapes(sample: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(x.shape) for name, x in sample.items() if isinstance(x, Tensor)}


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def _real_run(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    sample: Mapping[str, object],
    *,
    timed: bool,
) -> Flow:
    """Runs the model on its own tensors."""
    recorder = _Recorder({id(p): name for name, p in model.named_parameters()}, timed=timed)
    run = _with_recorder(model, layers, recorder)
    with torch.no_grad(), _unchanged(model), recorder:
        returned = run(**sample)
    return recorder.flow(returned, sample)


def _fake_run(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    sample: Mapping[str, object],
    *,
    dtype: torch.dtype | None = None,
) -> Flow:
    """Runs the model on fake tensors, all floating-point ones of one dtype if it is given."""
    recorder = _Recorder({}, timed=False)
    run = _with_recorder(model, layers, recorder)
    with torch.no_grad(), quiet_fake_tensors(), FakeTensorMode():
        made: dict[int, Tensor] = {}
        state = {name: _fake(x, made, dtype) for name, x in _state(model).items()}
        recorder.names = {id(state[name]): name for name, _ in model.named_parameters()}
        batch = {
            name: _fake(x, made, dtype) if isinstance(x, Tensor) else x
            for name, x in sample.items()
        }
        with recorder:
            returned = torch.func.functional_call(run, state, (), batch, tie_weights=False)
    return recorder.flow(returned, sample)


def _with_recorder(
    model: nn.Module, layers: Mapping[str, nn.Module], recorder: _Recorder
) -> nn.Module:
    recorded = {id(layer): _recorded(recorder, name, layer) for name, layer in layers.items()}
    return shallow(model, recorded)


def _fake(tensor: Tensor, made: dict[int, Tensor], dtype: torch.dtype | None) -> Tensor:
    """Returns a fake tensor like `tensor`, on the CPU if that has no memory; the same one again."""
    if id(tensor) not in made:
        copied: Tensor = torch.empty_strided(
            tensor.shape,
            tensor.stride(),
            dtype=dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype,
            device="cpu" if tensor.is_meta else tensor.device,
        )
        if isinstance(tensor, nn.Parameter):
            copied = nn.Parameter(copied, tensor.requires_grad)
        made[id(tensor)] = copied
    return made[id(tensor)]


@contextlib.contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Puts buffers and random states back."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        with torch.random.fork_rng():
            yield
    finally:
        for buffer, before in buffers:
            buffer.copy_(before)


class _RecordedLayer(nn.Module):
    """A layer whose calls are recorded."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever the layer takes
        recorder = vars(self)["_recorder"]
        return recorder.call(vars(self)["_layer_name"], self, super().__call__, args, kwargs)


def _recorded(recorder: _Recorder, name: str, layer: nn.Module) -> nn.Module:
    copied = as_kind(twin(layer), _RecordedLayer)
    vars(copied).update(_recorder=recorder, _layer_name=name)
    return copied


@dataclass(frozen=True)
class _Origin:
    """What a tensor was computed from."""

    sources: frozenset[Source] = frozenset()
    parameters: frozenset[str] = frozenset()
    draws: frozenset[int] = frozenset()

    def __or__(self, other: _Origin) -> _Origin:
        return _Origin(
            self.sources | other.sources,
            self.parameters | other.parameters,
            self.draws | other.draws,
        )


class _Recorder(TorchDispatchMode):
    """Sees every operator, and every call of a layer.

    Args:
        names: Parameter's id -> its name.
        timed: Whether to measure layers.
    """

    def __init__(self, names: dict[int, str], *, timed: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names = names
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
        self._is_inside = False  # of a layer
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
        if self._is_inside:
            if count := flop_registry.get(func._overloadpacket):
                self._flops += count(*args, **kwargs, out_val=result)
            return result
        origin = self._origin_of((args, kwargs))
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._num_draws += 1
            origin |= _Origin(draws=frozenset({self._num_draws}))
        written = [
            value
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
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
        origin = self._origin_of(inputs)
        self._is_inside, self._flops, seconds = True, 0, 0.0
        try:
            leaves, structure, saved = _outputs_of(layer, function, args, kwargs)
            flops = self._flops
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
                outputs=tuple(_output(leaf, inputs) for leaf in leaves),
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
        return structure.unflatten(leaves)

    def flow(self, returned: object, sample: Mapping[str, object]) -> Flow:
        """Returns what a model did with a sample, and where what it returned came from."""
        leaves, structure = tree_flatten(returned)
        origins = structure.unflatten(
            [
                Returned(*_fields(self._origin_of(leaf))) if isinstance(leaf, Tensor) else leaf
                for leaf in leaves
            ]
        )
        return Flow(tuple(self.calls), origins, frozenset(self.written), _shapes(sample))

    def _origin_of(self, values: object) -> _Origin:
        origin = _Origin()
        for tensor in _tensors(values):
            if tensor_name := self.names.get(id(tensor)):
                origin |= _Origin(parameters=frozenset({tensor_name}))
            origin |= self._origins.get(id(tensor), _Origin())
        return origin

    def _set(self, tensor: Tensor, origin: _Origin) -> None:
        self._origins[id(tensor)] = origin
        self._by_storage.setdefault(storage_key(tensor.untyped_storage()), []).append(tensor)

    def _write(self, tensor: Tensor, origin: _Origin) -> None:
        """Notes that an operator outside of layers has written into a tensor."""
        self._set(tensor, origin)
        for other in self._by_storage[storage_key(tensor.untyped_storage())]:
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
        args, kwargs = _differentiable(args, kwargs)
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


def _differentiable(args: tuple[object, ...], kwargs: Mapping[str, object]) -> Any:  # noqa: ANN401
    """Returns arguments whose tensors are leaves of a graph of their own."""
    leaves, structure = tree_flatten((args, kwargs))
    return structure.unflatten(
        [
            leaf.detach().requires_grad_()
            if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
            else leaf
            for leaf in leaves
        ]
    )


def _output(leaf: object, inputs: Sequence[Tensor]) -> Output:
    if not isinstance(leaf, Tensor):
        return Output(value=leaf)
    # Most layers keep the shape. An embedding adds a dimension, and a head changes the last one.
    # That one is a constant only if the sample has no such length.
    lengths = {length for tensor in inputs for length in tensor.shape}
    candidates = [
        Like(number, kept, tuple(leaf.shape[kept:]))
        for lost in (0, 1)
        for number, tensor in enumerate(inputs)
        for kept in [tensor.dim() - lost]
        if kept > 0 and tensor.shape[:kept] == leaf.shape[:kept] and leaf.dim() - kept <= 1
        if lengths.isdisjoint(leaf.shape[kept:])
    ]
    like = min(candidates, key=lambda one: len(one.more), default=None)
    return Output(shape=leaf.shape, dtype=leaf.dtype, like=like)
