"""Values as text: two ranks have the same text exactly if the values mean the same.

By this ranks compare handlers and codecs, which have the text of their constructors' arguments.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from functools import partial
from inspect import Parameter, Signature
from types import CodeType, FunctionType
from typing import Self

import torch
from torch import nn

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def written(value: object, inside: tuple[int, ...] = ()) -> str:  # noqa: C901, PLR0912 - a table
    """Returns a text of `value`, which is equal on two ranks exactly if the values mean the same.

    Plain values have their `repr`. Sets and mappings are sorted. Tensors have a digest of all
    elements, functions their name and code, other objects their class and attributes. The text has
    no address of memory. A module has only its class, because each rank has other stages.

    Args:
        value: Any object.
        inside: The ids of the values around it, because a value may contain itself.
    """
    if id(value) in inside:
        return "..."
    each = partial(written, inside=(*inside, id(value)))
    # A more special kind must come before a more general one, because the first match counts.
    match value:
        case Mapping():
            text = f"{{{', '.join(sorted(f'{each(k)}: {each(v)}' for k, v in value.items()))}}}"
        case set() | frozenset():
            text = f"{type(value).__name__}({{{', '.join(sorted(map(each, value)))}}})"
        case list():
            text = f"[{', '.join(map(each, value))}]"
        case tuple():
            text = f"({', '.join(map(each, value))}{',' * (len(value) == 1)})"
        case torch.Tensor():
            text = f"tensor({tuple(value.shape)}, {value.dtype}, {digest(value)})"
        case partial():
            text = f"partial({each(value.func)}, {each(value.args)}, {each(value.keywords)})"
        case FunctionType():
            # Use its code, its defaults and its captured values, because these determine a
            # function, and its address differs between processes.
            held = [cell.cell_contents for cell in value.__closure__ or ()]
            parts = [value.__code__, held, value.__defaults__, value.__kwdefaults__]
            text = f"{_class(value)}{each(parts)}"
        case CodeType():
            parts = [value.co_code, value.co_names, value.co_consts]
            text = hashlib.sha256(each(parts).encode()).hexdigest()[:16]
        case type():
            text = _class(value)
        case nn.Module():
            text = _class(type(value))
        case _ if type(value).__repr__ is object.__repr__:
            text = f"{_class(type(value))}({each(getattr(value, '__dict__', {}))})"
        case _:
            text = _ADDRESS.sub("", repr(value))
    return text


def digest(tensor: torch.Tensor) -> str:
    """Returns a SHA-256 of the bits of all elements, in hexadecimal digits."""
    bits = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(bits.data).hexdigest()


def _class(value: type | FunctionType) -> str:
    return f"{value.__module__}:{value.__qualname__}"


class Constructed:
    """Base of contracts whose instances may be given by a user.

    Attributes:
        made_with: The arguments of its constructor, as text.
    """

    made_with: tuple[tuple[str, str], ...]

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        """Stores the arguments of the plug-in, because ranks compare instances by them."""
        # Here and not in `__init__`, because a subclass need not call the `__init__` of its base.
        if (args or kwargs) and cls.__init__ is object.__init__:
            raise TypeError(f"{cls.__name__}() takes no arguments")
        plugin = super().__new__(cls)
        arguments = {**{str(i): value for i, value in enumerate(args)}, **kwargs}
        plugin.made_with = tuple((name, written(arguments[name])) for name in sorted(arguments))
        return plugin


# `inspect.signature` reads the `__init__` of a subclass if it has one, otherwise this `__new__`.
# This signature is empty, because a plug-in without an `__init__` has no options.
Constructed.__new__.__signature__ = Signature(  # type: ignore[attr-defined]
    [Parameter("cls", Parameter.POSITIONAL_ONLY)]
)
