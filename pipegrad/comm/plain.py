"""Plain data: what ranks send each other as bytes, and nothing that can run.

[Note: plain data] A pickle may call any function where it is read. So no rank reads one of another
rank. What goes through the key-value store is written here: numbers, text, bytes, lists, tuples,
sets, tables, paths, dtypes, devices, tensors on the host, and records of the classes in `_RECORDS`.
A class comes into being from its fields, as by its own call. Every value begins with one byte that
says what it is, so a reader knows beforehand how much follows. Equal values have equal bytes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from importlib import import_module
from itertools import chain
from pathlib import Path, PurePath
from typing import Any, TypeVar, overload

import torch

from pipegrad.errors import MessageError

T = TypeVar("T")
MOST_BYTES = 2**30  # of a message; torch's store takes no more
_MOST_ITEMS = 2**24  # of all lists and records of a message together
_MOST_DEPTH = 64
_MOST_DIMENSIONS = 64  # torch's own limit
_VERSION = 1
# Everything else that may cross, by module. A reader makes no other class.
_RECORDS = {
    "audit.report": ("Finding", "Gradient", "Variant"),
    "comm.activity": ("Failure", "Record"),
    "comm.agreement": ("_Failure",),
    "model.dtensor": ("Layout", "Shard"),
    "model.manifest": ("ParameterEntry", "RankManifest"),
    "observe.doctor": ("RankFacts",),
    "observe.recording": ("Reading",),
    "observe.step_recorder": ("Recorded",),
    "partition.weights.saved": ("_Shard",),
    "pipeline.edges": ("Spec",),
    "pipeline.first_step": ("Learned",),
    "simulation.costs": ("CodecCosts", "HostCosts", "LinkCosts", "Network", "StageCosts"),
    "simulation.timeline": ("Span",),
}
_MODULES = {f"{m}.{name}": (m, name) for m, names in _RECORDS.items() for name in names}
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
_INT, _FLOAT, _LENGTH = struct.Struct("<q"), struct.Struct("<d"), struct.Struct("<I")
_LONG_BYTES = 1024  # of a whole number


def dumps(value: object) -> bytes:
    """Returns a value as bytes that `loads` reads; see [Note: plain data].

    Subclasses of the builtin types are written as these, such as a ``torch.Size`` as a tuple.

    Raises:
        MessageError: If it is not plain data, or too large.
    """
    out = bytearray((_VERSION,))
    _write(out, value, 0)
    if len(out) > MOST_BYTES:
        raise MessageError(
            f"a message of {len(out)} bytes is too large for the key-value store, which takes "
            f"{MOST_BYTES}"
        )
    return bytes(out)


@overload
def loads(content: bytes) -> Any: ...  # noqa: ANN401 - plain data


@overload
def loads(content: bytes, kind: type[T]) -> T: ...


def loads(content: bytes, kind: type | None = None) -> Any:
    """Returns the value that `dumps` has written.

    Args:
        content: Its bytes. They are not trusted.
        kind: What the value must be; None for anything.

    Raises:
        MessageError: If they are no such value.
    """
    try:
        if len(content) > MOST_BYTES or content[:1] != bytes((_VERSION,)):
            raise MessageError("expected a message of pipegrad, as this version writes it")
        reader = _Reader(content)
        value = reader.value(0)
        if reader.at != len(content):
            raise MessageError(f"{len(content) - reader.at} bytes follow its end")
        if kind is not None and type(value) is not kind:
            raise MessageError(f"it is of {type(value).__name__}, expected {kind.__name__}")
    except Exception as error:  # whatever a damaged message makes a class say
        raise MessageError(f"a message between ranks cannot be read: {error}") from error
    return value


# Writing.


def _write(out: bytearray, value: object, depth: int) -> None:
    kind: Any = type(value)
    write = _WRITERS.get(kind) or _writer_of(kind)
    write(out, value, depth)


def _write_int(out: bytearray, value: int, _depth: int) -> None:
    if -(2**63) <= value < 2**63:
        out += b"i"
        out += _INT.pack(value)
        return
    size = value.bit_length() // 8 + 1
    if size > _LONG_BYTES:
        raise MessageError(f"a whole number of {size} bytes cannot be sent between ranks")
    out += b"I" + _LENGTH.pack(size) + int(value).to_bytes(size, "little", signed=True)


def _write_piece(out: bytearray, tag: bytes, piece: bytes) -> None:
    if len(piece) > MOST_BYTES:
        raise MessageError(f"{len(piece)} bytes are too many for a message between ranks")
    out += tag
    out += _LENGTH.pack(len(piece))
    out += piece


def _write_set(out: bytearray, value: set[object] | frozenset[object], depth: int) -> None:
    # Sets have an order of their own in each process; equal ones must have equal bytes.
    parts = []
    for item in value:
        part = bytearray()
        _write(part, item, depth + 1)
        parts.append(bytes(part))
    out += b"S" if isinstance(value, set) else b"Z"
    out += _LENGTH.pack(len(parts))
    out += b"".join(sorted(parts))


def _write_items(
    out: bytearray, tag: bytes, items: Iterable[object], number: int, depth: int
) -> None:
    if depth >= _MOST_DEPTH:
        raise MessageError(f"more than {_MOST_DEPTH} levels cannot be sent between ranks")
    out += tag
    out += _LENGTH.pack(number)
    writers = _WRITERS
    for item in items:
        kind: Any = type(item)
        write = writers.get(kind) or _writer_of(kind)
        write(out, item, depth + 1)


def _write_tensor(out: bytearray, value: torch.Tensor, depth: int) -> None:
    if value.layout is not torch.strided or value.device.type not in ("cpu", "meta"):
        raise MessageError(f"a tensor on {value.device} cannot be sent through the store")
    held = value.detach().resolve_conj().resolve_neg().contiguous()
    is_held = value.device.type == "cpu"
    content = held.reshape(-1).view(torch.uint8).numpy().tobytes() if is_held else b""
    parts = value.dtype, tuple(value.shape), value.requires_grad, is_held, content
    _write_items(out, b"X", parts, len(parts), depth)


@cache
def _writer_of(kind: type) -> Callable[[bytearray, Any, int], None]:
    """Returns what writes instances of a class that is no builtin type.

    Raises:
        MessageError: If none of them may be sent.
    """
    name = f"{kind.__module__.removeprefix('pipegrad.')}.{kind.__qualname__}"
    if name in _MODULES and kind is _class(name):
        names, head = _fields(kind), name.encode()

        def write(out: bytearray, value: object, depth: int) -> None:
            _write_piece(out, b"r", head)
            _write_items(out, b"t", [getattr(value, n) for n in names], len(names), depth)

        return write
    # A class with a meaning of its own would arrive without it.
    if not issubclass(kind, Enum) and not hasattr(kind, "_fields"):
        for base in kind.__mro__:
            if base in _WRITERS and (base is not torch.Tensor or kind is torch.nn.Parameter):
                return _WRITERS[base]
    raise MessageError(
        f"{kind.__module__}.{kind.__qualname__} cannot be sent between ranks: expected numbers, "
        f"text, bytes, lists, tuples, sets, tables, tensors on the host, or a record of pipegrad"
    )


def _text(value: object) -> bytes:
    return str(value).encode("utf-8", "surrogatepass")  # names of files have surrogates


_WRITERS: dict[type, Callable[[bytearray, Any, int], None]] = {
    type(None): lambda out, _, __: out.extend(b"N"),
    bool: lambda out, value, _: out.extend(b"T" if value else b"F"),
    int: _write_int,
    float: lambda out, value, _: out.extend(b"d" + _FLOAT.pack(value)),
    str: lambda out, value, _: _write_piece(out, b"s", _text(value)),
    bytes: lambda out, value, _: _write_piece(out, b"b", value),
    list: lambda out, value, depth: _write_items(out, b"l", value, len(value), depth),
    tuple: lambda out, value, depth: _write_items(out, b"t", value, len(value), depth),
    dict: lambda out, value, depth: _write_items(
        out, b"m", chain.from_iterable(value.items()), len(value), depth
    ),
    set: _write_set,
    frozenset: _write_set,
    PurePath: lambda out, value, _: _write_piece(out, b"P", _text(value)),
    torch.dtype: lambda out, value, _: _write_piece(
        out, b"D", _text(value).removeprefix(b"torch.")
    ),
    torch.device: lambda out, value, _: _write_piece(out, b"V", _text(value)),
    torch.Tensor: _write_tensor,
}


# Reading.


class _Reader:
    """Reads a message from its begin.

    Attributes:
        at: Where the next value begins.
    """

    def __init__(self, content: bytes) -> None:
        self._content, self.at, self._left = content, 1, _MOST_ITEMS

    def value(self, depth: int) -> Any:  # noqa: ANN401 - plain data
        """Returns the next value."""
        tag = self._content[self.at]
        self.at += 1
        read = _READERS.get(tag)
        if read is None:
            raise MessageError(f"no value begins with {bytes((tag,))!r}")
        return read(self, depth)

    def piece(self, _depth: int = 0) -> bytes:
        """Returns bytes, whose number stands before them."""
        begin = self.at + _LENGTH.size
        (size,) = _LENGTH.unpack_from(self._content, self.at)
        if size > len(self._content) - begin:
            raise MessageError("it ends before its time")
        self.at = begin + size
        return self._content[begin : self.at]

    def text(self, _depth: int = 0) -> str:
        """Returns text."""
        return self.piece().decode("utf-8", "surrogatepass")

    def whole(self, _depth: int) -> int:
        """Returns a whole number of 8 bytes."""
        (number,) = _INT.unpack_from(self._content, self.at)
        self.at += 8
        return int(number)

    def long(self, _depth: int) -> int:
        """Returns a larger whole number."""
        piece = self.piece()
        if len(piece) > _LONG_BYTES:
            raise MessageError("a whole number is too long")
        return int.from_bytes(piece, "little", signed=True)

    def real(self, _depth: int) -> float:
        """Returns a number of 8 bytes."""
        (number,) = _FLOAT.unpack_from(self._content, self.at)
        self.at += 8
        return float(number)

    def items(self, depth: int, each: int = 1) -> list[Any]:
        """Returns values, whose number stands before them."""
        (number,) = _LENGTH.unpack_from(self._content, self.at)
        self.at += _LENGTH.size
        number *= each
        self._left -= number
        # Each of them has a byte at least.
        if depth >= _MOST_DEPTH or self._left < 0 or number > len(self._content) - self.at:
            raise MessageError("it has too many values, or they lie too deep")
        content, readers, values = self._content, _READERS, list[Any]()
        for _ in range(number):
            read = readers.get(content[self.at])
            if read is None:
                raise MessageError(f"no value begins with {content[self.at : self.at + 1]!r}")
            self.at += 1
            values.append(read(self, depth + 1))
        return values

    def table(self, depth: int) -> dict[Any, Any]:
        """Returns a table."""
        items = self.items(depth, 2)
        return dict(zip(items[::2], items[1::2], strict=True))

    def record(self, depth: int) -> object:
        """Returns an instance of a class of `_RECORDS`."""
        name = self.text()
        kind = _class(name)
        values = self.value(depth)
        if type(values) is not tuple or len(values) != len(_fields(kind)):
            raise MessageError(f"it has other fields than {name} of this version")
        return kind(**dict(zip(_fields(kind), values, strict=True)))

    def dtype(self, _depth: int) -> torch.dtype:
        """Returns a dtype."""
        return _DTYPES[self.text()]

    def tensor(self, depth: int) -> torch.Tensor:
        """Returns a tensor on the CPU, or on the meta device."""
        dtype, shape, requires_grad, is_held, content = self.items(depth)
        if len(shape) > _MOST_DIMENSIONS or any(type(n) is not int or n < 0 for n in shape):
            raise MessageError(f"no tensor has the shape {shape}")
        if is_held:
            if len(content) != math.prod(shape) * dtype.itemsize:
                raise MessageError("a tensor has other bytes than its shape says")
            tensor = torch.empty(shape, dtype=dtype)
            if content:
                memory = torch.frombuffer(bytearray(content), dtype=torch.uint8)
                tensor.view(-1).view(torch.uint8).copy_(memory)
        else:
            tensor = torch.empty(shape, dtype=dtype, device="meta")
        return tensor.requires_grad_(bool(requires_grad))


_BY_TAG: dict[str, Callable[[_Reader, int], Any]] = {
    "N": lambda *_: None,
    "T": lambda *_: True,
    "F": lambda *_: False,
    "i": _Reader.whole,
    "I": _Reader.long,
    "d": _Reader.real,
    "s": _Reader.text,
    "b": _Reader.piece,
    "l": _Reader.items,
    "t": lambda reader, depth: tuple(reader.items(depth)),
    "m": _Reader.table,
    "S": lambda reader, depth: set(reader.items(depth)),
    "Z": lambda reader, depth: frozenset(reader.items(depth)),
    "r": _Reader.record,
    "P": lambda reader, _: Path(reader.text()),
    "D": _Reader.dtype,
    "V": lambda reader, _: torch.device(reader.text()),
    "X": _Reader.tensor,
}
_READERS = {ord(tag): read for tag, read in _BY_TAG.items()}


def _class(name: str) -> type:
    """Returns a class of `_RECORDS`.

    Raises:
        MessageError: If there is none of this name.
    """
    if name not in _MODULES:
        raise MessageError(f"no record is called {name[:100]!r}")
    module, attribute = _MODULES[name]
    kind: type = getattr(import_module(f"pipegrad.{module}"), attribute)
    return kind


@cache
def _fields(kind: type) -> tuple[str, ...]:
    """Returns the names of what a record is made of."""
    if is_dataclass(kind):
        return tuple(field.name for field in fields(kind) if field.init)
    names: tuple[str, ...] = kind._fields  # type: ignore[attr-defined]  # a NamedTuple
    return names
