"""Pickled: reads a pickle of plain records as data. It calls nothing, and makes nothing.

A pickle is a program for a stack machine, and it may call any function. This reader knows only the
opcodes that torch's metadata needs. What the pickle would construct is a `Record`: the name of a
class, its arguments and its state. Whoever reads it decides what that means.

Source: the opcodes of protocols 4 and 5, in the documentation of CPython's ``pickletools``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final, TypeVar

T = TypeVar("T")
_NO_STATE: Final = object()
_PROTOCOL, _STOP = 0x80, ord(".")
_INT_BYTES = 8  # of the largest integer


class Record:
    """What a pickle would construct.

    Attributes:
        kind: Module and name of the class or function.
        arguments: What it would be called with.
    """

    __slots__ = ("_state", "arguments", "kind")

    def __init__(self, kind: Name, arguments: tuple[object, ...]) -> None:
        self.kind, self.arguments = kind, arguments
        self._state: object = _NO_STATE

    @property
    def state(self) -> object:
        """What would be set in it; None if nothing is."""
        return None if self._state is _NO_STATE else self._state

    def build(self, state: object) -> None:
        """Sets its state.

        Raises:
            ValueError: If it has one.
        """
        if self._state is not _NO_STATE:
            raise ValueError("a state is set twice")
        self._state = state


class Name(str):
    """Module and name of a class or function, as ``module.name``."""

    __slots__ = ()


class Pickled:
    """Reads one pickle.

    Args:
        content: All of it. Memory and time are proportional to its length.
        names: The names that it may have, as ``module.name``.
    """

    def __init__(self, content: bytes, names: Collection[str]) -> None:
        self._content, self._names, self._at = content, names, 0
        self._stack: list[object] = []
        self._below: list[list[object]] = []  # for each mark, the stack below it
        self._memo: list[object] = []

    def read(self) -> object:
        """Returns its value: of records, names, tuples, lists, dicts, texts, integers, bools, None.

        A value may contain itself. Keys of dicts are texts, or records, which differ from each
        other.

        Raises:
            LookupError: If it has another name; that is the first argument.
            ValueError: If it is something else.
        """
        if self._byte() != _PROTOCOL or self._byte() not in (4, 5):
            raise ValueError("no pickle of protocol 4 or 5")
        while (opcode := self._byte()) != _STOP:
            if opcode not in _OPCODES:
                raise ValueError(f"the opcode {opcode:#04x}, which no metadata needs")
            _OPCODES[opcode](self)
        if self._below or len(self._stack) != 1 or self._at != len(self._content):
            raise ValueError("more than one value")
        return self._stack[0]

    def _byte(self) -> int:
        begin, self._at = self._at, self._at + 1
        if begin >= len(self._content):
            raise ValueError("it ends too early")
        return self._content[begin]

    def _take(self, count: int) -> bytes:
        begin, self._at = self._at, self._at + count
        if self._at > len(self._content):
            raise ValueError("it ends too early")
        return self._content[begin : self._at]

    def _number(self, count: int, *, signed: bool = False) -> int:
        return int.from_bytes(self._take(count), "little", signed=signed)

    def _pop(self) -> object:
        if not self._stack:
            raise ValueError("a value is missing")
        return self._stack.pop()

    def _since_mark(self) -> list[object]:
        if not self._below:
            raise ValueError("a mark is missing")
        since, self._stack = self._stack, self._below.pop()
        return since

    def _top(self, kind: type[T]) -> T:
        top = self._stack[-1] if self._stack else None
        if type(top) is not kind:
            raise ValueError(f"{type(top).__name__} in the place of {kind.__name__}")
        return top

    def _mark(self) -> None:
        self._below.append(self._stack)
        self._stack = []

    def _frame(self) -> None:
        self._take(8)  # of no meaning for who has all of it

    def _memoize(self) -> None:
        value = self._pop()
        self._memo.append(value)
        self._stack.append(value)

    def _get(self, index: int) -> None:
        if index >= len(self._memo):
            raise ValueError("a value is missing")
        self._stack.append(self._memo[index])

    def _text(self, size: int) -> None:
        # Names of files may have bytes that are no text, and pickle writes these so.
        self._stack.append(self._take(size).decode("utf-8", "surrogatepass"))

    def _long(self) -> None:
        if (size := self._byte()) > _INT_BYTES:
            raise ValueError(f"an integer of {size} bytes")
        self._stack.append(self._number(size, signed=True))

    def _tuple(self, count: int) -> None:
        values = [self._pop() for _ in range(count)]
        self._stack.append(tuple(reversed(values)))

    def _marked_tuple(self) -> None:
        values = self._since_mark()
        self._stack.append(tuple(values))

    def _append(self) -> None:
        value = self._pop()
        self._top(list).append(value)

    def _appends(self) -> None:
        values = self._since_mark()
        self._top(list).extend(values)

    def _set_item(self) -> None:
        value, key = self._pop(), self._pop()
        self._set([key, value])

    def _set_items(self) -> None:
        self._set(self._since_mark())

    def _set(self, both: list[object]) -> None:
        # Other keys may take for ever to hash.
        if len(both) % 2 or not all(type(key) in (str, Record) for key in both[::2]):
            raise ValueError("a key that is no text")
        self._top(dict).update(zip(both[::2], both[1::2], strict=True))

    def _global(self) -> None:
        name, module = self._pop(), self._pop()
        if type(module) is not str or type(name) is not str:
            raise ValueError("a name that is no text")
        if (found := f"{module}.{name}") not in self._names:
            raise LookupError(found)
        self._stack.append(Name(found))

    def _construct(self) -> None:
        arguments, kind = self._pop(), self._pop()
        if type(kind) is not Name or type(arguments) is not tuple:
            raise ValueError("a call of something that is no name")
        self._stack.append(Record(kind, arguments))

    def _build(self) -> None:
        state = self._pop()
        self._top(Record).build(state)


_OPCODES: dict[int, Callable[[Pickled], None]] = {
    0x95: Pickled._frame,
    0x94: Pickled._memoize,
    ord("h"): lambda of: of._get(of._byte()),
    ord("j"): lambda of: of._get(of._number(4)),
    0x8C: lambda of: of._text(of._byte()),
    ord("X"): lambda of: of._text(of._number(4)),
    ord("K"): lambda of: of._stack.append(of._byte()),
    ord("M"): lambda of: of._stack.append(of._number(2)),
    ord("J"): lambda of: of._stack.append(of._number(4, signed=True)),
    0x8A: Pickled._long,
    ord("N"): lambda of: of._stack.append(None),
    0x88: lambda of: of._stack.append(True),
    0x89: lambda of: of._stack.append(False),
    ord("("): Pickled._mark,
    ord(")"): lambda of: of._stack.append(()),
    0x85: lambda of: of._tuple(1),
    0x86: lambda of: of._tuple(2),
    0x87: lambda of: of._tuple(3),
    ord("t"): Pickled._marked_tuple,
    ord("]"): lambda of: of._stack.append([]),
    ord("a"): Pickled._append,
    ord("e"): Pickled._appends,
    ord("}"): lambda of: of._stack.append({}),
    ord("s"): Pickled._set_item,
    ord("u"): Pickled._set_items,
    0x93: Pickled._global,
    0x81: Pickled._construct,
    ord("R"): Pickled._construct,
    ord("b"): Pickled._build,
}
