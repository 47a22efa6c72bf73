"""Copies of modules that hold other tensors, or other modules, than the original."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable
from functools import cache, partial, wraps
from itertools import chain
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from pipegrad.errors import TopologyError, in_words
from pipegrad.interop.private import tree_flatten
from pipegrad.model.wrappers import is_imported_kind

_QUANTIZED = ("Linear4bit", "Linear8bitLt")  # of bitsandbytes


def with_tensors(
    module: nn.Module, replace: Callable[[Tensor], Tensor], memo: dict[int, Any] | None = None
) -> nn.Module:
    """Returns a deep copy of a module with other tensors. Ties stay.

    Containers that functions of the module hold, such as hooks, are not copied.

    Args:
        module: The module.
        replace: Returns the replacement of a parameter, buffer or other tensor.
        memo: Id of an object -> its replacement; the copies are added, as in ``deepcopy``.

    Raises:
        TopologyError: If an attribute cannot be copied.
    """
    leaves = leaves_of(module)
    known = {} if memo is None else memo
    known |= {id(x): x for x in enclosed(leaves)}
    # Replace tensors in attributes, lists and dicts, too, because modules have caches there.
    for leaf in leaves:
        if isinstance(leaf, Tensor) and id(leaf) not in known:
            known[id(leaf)] = replace(leaf)
    for part in module.modules():
        # Replace a quantized layer, because only its real weight has the state of quantization.
        is_quantized = any(is_imported_kind(part, "bitsandbytes.nn", kind) for kind in _QUANTIZED)
        if is_quantized and known[id(part.weight)] is not part.weight:
            known[id(part)] = _Unquantized(part, replace)
    try:
        return copy.deepcopy(module, known)
    except Exception as error:  # any error of an attribute
        raise TopologyError(
            f"{type(module).__name__} holds what cannot be copied: {in_words(error)}. Set such "
            f"attributes behind the cut"
        ) from error


def leaves_of(module: nn.Module) -> list[Any]:
    """Returns the leaves of all attributes of a module and of its inner modules."""
    return [leaf for part in module.modules() for leaf in tree_flatten(vars(part))[0]]


def enclosed(leaves: Iterable[object]) -> list[object]:
    """Returns the containers in closures of functions, such as hooks."""

    def contents(cell: CellType) -> list[object]:
        try:
            return [cell.cell_contents]
        except ValueError:  # nothing yet
            return []

    functions = [x for x in leaves if isinstance(x, FunctionType)]
    cells = chain.from_iterable(function.__closure__ or () for function in functions)
    held = chain.from_iterable(map(contents, cells))
    return [x for x in held if isinstance(x, list | dict | set | deque)]


class _Unquantized(nn.Linear):
    """A placeholder of a quantized layer in a copy that computes no values, for any dtype."""

    def __init__(self, layer: Any, replace: Callable[[Tensor], Tensor]) -> None:  # noqa: ANN401
        has_bias = layer.bias is not None
        super().__init__(layer.in_features, layer.out_features, has_bias, device="meta")
        self.requires_grad_(False)
        vars(self)["_parameters"] = {
            n: x if x is None else replace(x) for n, x in self._parameters.items()
        }

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor with the shape and the dtype of the layer's result."""
        result = nn.functional.linear(x, self.weight.to(x.dtype))
        bias: Tensor | None = self._parameters["bias"]
        return result if bias is None else result + bias.to(x.dtype)


def like(tensor: Tensor, copied: Tensor) -> Tensor:
    """Returns a copy of a tensor as a parameter, if the tensor is one."""
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(copied, tensor.requires_grad) if is_parameter else copied


def without_memory(module: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """Returns a copy of a module on the meta device; see `with_tensors`."""
    return with_tensors(module, lambda x: like(x, torch.empty_like(x, device="meta")), memo)


def without_values(module: nn.Module) -> nn.Module:
    """Returns a copy of a module with saved tensors, and only these, on the meta device."""
    saved = {id(tensor) for tensor in module.state_dict(keep_vars=True).values()}
    return with_tensors(
        module,
        lambda x: like(x, torch.empty_like(x, device="meta")) if id(x) in saved else x,
    )


def twin(module: nn.Module) -> nn.Module:
    """Returns a module with the tables of another one. `copy.copy` refuses parametrized modules."""
    result = type(module).__new__(type(module))
    vars(result).update(vars(module))
    return result


def with_class(
    module: nn.Module, mixin: type[nn.Module], base: type[nn.Module] | None = None
) -> nn.Module:
    """Adds a mixin to the class of a module, and returns the module.

    Args:
        module: The module.
        mixin: The class whose methods come first. If it has a `_pipegrad_call`, each call of the
            module or of its forward becomes a call of this method, with the original function and
            the arguments.
        base: The other class; the module's class if None.
    """
    both: Any = _both  # mypy: modules' classes have no hash
    module.__class__ = both(mixin, base or type(module))
    return module


@cache
def _both(mixin: Any, base: Any) -> Any:  # noqa: ANN401
    # The name of the module's own class, because code may print it or compare it.
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    if hasattr(mixin, "_pipegrad_call"):  # code may call the forward alone, past hooks
        calls = ("__call__", "forward")
        names |= {name: _through(mixin._pipegrad_call, getattr(base, name)) for name in calls}
    return type(base.__name__, (mixin, base), names)


def _through(around: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def through(module: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return around(module, partial(function, module), args, kwargs)

    return through
