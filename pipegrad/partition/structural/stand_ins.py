"""Stand-ins: what is in the place of another stage's layer, and answers what code asks of it.

While the stage runs, a stand-in has the modules, parameters and buffers of its layer by name, of
the right dtype and on the device of the stage, but filled with nan and without memory. Outside of a
forward it has none: an optimizer or a checkpoint of the stage does not see them.
"""
# ruff: noqa: ANN401 - code may ask for anything

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pipegrad.errors import StepError
from pipegrad.interop.private import FakeTensorMode, quiet_fake_tensors, tree_flatten
from pipegrad.partition.structural.calls import Call, Replaced, Watch
from pipegrad.partition.structural.shallow import as_kind

if TYPE_CHECKING:
    from pipegrad.partition.structural.stage_module import Run

# The grouped products of experts know fake tensors of this dtype alone.
EXPERTS = torch.bfloat16


class _Table:
    """A table of a module: with what the layer has while the stage runs, and without it else."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, part: Any, kind: object = None) -> Any:
        table = vars(part)[self._name]  # has what code outside of layers uses on this stage
        stand_in = vars(part).get("_pipegrad_part")
        return stand_in.table(self._name) | table if stand_in and stand_in.run.is_running else table

    def __set__(self, part: Any, value: object) -> None:
        vars(part)[self._name] = value


@dataclass(eq=False)
class _Part:
    """A module of a layer that is elsewhere.

    Attributes:
        run: Of the stage.
        layer: Name of the layer.
        described: The module, on the meta device.
        lost: Names of attributes that the layer changes, but not to tensors.
        dtypes: Those at the cut -> those behind conversions of the stage; of the whole layer.
        children: What stands for the modules inside.
        parts: Of the layer itself: what stands for all of its modules.
    """

    run: Run
    layer: str
    described: nn.Module
    lost: Collection[str]
    dtypes: dict[torch.dtype, torch.dtype]
    children: dict[str, nn.Module | None] = field(default_factory=dict)
    parts: Sequence[nn.Module] = ()
    _filled: dict[object, Any] = field(default_factory=dict)

    def table(self, name: str) -> dict[str, Any]:
        """Returns a table of the module."""
        if name == "_modules":
            return self.children
        meta = vars(self.described)[name]
        return {key: None if x is None else self.tensor(x) for key, x in meta.items()}

    def tensor(self, described: Tensor) -> Tensor:
        """Returns what stands for a tensor of the module."""
        dtype = self.dtypes.get(described.dtype, described.dtype)
        key = id(described), dtype, self.run.device
        if key not in self._filled:
            value = filled(described.shape, dtype, self.run.device)
            if isinstance(described, nn.Parameter):
                value = nn.Parameter(value, described.requires_grad)
            self._filled[key] = value
        return self._filled[key]  # type: ignore[no-any-return]


class OtherLayer(nn.Module):
    """What stands in the place of another stage's layer, or of a module inside of it."""

    _parameters: Any = _Table()
    _buffers: Any = _Table()
    _modules: Any = _Table()

    def _pipegrad_call(self, _: Any, args: Any, kwargs: Any) -> Any:
        """Returns what stands for the outputs of the layer."""
        part: _Part = vars(self)["_pipegrad_part"]
        number = part.run.enter(part.layer) if part.parts else None
        if number is None:
            raise part.run.refused_inside(part.layer)
        return part.run.other(number, self, part.described, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        part: _Part = vars(self)["_pipegrad_part"]
        if name in vars(self)["_parameters"]:  # code outside of layers uses it on this stage
            return vars(self)["_parameters"][name]
        if name in part.lost:
            raise StepError(
                f"layer {part.layer!r} changes its attribute {name!r}, which is no tensor, and "
                f"code on another stage reads it: use a tensor, or what the layer returns"
            )
        if name in part.children:
            return part.children[name]
        value = getattr(part.described, name)
        return part.tensor(value) if isinstance(value, Tensor) else value

    def train(self, mode: bool = True) -> OtherLayer:
        """Sets the mode of all modules of the layer."""
        for part in vars(self)["_pipegrad_part"].parts:
            vars(part)["training"] = mode
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> OtherLayer:
        """Converts no tensor: it has none. Those that it shows later have the new dtypes."""
        dtypes = vars(self)["_pipegrad_part"].dtypes
        for first, dtype in dtypes.items():
            dtypes[first] = fn(torch.empty((), dtype=dtype)).dtype
        return self


def other_layer(
    layer: nn.Module,
    name: str,
    described: nn.Module,
    run: Run,
    lost: Collection[tuple[str, str]],
) -> dict[int, nn.Module]:
    """Returns what stands in the place of a layer and of the modules inside, by the id of each.

    Args:
        layer: The layer.
        name: Of the layer.
        described: The layer, on the meta device; see `without_memory`.
        run: Of the stage.
        lost: As `Call`.
    """
    tensors = (*described.parameters(), *described.buffers())
    dtypes = {tensor.dtype: tensor.dtype for tensor in tensors}
    originals, parts = dict(layer.named_modules()), dict[int, nn.Module]()
    for path, module in described.named_modules():
        stand_in = parts[id(module)] = as_kind(nn.Module(), OtherLayer, type(module))
        missing = {attribute for at, attribute in lost if at == path}
        vars(stand_in)["_pipegrad_part"] = _Part(run, name, module, missing, dtypes)
        vars(stand_in)["training"] = module.training
        for hooks in ("_forward_hooks", "_forward_hooks_with_kwargs"):
            vars(stand_in)[hooks] = vars(originals[path])[hooks].copy()
    for module in described.modules():
        vars(parts[id(module)])["_pipegrad_part"].children.update(
            {key: child and parts[id(child)] for key, child in module._modules.items()}
        )
    vars(parts[id(described)])["_pipegrad_part"].parts = [*parts.values()]
    return {id(originals[path]): parts[id(part)] for path, part in described.named_modules()}


def filled(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a tensor of nan, or of zeros if there is none, with the memory of one number."""
    value = torch.nan if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), value, dtype=dtype, device=device).expand(tuple(shape))


def leaf_of(
    call: Call, described: nn.Module, args: Any, kwargs: Any, leaf: int
) -> tuple[Any, bool]:
    """Returns a leaf of what a layer returns or changes, and of a tensor the shape.

    Nothing is computed, unless the layer's code needs values of tensors. If those of integers do,
    such as sizes of images, these are what they are. Else all others are zeros, and a number that
    depends on values is nan.

    Returns:
        Behind it, whether the layer's code needs values.
    """
    output = call.outputs[leaf]
    failures = list[Exception]()
    for given, dtype in product((False, True), (None, EXPERTS)):
        try:
            with quiet_fake_tensors():
                mode = FakeTensorMode(allow_non_fake_inputs=True)
                result = _leaf(
                    call, described, args, kwargs, leaf, mode=mode, dtype=dtype, given=given
                )
            break
        except Exception as error:  # noqa: BLE001 - whatever a layer raises that needs values
            failures.append(error)
    else:
        given = True
        if isinstance(output.value, float):
            return torch.nan, given
        if output.shape is None:
            raise StepError(
                f"layer {call.layer!r} computes the number {output.value!r} of values, and is on "
                f"another stage: use a tensor"
            ) from failures[0]
        with torch.random.fork_rng(devices=[]):
            result = _leaf(
                call, described, args, kwargs, leaf, mode=nullcontext(), dtype=None, given=given
            )
    return (result.shape if isinstance(result, Tensor) else result), given


@torch.no_grad()
def _leaf(
    call: Call,
    described: nn.Module,
    args: Any,
    kwargs: Any,
    leaf: int,
    *,
    mode: AbstractContextManager[object],
    dtype: torch.dtype | None,
    given: bool,
) -> Any:
    """Returns a leaf of what a layer makes of tensors of a mode, and of integers if `given`."""

    def made(x: Tensor) -> Tensor:
        is_real = x.is_floating_point() or x.is_complex()
        if given and not is_real and not x.is_meta:
            return x.to("cpu", copy=True)
        with mode:
            return torch.zeros(x.shape, dtype=dtype if dtype and is_real else x.dtype)

    state = {**dict(described.named_parameters()), **dict(described.named_buffers())}
    tensors = {name: made(x) for name, x in state.items()}
    everything, others = Watch(described, args, kwargs), Replaced(made)
    try:
        args, kwargs = others.of(args), others.of(kwargs)
        known = Watch(described, args, kwargs, call.changes)
        with known.listening(), nullcontext() if given else mode:
            returned = torch.func.functional_call(described, tensors, args, kwargs)
        leaves = tree_flatten(returned)[0]
        for values in known.values():
            leaves += tree_flatten(values)[0]
    finally:
        everything.restore()
    return leaves[leaf]
