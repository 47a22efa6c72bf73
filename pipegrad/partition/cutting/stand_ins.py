"""Placeholders of other stages' layers, for code that reads attributes of these layers.

While the stage runs, a placeholder has the modules, parameters and buffers of its layer by name,
with the right dtype and the stage's device, but filled with nan and without memory. Outside of a
forward it has none, because an optimizer or a checkpoint of the stage must not see them.
"""
# ruff: noqa: ANN401 - code may read any attribute

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import product
from numbers import Number
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from pipegrad.errors import StepError
from pipegrad.interop.private import FakeTensorMode, quiet_fake_tensors, tree_flatten
from pipegrad.partition.cutting.calls import Call, Watch, replaced
from pipegrad.partition.cutting.copies import like, with_class

if TYPE_CHECKING:
    from pipegrad.partition.cutting.stage_module import Run

# The only dtype of fake tensors with which the grouped products of experts work.
EXPERTS = torch.bfloat16


class _Table:
    """A table of a module, with the layer's entries while the stage runs and without otherwise."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, part: Any, kind: object = None) -> Any:
        table = vars(part)[self._name]  # entries that code outside of layers uses on this stage
        place: _Place | None = vars(part).get("_pipegrad_place")
        if place is None or not place.layer.run.is_running:
            return table
        held = vars(place.described)[self._name]
        return {key: place.layer.shown(x) for key, x in held.items()} | table

    def __set__(self, part: Any, value: object) -> None:
        vars(part)[self._name] = value


@dataclass(eq=False)
class _Elsewhere:
    """A layer of another stage.

    Attributes:
        run: The forward of the stage that holds the placeholder.
        name: Name of the layer.
        lost: Attributes that placeholders cannot show; see `Call`.
        dtypes: Dtype at the cut -> dtype after conversions of the stage.
        parts: Id of a module of the layer on the meta device -> its placeholder.
    """

    run: Run
    name: str
    lost: Collection[tuple[str, str]]
    dtypes: dict[torch.dtype, torch.dtype]
    parts: dict[int, nn.Module] = field(default_factory=dict)
    _filled: dict[object, Tensor] = field(default_factory=dict)

    def shown(self, described: Any) -> Any:
        """Returns the placeholder of a module or a tensor of the layer; other values unchanged."""
        if isinstance(described, nn.Module):
            return self.parts.get(id(described), described)
        if not isinstance(described, Tensor):
            return described
        dtype = self.dtypes.get(described.dtype, described.dtype)
        key = id(described), dtype, self.run.device
        if key not in self._filled:
            value = filled(described.shape, dtype, self.run.device)
            self._filled[key] = like(described, value)
        return self._filled[key]


class _Place(NamedTuple):
    """A module of another stage's layer: its name in the layer, and its copy on the meta device."""

    layer: _Elsewhere
    path: str
    described: nn.Module


class OtherLayer(nn.Module):
    """A placeholder of another stage's layer, or of a module inside of it."""

    _parameters: Any = _Table()
    _buffers: Any = _Table()
    _modules: Any = _Table()

    def _pipegrad_call(self, _: Any, args: Any, kwargs: Any) -> Any:
        """Returns placeholders of the layer's outputs."""
        layer, path, described = vars(self)["_pipegrad_place"]
        number = None if path else layer.run.enter(layer.name)
        if number is None:
            raise layer.run.refused_inside(layer.name)
        return layer.run.other(number, self, described, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        layer, path, described = vars(self)["_pipegrad_place"]
        if name in vars(self)["_parameters"]:  # code outside of layers uses it on this stage
            return vars(self)["_parameters"][name]
        if (path, name) in layer.lost:
            raise StepError(
                f"layer {layer.name!r} changes its attribute {name!r}, which is no tensor, and "
                f"code on another stage reads it: use a tensor, or what the layer returns"
            )
        return layer.shown(getattr(described, name))

    def train(self, mode: bool = True) -> OtherLayer:
        """Sets the mode of all modules of the layer."""
        for part in vars(self)["_pipegrad_place"].layer.parts.values():
            vars(part)["training"] = mode
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> OtherLayer:
        """Converts its tensors on this stage. Tensors that it shows later have the new dtypes."""
        dtypes = vars(self)["_pipegrad_place"].layer.dtypes
        for first, dtype in dtypes.items():
            dtypes[first] = fn(torch.empty((), dtype=dtype)).dtype
        holder = nn.Module()  # because the layer's own _apply may need all weights, as an LSTM's
        vars(holder)["_parameters"] = vars(self)["_parameters"]
        holder._apply(fn, recurse)
        return self


def other_layer(
    name: str, described: nn.Module, run: Run, lost: Collection[tuple[str, str]]
) -> dict[str, nn.Module]:
    """Returns placeholders of a layer and of its inner modules, by their names in the layer."""
    tensors = (*described.parameters(), *described.buffers())
    layer = _Elsewhere(run, name, lost, {tensor.dtype: tensor.dtype for tensor in tensors})
    for path, module in described.named_modules():
        stand_in = with_class(nn.Module(), OtherLayer, type(module))
        vars(stand_in).update(training=module.training, _pipegrad_place=_Place(layer, path, module))
        layer.parts[id(module)] = stand_in
    return {path: layer.parts[id(part)] for path, part in described.named_modules()}


def filled(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a tensor of nan, or of zeros if the dtype has no nan, with memory for one number."""
    value = torch.nan if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), value, dtype=dtype, device=device).expand(tuple(shape))


def computed_leaves(
    call: Call, described: nn.Module, args: Any, kwargs: Any
) -> tuple[list[Any], bool]:
    """Returns the leaves of a layer's result and changes, with shapes instead of tensors.

    Fake tensors are enough for most layers. If the layer's code needs values of tensors, integers
    such as sizes of images have their real values. If that is not enough, all other tensors are
    zeros, and a floating-point number in the result is nan, because it may depend on values.

    Returns:
        The leaves, and True if the layer's code needs values.
    """
    failures = list[Exception]()
    for given, dtype in product((False, True), (None, EXPERTS)):
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        try:
            with quiet_fake_tensors():
                run = _leaves(call, described, args, kwargs, mode=mode, dtype=dtype, given=given)
                return run, given
        except Exception as error:  # noqa: BLE001 - any error of a layer that needs values
            failures.append(error)
    known = [x.value for x in call.outputs[: call.num_returned]]
    numbers = [x for x in known if isinstance(x, Number) and not isinstance(x, float)]
    if numbers:
        raise StepError(
            f"layer {call.layer!r} computes the number {numbers[0]!r} of values, and is on another "
            f"stage: use a tensor"
        ) from failures[0]
    with torch.random.fork_rng(devices=[]):
        run = _leaves(call, described, args, kwargs, mode=nullcontext(), dtype=None, given=True)
    return [torch.nan if isinstance(x, float) else x for x in run], True


@torch.no_grad()
def _leaves(
    call: Call,
    described: nn.Module,
    args: Any,
    kwargs: Any,
    *,
    mode: AbstractContextManager[object],
    dtype: torch.dtype | None,
    given: bool,
) -> list[Any]:
    """Runs a layer on tensors of a mode, or on real integers if `given`; returns its leaves."""

    def made(x: Tensor) -> Tensor:
        is_real = x.is_floating_point() or x.is_complex()
        if given and not is_real and not x.is_meta:
            return x.to("cpu", copy=True)
        with mode:
            return torch.zeros(x.shape, dtype=dtype if dtype and is_real else x.dtype)

    state = {**dict(described.named_parameters()), **dict(described.named_buffers())}
    tensors = {name: made(x) for name, x in state.items()}
    everything = Watch(described, args, kwargs)
    try:
        args, kwargs = replaced((args, kwargs), made, {})
        known = Watch(described, args, kwargs, call.changes)
        with known.listening(), nullcontext() if given else mode:
            returned = torch.func.functional_call(described, tensors, args, kwargs)
        leaves = tree_flatten((returned, known.values()))[0]
        shapes = [x.shape if isinstance(x, Tensor) else x for x in leaves]
        return [x if isinstance(x, torch.Size | Number) else None for x in shapes]
    finally:
        everything.restore()
