"""Values as text: two ranks have the same text exactly if the values mean the same.

So ranks compare handlers and codecs, which have the text of what they were made with.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from inspect import Parameter, Signature
from types import CodeType, FunctionType
from typing import Any, Self

import torch
from torch import nn

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def written(value: object) -> str:
    """Returns a text of `value`, which is equal on two ranks exactly if the values mean the same.

    Plain values have their `repr`. Sets and mappings are sorted. Tensors have a digest of all
    elements, functions their name and code, other objects their class and attributes. The text has
    no address of memory. A module has only its class, since each rank has other stages.
    """
    return _written(value, ())


def digest(tensor: torch.Tensor) -> str:
    """Returns a SHA-256 of the bits of all elements, in hexadecimal digits."""
    bits = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(bits.data).hexdigest()


def _written(value: object, inside: tuple[int, ...]) -> str:
    # `inside` has the ids of the values around this one, so a value that contains itself ends.
    if id(value) in inside:
        return "..."
    each = partial(_written, inside=(*inside, id(value)))
    for kind, write in _WRITERS:
        if isinstance(value, kind):
            return write(value, each)
    if type(value).__repr__ is object.__repr__:
        return f"{_class(type(value), each)}({each(getattr(value, '__dict__', {}))})"
    return _ADDRESS.sub("", repr(value))


Each = Callable[[object], str]


def _mapping(value: Mapping[object, object], each: Each) -> str:
    return f"{{{', '.join(sorted(f'{each(k)}: {each(v)}' for k, v in value.items()))}}}"


def _set(value: Collection[object], each: Each) -> str:
    return f"{type(value).__name__}({{{', '.join(sorted(map(each, value)))}}})"


def _list(value: Collection[object], each: Each) -> str:
    return f"[{', '.join(map(each, value))}]"


def _tuple(value: Collection[object], each: Each) -> str:
    return f"({', '.join(map(each, value))}{',' * (len(value) == 1)})"


def _tensor(value: torch.Tensor, _: Each) -> str:
    return f"tensor({tuple(value.shape)}, {value.dtype}, {digest(value)})"


def _partial(value: partial[object], each: Each) -> str:
    return f"partial({each(value.func)}, {each(value.args)}, {each(value.keywords)})"


def _function(value: FunctionType, each: Each) -> str:
    # The address of a function differs between processes. Its code, its defaults and the values
    # that it has captured decide what it does.
    held = [cell.cell_contents for cell in value.__closure__ or ()]
    defaults = [each(x) for x in (value.__defaults__, value.__kwdefaults__) if x]
    texts = ", ".join([each(value.__code__), each(held), *defaults])
    return f"{value.__module__}:{value.__qualname__}({texts})"


def _code(value: CodeType, each: Each) -> str:
    text = each([value.co_code, value.co_names, value.co_consts])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _class(value: type, _: Each) -> str:
    return f"{value.__module__}:{value.__qualname__}"


def _module(value: nn.Module, each: Each) -> str:
    return _class(type(value), each)


# The first kind that fits counts, so a more special kind must come before a more general one.
_WRITERS: tuple[tuple[type, Callable[[Any, Each], str]], ...] = (
    (Mapping, _mapping),
    (set, _set),
    (frozenset, _set),
    (list, _list),
    (tuple, _tuple),
    (torch.Tensor, _tensor),
    (partial, _partial),
    (FunctionType, _function),
    (CodeType, _code),
    (type, _class),
    (nn.Module, _module),
)


class Constructed:
    """Base of contracts whose instances may be given by a user.

    Attributes:
        made_with: The arguments of its constructor, as text.
    """

    made_with: tuple[tuple[str, str], ...]

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        """Stores the arguments of the plug-in, so that ranks can compare instances."""
        # Here and not in `__init__`: a subclass need not call the `__init__` of its base class.
        if (args or kwargs) and cls.__init__ is object.__init__:
            raise TypeError(f"{cls.__name__}() takes no arguments")
        plugin = super().__new__(cls)
        arguments = {**{str(i): value for i, value in enumerate(args)}, **kwargs}
        plugin.made_with = tuple((name, written(arguments[name])) for name in sorted(arguments))
        return plugin


# `inspect.signature` takes the `__init__` of a subclass if it has one, otherwise this `__new__`. A
# plug-in without an `__init__` has no options, so this signature is empty.
Constructed.__new__.__signature__ = Signature(  # type: ignore[attr-defined]
    [Parameter("cls", Parameter.POSITIONAL_ONLY)]
)
