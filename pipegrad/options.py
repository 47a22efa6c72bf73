"""Options by name, for whatever a configuration selects: checked before anything is called."""

from __future__ import annotations

import difflib
import hashlib
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def complaints_of(
    function: Callable[..., object], options: Collection[str], *, given: Collection[str] = ()
) -> str:
    """Returns what is wrong with the names of `options` for `function`; "" if nothing is.

    Args:
        function: A class or function; its signature is read, it is not called. Without one it
            takes anything.
        options: Names that are to be passed by keyword.
        given: Parameters that the caller passes by itself: neither missing nor allowed.
    """
    try:
        every = inspect.signature(function).parameters.values()
    except ValueError:  # some functions written in C
        return ""
    by_name = [p for p in every if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    allowed = [p.name for p in by_name if p.name not in given]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in every)
    unknown = [o for o in sorted(options) if o not in allowed and (o in given or not takes_any)]
    needed = [p.name for p in by_name if p.default is p.empty and p.name in allowed]
    missing = [name for name in needed if name not in options]
    if not unknown and not missing:
        return ""
    complaints = [f"has no option {option!r}" for option in unknown]
    complaints += [f"needs the option {option!r}" for option in missing]
    closest = closest_first((unknown + missing)[0], allowed)
    return f"{', '.join(complaints)}; allowed, closest first: {closest}"


def closest_first(word: str, known: Iterable[str]) -> str:
    """Returns the known names as one line: those close to `word`, then the others by name."""
    names = sorted(set(known))
    plain = {name.lower(): name for name in reversed(names)}
    close = [plain[found] for found in difflib.get_close_matches(word.lower(), plain)]
    return ", ".join(close + [name for name in names if name not in close]) or "none"


def written(value: object) -> str:
    """Returns `value` in words: the same on two ranks if, and only if, it means the same there.

    Plain values as `repr` has them; sets and mappings in an order of their own, tensors by a digest
    of all their elements, functions by name and code, other objects by class and attributes. No
    address of memory is in it. Of modules the class alone is: each rank has stages of its own.
    """
    return _written(value, ())


def _written(value: object, inside: tuple[int, ...]) -> str:
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
    bits = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"tensor({tuple(value.shape)}, {value.dtype}, {hashlib.sha256(bits).hexdigest()})"


def _partial(value: partial[object], each: Each) -> str:
    return f"partial({each(value.func)}, {each(value.args)}, {each(value.keywords)})"


def _function(value: FunctionType, each: Each) -> str:
    code = value.__code__
    plain = [c for c in code.co_consts if isinstance(c, int | float | str | bytes | None)]
    digest = hashlib.sha256(code.co_code + repr((code.co_names, plain)).encode()).hexdigest()
    held = [cell.cell_contents for cell in value.__closure__ or ()]
    return f"{value.__module__}:{value.__qualname__}({digest[:16]}, {each(held)})"


def _class(value: type, _: Each) -> str:
    return f"{value.__module__}:{value.__qualname__}"


def _module(value: nn.Module, each: Each) -> str:
    return _class(type(value), each)


_WRITERS: tuple[tuple[type, Callable[[Any, Each], str]], ...] = (
    (Mapping, _mapping),
    (set, _set),
    (frozenset, _set),
    (list, _list),
    (tuple, _tuple),
    (torch.Tensor, _tensor),
    (partial, _partial),
    (FunctionType, _function),
    (type, _class),
    (nn.Module, _module),
)
