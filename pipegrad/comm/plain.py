"""Plain data: the values that ranks send each other as text, without code that can run.

[Note: plain data] No rank reads a pickle of another rank, because a pickle may call any function
when it is read. Values in the key-value store are JSON, written here: numbers, text, bytes, lists,
tuples, sets, tables, paths, dtypes, devices, tensors on the host, and records of the classes in
`_RECORDS`. A type that JSON lacks is an object with one key, which names the type. A record is
made from its fields by a call of its class. Equal values have equal bytes.
"""

from __future__ import annotations

import json
import math
from base64 import b64decode, b64encode
from collections.abc import Callable
from enum import Enum
from functools import cache
from importlib import import_module
from itertools import chain
from pathlib import Path, PurePath
from typing import Any, TypeVar, overload

import torch

from pipegrad.errors import MessageError

T = TypeVar("T")
MOST_BYTES = 2**30  # of a message
_MOST_ITEMS = 2**24  # of all lists and records of a message together
_MOST_DEPTH = 64
_MOST_DIMENSIONS = 64  # torch's own limit
_VERSION = b"pipegrad 2 "
# All other classes that may be sent, by module. A reader makes no other class.
_RECORDS = {
    "audit.report": ("Finding", "Gradient", "Variant"),
    "comm.activity": ("Failure", "Record"),
    "comm.agreement": ("_Failure",),
    "model.dtensor": ("Layout", "Shard"),
    "model.manifest": ("ParameterEntry", "RankManifest"),
    "observe.doctor": ("RankFacts",),
    "observe.recording": ("Reading",),
    "observe.step_recorder": ("Recorded",),
    "partition.generation": ("CacheAt",),
    "pipeline.compare": ("Facts",),
    "pipeline.edges": ("Spec",),
    "pipeline.wiring": ("Described",),
    "simulation.costs": ("CodecCosts", "HostCosts", "LinkCosts", "Network", "StageCosts"),
    "simulation.timeline": ("Span",),
}
_MODULES = {f"{m}.{name}": (m, name) for m, names in _RECORDS.items() for name in names}
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}


def dumps(value: object) -> bytes:
    """Returns a value as bytes that `loads` reads; see [Note: plain data].

    Subclasses of the builtin types are written as these, such as a ``torch.Size`` as a tuple.

    Raises:
        MessageError: If it is not plain data, or too large.
    """
    content = _VERSION + _text(_tree(value, 0)).encode()
    if len(content) > MOST_BYTES:
        raise MessageError(
            f"a message of {len(content)} bytes is too large to be sent between ranks: at most "
            f"{MOST_BYTES} are"
        )
    return content


@overload
def loads(content: bytes) -> Any: ...  # noqa: ANN401 - plain data


@overload
def loads(content: bytes, kind: type[T]) -> T: ...


def loads(content: bytes, kind: type | None = None) -> Any:
    """Returns the value that `dumps` has written.

    Raises:
        MessageError: If `content` is not a message of `dumps`, or its value is not of type `kind`.
    """
    try:
        if len(content) > MOST_BYTES or not content.startswith(_VERSION):
            raise MessageError("expected a message of pipegrad, as this version writes it")
        if content.count(b",") > _MOST_ITEMS:
            raise MessageError("it has too many values")
        value = json.loads(content[len(_VERSION) :].decode("ascii"), object_hook=_opened)
        if kind is not None and type(value) is not kind:
            raise MessageError(f"it is of {type(value).__name__}, expected {kind.__name__}")
    except Exception as error:  # a class may raise any error for a damaged message
        raise MessageError(f"a message between ranks cannot be read: {error}") from error
    return value


# Writing.


def _text(tree: object) -> str:
    return json.dumps(tree, separators=(",", ":"))


def _tree(value: object, depth: int) -> object:
    """Returns a value as types of JSON."""
    if depth > _MOST_DEPTH:
        raise MessageError(f"more than {_MOST_DEPTH} levels cannot be sent between ranks")
    kind: Any = type(value)
    return (_WRITERS.get(kind) or _writer_of(kind))(value, depth + 1)


def _list(value: Any, depth: int) -> list[object]:  # noqa: ANN401 - any iterable
    return [_tree(item, depth) for item in value]


def _set(value: Any, depth: int) -> list[object]:  # noqa: ANN401 - a set of either kind
    # Sort, because the order of a set differs between processes, and equal sets must have equal
    # bytes.
    return sorted(_list(value, depth), key=_text)


def _tensor(value: torch.Tensor, depth: int) -> object:
    if value.layout is not torch.strided or value.device.type not in ("cpu", "meta"):
        raise MessageError(f"a tensor on {value.device} cannot be sent through the store")
    content = None
    if not value.is_meta:
        held = value.detach().resolve_conj().resolve_neg().contiguous()
        content = held.reshape(-1).view(torch.uint8).numpy().tobytes()
    return _list([value.dtype, list(value.shape), value.requires_grad, content], depth)


_WRITERS: dict[type, Callable[[Any, int], object]] = {
    **dict.fromkeys((type(None), bool, int, float, str), lambda value, _: value),
    list: _list,
    tuple: lambda value, depth: {"tuple": _list(value, depth)},
    dict: lambda value, depth: {"table": _list(chain.from_iterable(value.items()), depth)},
    set: lambda value, depth: {"set": _set(value, depth)},
    frozenset: lambda value, depth: {"frozenset": _set(value, depth)},
    bytes: lambda value, _: {"bytes": b64encode(value).decode()},
    PurePath: lambda value, _: {"path": str(value)},
    torch.dtype: lambda value, _: {"dtype": str(value).removeprefix("torch.")},
    torch.device: lambda value, _: {"device": str(value)},
    torch.Tensor: lambda value, depth: {"tensor": _tensor(value, depth)},
}


@cache
def _writer_of(kind: type[Any]) -> Callable[[Any, int], object]:
    """Returns the writer of a class that is no builtin type.

    Raises:
        MessageError: If none of them may be sent.
    """
    name = f"{kind.__module__.removeprefix('pipegrad.')}.{kind.__qualname__}"
    if name in _MODULES and kind is _class(name):
        names = kind.__match_args__  # the fields of a dataclass, or of a NamedTuple
        return lambda value, depth: {name: _list([getattr(value, n) for n in names], depth)}
    # No enums and named tuples, because they would arrive as their base class.
    if not issubclass(kind, Enum) and not hasattr(kind, "_fields"):
        for base in kind.__mro__:
            if base in _WRITERS and (base is not torch.Tensor or kind is torch.nn.Parameter):
                return _WRITERS[base]
    raise MessageError(
        f"{kind.__module__}.{kind.__qualname__} cannot be sent between ranks: expected numbers, "
        f"text, bytes, lists, tuples, sets, tables, tensors on the host, or a record of pipegrad"
    )


# Reading.


def _opened(tagged: dict[str, Any]) -> object:
    """Returns the value of an object with one key."""
    ((tag, content),) = tagged.items()
    if (read := _READERS.get(tag)) is not None:
        return read(content)
    kind = _class(tag)
    if type(content) is not list or len(content) != len(kind.__match_args__):
        raise MessageError(f"it has other fields than {tag} of this version")
    return kind(*content)


def _read_tensor(content: list[Any]) -> torch.Tensor:
    """Returns a tensor on the CPU, or on the meta device."""
    dtype, shape, requires_grad, held = content
    if len(shape) > _MOST_DIMENSIONS or any(type(n) is not int or n < 0 for n in shape):
        raise MessageError(f"no tensor has the shape {shape}")
    if held is not None and len(held) != math.prod(shape) * dtype.itemsize:
        raise MessageError("a tensor has other bytes than its shape says")
    tensor = torch.empty(shape, dtype=dtype, device="meta" if held is None else "cpu")
    if held:
        memory = torch.frombuffer(bytearray(held), dtype=torch.uint8)
        tensor.view(-1).view(torch.uint8).copy_(memory)
    return tensor.requires_grad_(bool(requires_grad))


_READERS: dict[str, Callable[[Any], object]] = {
    "tuple": tuple,
    "table": lambda items: dict(zip(items[::2], items[1::2], strict=True)),
    "set": set,
    "frozenset": frozenset,
    "bytes": lambda text: b64decode(text, validate=True),
    "path": Path,
    "dtype": _DTYPES.__getitem__,
    "device": torch.device,
    "tensor": _read_tensor,
}


def _class(name: str) -> type[Any]:
    """Returns a class of `_RECORDS`.

    Raises:
        MessageError: If there is none of this name.
    """
    if name not in _MODULES:
        raise MessageError(f"no record is called {name[:100]!r}")
    module, attribute = _MODULES[name]
    kind: type[Any] = getattr(import_module(f"pipegrad.{module}"), attribute)
    return kind
