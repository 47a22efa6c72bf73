"""Shallow copies of a model: the same code and tensors, with other modules in some places."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial, wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from pipegrad.errors import TopologyError, in_words
from pipegrad.interop.private import tree_flatten
from pipegrad.model.wrappers import is_imported_kind

_QUANTIZED = ("Linear4bit", "Linear8bitLt")  # of bitsandbytes


def shallow(
    module: nn.Module, replaced: Mapping[int, nn.Module], copies: dict[int, nn.Module] | None = None
) -> nn.Module:
    """Returns a copy of a model that holds other modules in the place of some.

    Modules without a replaced one inside are the model's own. All tensors are the model's own, and
    stand in tables of the copy where a replaced module is inside.

    Args:
        module: The model, or a module of it.
        replaced: A module's id -> what stands in its place.
        copies: Those of other modules of the model, by id.

    Raises:
        TopologyError: If a module that must be copied calls the code of another object.
    """
    copies = {} if copies is None else copies
    if id(module) in replaced:
        return replaced[id(module)]
    if id(module) in copies:
        return copies[id(module)]
    if not any(id(part) in replaced or _holds(part, replaced) for part in module.modules()):
        return module
    forward = vars(module).get("forward")  # peft may hand on to the model inside
    if (forward and _module_of(forward) is None) or hasattr(module, "_orig_mod"):
        raise TopologyError(
            f"the forward of a {type(module).__name__} was exchanged, as torch.compile and "
            f"accelerate do: cut the model first, and compile or wrap its stages"
        )
    result = copies[id(module)] = twin(module)
    vars(result)["_parameters"] = dict(module._parameters)
    vars(result)["_buffers"] = dict(module._buffers)
    relink(result, replaced, copies)
    return result


def relink(
    module: nn.Module, replaced: Mapping[int, nn.Module], copies: dict[int, nn.Module] | None = None
) -> None:
    """Puts what stands in the place of other modules into the attributes of a twin."""
    copies = {} if copies is None else copies
    others = {key: x for key, x in vars(module).items() if key != "_modules"}
    attributes = {key: _held(x, replaced, copies) for key, x in others.items()}
    attributes["_modules"] = {
        name: child and shallow(child, replaced, copies) for name, child in module._modules.items()
    }
    vars(module).update(attributes)


def _holds(module: nn.Module, replaced: Mapping[int, nn.Module]) -> bool:
    """Whether replaced modules are in plain lists and the like of a module."""
    return any(id(part) in replaced for x in vars(module).values() for part in _listed(x))


def _listed(value: object) -> Iterator[nn.Module]:
    """Yields the modules in a plain list, tuple or dict, also in those inside of it."""
    if type(value) in (list, tuple, dict):
        items: Any = value.values() if isinstance(value, dict) else value
        for x in items:
            if isinstance(x, nn.Module):
                yield from x.modules()
            else:
                yield from _listed(x)


def _held(value: Any, replaced: Mapping[int, nn.Module], copies: dict[int, nn.Module]) -> Any:  # noqa: ANN401
    """Returns an attribute in which modules may be listed, with what stands in their place."""
    if isinstance(value, nn.Module):
        return shallow(value, replaced, copies)
    if (holder := _module_of(value)) is not None:
        return MethodType(value.__func__, shallow(holder, replaced, copies))
    if type(value) not in (list, tuple, dict):
        return value
    items = list(value.values() if isinstance(value, dict) else value)
    mapped = [_held(x, replaced, copies) for x in items]
    if all(x is y for x, y in zip(mapped, items, strict=True)):
        return value
    return dict(zip(value, mapped, strict=True)) if isinstance(value, dict) else type(value)(mapped)


def _module_of(method: Any) -> nn.Module | None:  # noqa: ANN401
    """Returns the module of a method; None of any other value."""
    module = method.__self__ if isinstance(method, MethodType) else None
    return module if isinstance(module, nn.Module) else None


def twin(module: nn.Module) -> nn.Module:
    """Returns a module with the tables of another one. `copy.copy` refuses parametrized modules."""
    result = type(module).__new__(type(module))
    vars(result).update(vars(module))
    return result


def isolated(
    module: nn.Module, tensor_of: Callable[[Tensor], Tensor], shared: Sequence[object] = ()
) -> nn.Module:
    """Returns a deep copy of a module, but for its tensors.

    Args:
        module: The module.
        tensor_of: Returns what stands in the place of a parameter, buffer or other tensor.
        shared: What the copy holds itself.

    Raises:
        TopologyError: If an attribute cannot be copied.
    """
    # Beside parameters and buffers there are caches, in attributes, lists and dicts.
    leaves = (leaf for part in module.modules() for leaf in tree_flatten(vars(part))[0])
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    known: dict[int, Any] = {id(tensor): tensor_of(tensor) for tensor in tensors}
    for part in module.modules():
        # Only a real tensor knows how it was quantized.
        is_quantized = any(is_imported_kind(part, "bitsandbytes.nn", kind) for kind in _QUANTIZED)
        if is_quantized and known[id(part.weight)] is not part.weight:
            known[id(part)] = _Unquantized(part, tensor_of)
    try:
        return copy.deepcopy(module, known | {id(x): x for x in shared})
    except Exception as error:  # whatever an attribute raises
        raise TopologyError(
            f"{type(module).__name__} holds what cannot be copied: {in_words(error)}. Set such "
            f"attributes behind the cut"
        ) from error


class _Unquantized(nn.Linear):
    """What stands for a quantized layer where nothing is computed; it takes any dtype."""

    def __init__(self, layer: Any, tensor_of: Callable[[Tensor], Tensor]) -> None:  # noqa: ANN401
        has_bias = layer.bias is not None
        super().__init__(layer.in_features, layer.out_features, has_bias, device="meta")
        self.requires_grad_(False)
        vars(self)["_parameters"] = {
            n: x if x is None else tensor_of(x) for n, x in self._parameters.items()
        }

    def forward(self, x: Tensor) -> Tensor:
        """Returns what has the shape and the dtype of the layer's result."""
        result = nn.functional.linear(x, self.weight.to(x.dtype))
        bias: Tensor | None = self._parameters["bias"]
        return result if bias is None else result + bias.to(x.dtype)


def without_memory(model: nn.Module, shared: Sequence[object] = ()) -> nn.Module:
    """Returns a copy of a model on the meta device.

    Args:
        model: The model, or a layer.
        shared: Containers that the copy holds, too.
    """

    def on_meta(tensor: Tensor) -> Tensor:
        copied = torch.empty_like(tensor, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        return nn.Parameter(copied, tensor.requires_grad) if is_parameter else copied

    return isolated(model, on_meta, shared)


def as_kind(
    module: nn.Module, kind: type[nn.Module], other: type[nn.Module] | None = None
) -> nn.Module:
    """Makes a module one of two classes, and returns it.

    Args:
        module: The module.
        kind: The class whose methods count first. Its `_pipegrad_call`, if it has one, is given
            every call of the module, or of its forward: the function, and its arguments.
        other: The other class; that of the module if None.
    """
    both: Any = _both  # mypy: modules' classes have no hash
    module.__class__ = both(kind, other or type(module))
    return module


@cache
def _both(kind: Any, other: Any) -> Any:  # noqa: ANN401
    # It looks like the module's own class, to those who print it or ask for its name.
    names = {"__module__": other.__module__, "__qualname__": other.__qualname__}
    if hasattr(kind, "_pipegrad_call"):  # code may call the forward alone, past hooks
        calls = ("__call__", "forward")
        names |= {name: _through(kind._pipegrad_call, getattr(other, name)) for name in calls}
    return type(other.__name__, (kind, other), names)


def _through(around: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def through(module: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return around(module, partial(function, module), args, kwargs)

    return through
