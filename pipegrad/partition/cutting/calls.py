"""Calls: what a model does with its layers, as data, and all that a layer hands on.

[Note: changes] A layer may append to a list that it was given, write into any other container or
object that it was given, set an attribute of itself or of a module inside, or be listened to by a
hook. All of that is compared before and behind its recorded call. What changed is an output of the
call like what it returns: its tensors have sources, and travel. A stage that has the layer reads
them at the same places. A stage that has a stand-in for it writes them there.

What a layer hands on in any other way, such as a global list, is not seen here. The recorder
refuses code that reads it.
"""
# ruff: noqa: ANN401 - layers take, return and change values of any type

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from itertools import chain
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipegrad.interop.private import TreeSpec

_TABLES = {*vars(nn.Module()), "_recorder", "_layer_name", "_pipegrad_run"}
_ATOMS = (int, float, complex, str, bytes, type(None))
_FUNCTIONS = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)
_WORDS = {
    "args": "its positional arguments",
    "kwargs": "its keyword arguments",
    "modules": "itself",
    "hooks": "what hooks hear",
}
_OPAQUE = (*_ATOMS, *_FUNCTIONS, Tensor, nn.Module, logging.Logger)


class Source(NamedTuple):
    """An output of a layer's call: its leaf of this number."""

    call: int
    leaf: int


@dataclass(frozen=True)
class Origin:
    """What values were computed from, outside of layers.

    Attributes:
        sources: Outputs of calls of layers.
        parameters: Names of parameters and buffers.
        draws: Numbers of operators that draw random numbers.
        writers: Layers that wrote into a tensor that they were given.
        inputs: Names of what the model was given; not of what decided alone.
    """

    sources: frozenset[Source] = frozenset()
    parameters: frozenset[str] = frozenset()
    draws: frozenset[int] = frozenset()
    writers: frozenset[str] = frozenset()
    inputs: frozenset[str] = frozenset()

    def __or__(self, other: Origin) -> Origin:
        return Origin(
            self.sources | other.sources,
            self.parameters | other.parameters,
            self.draws | other.draws,
            self.writers | other.writers,
            self.inputs | other.inputs,
        )


class Change(NamedTuple):
    """What a layer changes: a value of a dict or an object, the end of a list, or what hooks hear.

    Attributes:
        path: Keys from `roots_of` to the dict, object or list, or to a module with hooks.
        key: Of a dict or an object: the key or attribute that has another value, or none now.
        dropped: Of a list, set or deque: how many values at its end are gone. The new values are
            behind the others.
    """

    path: tuple[Any, ...]
    key: Any = None
    dropped: int = 0

    def __str__(self) -> str:
        root, *keys = self.path
        names = ".".join(str(key) for key in (*keys, self.key) if key not in ("", None))
        return f"{names} of {_WORDS[root]}"

    @property
    def is_heard(self) -> bool:
        """True if hooks listen: its values are positional and keyword arguments, and the result."""
        return bool(self.path[0] == "hooks")

    @property
    def is_inside(self) -> bool:
        """True if it belongs to the layer, and not to what the layer is given."""
        return bool(self.path[0] == "modules")


@dataclass(frozen=True)
class Output:
    """A leaf of what a call returns or changes.

    Attributes:
        value: What it is in the sample, if it is no tensor.
        shape: Of a tensor, in the sample.
        dtype: Of a tensor, in the sample.
        like: Leaf of the arguments that tells its shape in another batch; None if none does.
        is_input: Whether it is that argument, which the layer hands on as it was.
        same: Number of the first leaf of the call that is the same tensor; None if there is none.
    """

    value: object = None
    shape: torch.Size | None = None
    dtype: torch.dtype | None = None
    like: int | None = None
    is_input: bool = False
    same: int | None = None


@dataclass(frozen=True)
class Call:
    """A call of a layer.

    Attributes:
        name: Of the layer, with the number of the call behind it if it is called more than once.
        layer: The layer.
        origin: What its inputs were computed from.
        outputs: The leaves of what it returns, and behind them those of what it changes.
        structure: How those that it returns hang together.
        kinds: Where tensors are in what it returns; see `kinds_of`.
        num_inputs: How many leaves its arguments have.
        changes: What it changes; see [Note: changes].
        structures: Of each change, how the leaves of its values hang together.
        cleared: Numbers of changes of containers that code behind the layer takes back.
        lost: Names of modules inside and their attributes that it changes, but not to tensors.
        flops: Floating-point operations of its forward on the sample.
        saved_bytes: What its forward keeps for its backward, on the sample.
    """

    name: str
    layer: str
    origin: Origin
    outputs: tuple[Output, ...]
    structure: TreeSpec
    kinds: object
    num_inputs: int
    changes: tuple[Change, ...]
    structures: tuple[TreeSpec, ...]
    cleared: frozenset[int]
    lost: frozenset[tuple[str, str]]
    flops: int
    saved_bytes: int

    @cached_property
    def num_returned(self) -> int:
        """How many leaves there are, without what hooks hear: these stand behind all others."""
        pairs = zip(self.changes, self.structures, strict=True)
        return self.structure.num_leaves + sum(x.num_leaves for c, x in pairs if not c.is_heard)

    def name_of(self, leaf: int) -> str:
        """Returns the name of an output."""
        returned = self.outputs[: self.structure.num_leaves]
        tensors = [i for i, output in enumerate(returned) if output.shape is not None]
        return self.name if tensors == [leaf] else f"{self.name}:{leaf}"


@dataclass(frozen=True)
class Flow:
    """What a model does.

    Attributes:
        calls: The calls of its layers, in order.
        returned: What it returns, by name, and what that was computed from.
        nested: Names of what it returns that are no tensors, but have some inside.
        written: Outputs of layers into which code outside of layers writes, in place.
        writes_inputs: Whether it writes into what it is given, in place.
        is_heard: Whether hooks hand on what a layer computes.
        sample: Name -> shape of the tensors of the sample.
    """

    calls: tuple[Call, ...]
    returned: dict[str, Origin]
    nested: frozenset[str]
    written: frozenset[Source]
    writes_inputs: bool
    is_heard: bool
    sample: dict[str, tuple[int, ...]]

    @cached_property
    def inputs(self) -> list[frozenset[str]]:
        """Of each call, the names of those of the model's inputs that it is computed of."""
        found = list[frozenset[str]]()
        for call in self.calls:
            before = (found[source.call] for source in call.origin.sources)
            found.append(call.origin.inputs.union(*before))
        return found


def kinds_of(result: object) -> object:
    """Returns where tensors are in what a layer returns; of a list not how many there are."""
    if isinstance(result, dict):
        return frozenset((key, kinds_of(x)) for key, x in result.items())
    if isinstance(result, tuple):
        return tuple(map(kinds_of, result))
    if isinstance(result, list):
        return frozenset(map(kinds_of, result))
    return isinstance(result, Tensor)


def roots_of(layer: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """Returns everything that a call of a layer reaches, but for globals and closures."""
    modules = dict(layer.named_modules())
    return {"args": args, "kwargs": kwargs, "modules": modules, "hooks": modules}


def find(roots: Mapping[str, Any], path: Sequence[Any]) -> Any:
    """Returns what is at a path; None if there is nothing."""
    try:
        return reduce(_item, path, roots)
    except (AttributeError, IndexError, KeyError, TypeError):
        return None


class Watch:
    """Compares what a call of a layer reaches, before and behind it."""

    def __init__(
        self, layer: nn.Module, args: Any, kwargs: Any, known: Sequence[Change] | None = None
    ) -> None:
        self._known = known or ()
        self._heard: list[tuple[Change, list[Any]]] = []
        self._before: list[tuple[tuple[Any, ...], Any, Any]] = []
        self._hooked = dict[str, nn.Module]()
        if known is None:
            self._before = _reached(roots_of(layer, args, kwargs))
            parts = layer.named_modules()
            self._hooked = {name: part for name, part in parts if part._forward_hooks}
        elif known:
            roots = roots_of(layer, args, kwargs)
            boxes = [find(roots, change.path) for change in known]
            self._before = [(c.path, x, contents_of(x)) for c, x in zip(known, boxes, strict=True)]
            self._hooked = {c.path[1]: roots["hooks"][c.path[1]] for c in known if c.is_heard}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hears what hooks hear, before they can change it."""

        def hook_of(name: str, *, has_kwargs: bool) -> Any:
            return lambda _, args, kwargs, result: self._heard.append(
                (Change(("hooks", name)), [args, kwargs if has_kwargs else {}, result])
            )

        handles = [
            part.register_forward_hook(
                hook_of(name, has_kwargs=bool(part._forward_hooks_with_kwargs)),
                prepend=True,
                with_kwargs=True,
            )
            for name, part in self._hooked.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def changes(self) -> list[tuple[Change, list[Any]]]:
        """Returns what has changed, with the new values."""
        compared = [
            pair for path, value, before in self._before for pair in _compared(path, value, before)
        ]
        return compared + self._heard

    def values(self) -> list[list[Any]]:
        """Returns the values of each known change; none of one that did not come."""
        heard, values = iter(self._heard), list[list[Any]]()
        for change, (_, box, before) in zip(self._known, self._before, strict=True):
            if change.is_heard:
                values.append(next((x for other, x in heard if other == change), []))
                continue
            after = _contents_after(box, before)
            if isinstance(after, dict):
                values.append([after[change.key]] if change.key in after else [])
            else:
                kept = max(len(before or ()) - change.dropped, 0)
                values.append((after or [])[kept:])
        return values

    def restore(self) -> None:
        """Puts all containers back."""
        for _, value, contents in self._before:
            restore(value, contents)


# By id of a container: container, key, the value that was put there, and the one before.
PutIn = dict[int, list[tuple[Any, Any, Any, Any]]]


def replaced(value: Any, tensor_of: Callable[[Tensor], Tensor], put_in: PutIn) -> Any:
    """Returns what a call of a layer is given, with other tensors.

    Containers stay the same ones, so what a layer writes into them is where it would be. Of a
    tuple there is another one.
    """
    if isinstance(value, Tensor):
        return tensor_of(value)
    contents = None if isinstance(value, nn.Module | set) else contents_of(value)
    if contents is None or id(value) in put_in:
        return value
    if isinstance(value, tuple):
        items = [replaced(x, tensor_of, put_in) for x in value]
        if all(x is y for x, y in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    put_in[id(value)] = []
    for key, x in contents.items() if isinstance(contents, dict) else enumerate(contents):
        other = replaced(x, tensor_of, put_in)
        if other is not x:
            put(value, key, [other])
            put_in[id(value)].append((value, key, other, x))
    return value


def put_back(put_in: PutIn) -> None:
    """Puts the tensors back where the others still are."""
    for box, key, other, x in chain.from_iterable(put_in.values()):
        contents = contents_of(box)
        now = dict(contents if isinstance(contents, dict) else enumerate(contents))
        if now.get(key) is other:
            put(box, key, [x])


def apply(change: Change, values: list[Any], box: Any) -> Callable[[], None]:
    """Changes something as a layer did, and returns what takes that back."""
    if change.is_heard:
        args, kwargs, result = values
        for key, hook in [*box._forward_hooks.items()]:
            has_kwargs = key in box._forward_hooks_with_kwargs
            hook(box, args, kwargs, result) if has_kwargs else hook(box, args, result)
        return lambda: None
    before = contents_of(box)
    if isinstance(before, dict):  # taken back alone: what others wrote stays
        put(box, change.key, values)
        return partial(put, box, change.key, [before[change.key]] if change.key in before else [])
    restore(box, [*before[: max(len(before) - change.dropped, 0)], *values])
    return partial(restore, box, before)


def put(box: Any, key: Any, values: Sequence[object]) -> None:
    """Sets a value of a container, an object or a module, or removes it if there is none."""
    table: Any = box if isinstance(box, list | deque | dict) else vars(box)
    if not values:
        for each in (table, getattr(box, "_buffers", {})):
            each.pop(key, None)
    elif isinstance(box, nn.Module):
        setattr(box, key, values[0])
    else:
        table[key] = values[0]


def contents_of(value: Any) -> Any:
    """Returns what a container, an object or a module holds, as a new dict or list; or None."""
    if isinstance(value, nn.Module):
        attributes = {name: x for name, x in vars(value).items() if name not in _TABLES}
        return attributes | value._buffers
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, list | tuple | deque | set):
        return list(value)
    if isinstance(value, _OPAQUE) or not hasattr(value, "__dict__"):
        return None
    return dict(vars(value))


def restore(box: Any, contents: Any) -> None:
    """Puts back what a container, an object or a module held."""
    if isinstance(box, list | deque | set):
        box.clear()
        box.update(contents) if isinstance(box, set) else box.extend(contents)
    elif not isinstance(box, tuple):
        now = contents_of(box)
        for key in {**now, **contents}:
            if key not in contents or key not in now or now[key] is not contents[key]:
                put(box, key, [contents[key]] if key in contents else [])


def _item(box: Any, key: Any) -> Any:
    return box[key] if isinstance(box, list | tuple | deque | dict) else getattr(box, key)


def _reached(roots: Mapping[str, Any]) -> list[tuple[tuple[Any, ...], Any, Any]]:
    """Returns each container with its path and what it holds, those that are given first."""
    seen, reached = set[int](), list[tuple[tuple[Any, ...], Any, Any]]()
    modules = [(("modules", name), module) for name, module in roots["modules"].items()]
    queue: deque[tuple[tuple[Any, ...], Any]] = deque(
        [(("args",), roots["args"]), (("kwargs",), roots["kwargs"])]
    )
    while queue or modules:
        path, value = queue.popleft() if queue else modules.pop(0)
        contents = contents_of(value)
        if id(value) in seen or contents is None:
            continue
        seen.add(id(value))
        reached.append((path, value, contents))
        items = contents.items() if isinstance(contents, dict) else enumerate(contents)
        queue.extend(((*path, key), x) for key, x in items if not isinstance(x, _OPAQUE))
    return reached


def _compared(
    path: tuple[Any, ...], box: object, before: Any
) -> Iterator[tuple[Change, list[Any]]]:
    """Yields what is different in a container, an object or a module, with the new values."""
    after = _contents_after(box, before)
    if isinstance(after, dict):
        for key in {**before, **after}:
            if key not in after:
                yield Change(path, key), []
            elif key not in before or not _same(after[key], before[key]):
                yield Change(path, key), [after[key]]
        return
    pairs = enumerate(zip(before, after, strict=False))
    kept = next((i for i, (x, y) in pairs if not _same(x, y)), min(len(before), len(after)))
    if kept < max(len(before), len(after)):
        yield Change(path, dropped=len(before) - kept), after[kept:]


def _contents_after(box: object, before: Any) -> Any:
    """Returns what a container holds. A set has no order: it begins with what it had before."""
    if not isinstance(box, set):
        return contents_of(box)
    places = {id(x): i for i, x in enumerate(before)}
    return sorted(box, key=lambda x: places.get(id(x), len(places)))


def _same(one: object, other: object) -> bool:
    if one is other:
        return True
    return type(one) is type(other) and isinstance(one, _ATOMS) and one == other
