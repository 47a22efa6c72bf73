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
    """A container that a layer changes, or a module inside of it that hooks listen to.

    Attributes:
        path: Keys from `roots_of` to it.
        keys: Which of its values are others; of a module, which attributes.
        more: How many values stand behind the last one.
        gone: Keys that it no longer has. A list that became shorter has no keys: all are gone.
    """

    path: tuple[Any, ...]
    keys: tuple[Any, ...] = ()
    more: int = 0
    gone: tuple[Any, ...] = ()

    def __str__(self) -> str:
        root, *keys = self.path
        return f"{'.'.join(str(key) for key in (*keys, *self.keys) if key != '')} of {_WORDS[root]}"

    @property
    def is_heard(self) -> bool:
        """Whether hooks listen: its values are positional and keyword arguments, and the result."""
        return bool(self.path[0] == "hooks")

    @property
    def is_inside(self) -> bool:
        """Whether it belongs to the layer, and not to what the layer is given."""
        return bool(self.path[0] == "modules")


class Like(NamedTuple):
    """The shape of an output, as an input of the same call tells it.

    Attributes:
        leaf: Number of the input among the leaves of the call's arguments.
        dims: How many dimensions of the input the output has; the first ones.
        more: Dimensions behind these.
        is_it: Whether the output is that input, which the layer hands on as it was.
    """

    leaf: int
    dims: int
    more: tuple[int, ...]
    is_it: bool = False


@dataclass(frozen=True)
class Output:
    """A leaf of what a call returns or changes.

    Attributes:
        value: What it is in the sample, if it is no tensor.
        shape: Of a tensor, in the sample.
        dtype: Of a tensor, in the sample.
        like: How to tell its shape in another batch; None if no input tells it.
        same: Number of the first leaf of the call that is the same tensor; None if there is none.
    """

    value: object = None
    shape: torch.Size | None = None
    dtype: torch.dtype | None = None
    like: Like | None = None
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
    def is_like_first(self) -> bool:
        """Whether the first argument tells the shapes of all outputs."""
        return all(
            output.shape is None or (output.like is not None and output.like.leaf == 0)
            for output in self.outputs
        )

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
        returned: What it returns, with an `Origin` in the place of each tensor.
        written: Outputs of layers into which code outside of layers writes, in place.
        writes_inputs: Whether it writes into what it is given, in place.
        is_heard: Whether hooks hand on what a layer computes.
        sample: Name -> shape of the tensors of the sample.
    """

    calls: tuple[Call, ...]
    returned: object
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
    """Compares what a call of a layer reaches, before and behind it.

    Args:
        layer: The layer.
        args: Of the call.
        kwargs: Likewise.
        known: What may change. By default everything is compared, which takes longer than the call
            of a small layer.
    """

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
            pair
            for path, value, before in self._before
            for pair in _compared(path, value, before, contents_of(value))
        ]
        return compared + self._heard

    def values(self) -> list[list[Any]]:
        """Returns the values of each known change; none of one that did not come."""
        heard, values = iter(self._heard), list[list[Any]]()
        for change, (_, box, before) in zip(self._known, self._before, strict=True):
            if change.is_heard:
                values.append(next((x for other, x in heard if other == change), []))
            else:
                values.append(_values(change, box, before))
        return values

    def restore(self) -> None:
        """Puts all containers back."""
        for _, value, contents in self._before:
            restore(value, contents)


class Replaced:
    """Puts other tensors into what a call of a layer is given.

    Containers stay the same ones, so what a layer writes into them is where it would be. Of a
    tuple there is another one.

    Args:
        tensor_of: Returns what takes the place of a tensor.
    """

    def __init__(self, tensor_of: Callable[[Tensor], Tensor]) -> None:
        self._tensor_of = tensor_of
        self._seen = set[int]()
        self._put = list[tuple[Any, Any, object, object]]()

    def of(self, value: Any) -> Any:
        """Returns a value with other tensors."""
        if isinstance(value, Tensor):
            return self._tensor_of(value)
        contents = None if isinstance(value, nn.Module | set) else contents_of(value)
        if contents is None or id(value) in self._seen:
            return value
        if isinstance(value, tuple):
            items = [self.of(x) for x in value]
            if all(x is y for x, y in zip(items, value, strict=True)):
                return value
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        self._seen.add(id(value))
        for key, x in contents.items() if isinstance(contents, dict) else enumerate(contents):
            other = self.of(x)
            if other is not x:
                put(value, key, other)
                self._put.append((value, key, other, x))
        return value

    def put_back(self) -> None:
        """Puts the tensors back where the others still are."""
        for value, key, other, x in self._put:
            contents = contents_of(value)
            is_there = key in contents if isinstance(contents, dict) else key < len(contents)
            if is_there and contents[key] is other:
                put(value, key, x)


def apply(change: Change, values: Sequence[Any], box: Any) -> Callable[[], None]:
    """Changes a container as a layer did, and returns what takes that back."""
    if change.is_heard:
        args, kwargs, result = values
        for key, hook in [*box._forward_hooks.items()]:
            has_kwargs = key in box._forward_hooks_with_kwargs
            hook(box, args, kwargs, result) if has_kwargs else hook(box, args, result)
        return lambda: None
    before = contents_of(box)
    added = values[len(change.keys) :]
    for key, value in zip(change.keys, values, strict=False):
        put(box, key, value)
    if not isinstance(before, dict):
        if change.gone:
            box.clear()
        box.update(added) if isinstance(box, set) else box.extend(added)
        return partial(restore, box, before)
    table = box if isinstance(box, dict) else vars(box)
    for key in change.gone:
        table.pop(key, None)

    def back() -> None:  # what others wrote stays
        for key in (*change.keys, *change.gone):
            if key in before:
                put(box, key, before[key])
            else:
                table.pop(key, None)

    return back


def put(box: Any, key: Any, value: object) -> None:
    """Sets a value of a container, an object or a module."""
    if isinstance(box, list | deque | dict):
        box[key] = value
    elif isinstance(box, nn.Module):
        setattr(box, key, value)
    else:
        vars(box)[key] = value


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


def restore(value: Any, contents: Any) -> None:
    """Puts back what a container, an object or a module held."""
    if isinstance(value, list | deque | set):
        value.clear()
        value.update(contents) if isinstance(value, set) else value.extend(contents)
    elif not isinstance(value, tuple):
        now = contents_of(value)
        for key in now.keys() - contents.keys():
            if isinstance(value, dict):
                del value[key]
            else:
                delattr(value, key)
        for key, x in contents.items():
            if now.get(key) is not x:
                put(value, key, x)


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
    path: tuple[Any, ...], value: object, before: Any, after: Any
) -> Iterator[tuple[Change, list[Any]]]:
    """Yields how a container has changed, with the new values; each key is a change of its own."""
    if isinstance(after, dict):
        for key, x in after.items():
            if key not in before or not _same(x, before[key]):
                yield Change(path, (key,)), [x]
        if gone := tuple(key for key in before if key not in after):
            yield Change(path, gone=gone), []
        return
    if not isinstance(value, set) and len(after) < len(before):
        yield Change(path, more=len(after), gone=tuple(range(len(before)))), after
        return
    is_set = isinstance(value, set)
    keys = [] if is_set else [i for i, x in enumerate(before) if not _same(after[i], x)]
    added = _added(before, after) if is_set else after[len(before) :]
    if keys or added:
        yield Change(path, tuple(keys), len(added)), [*(after[i] for i in keys), *added]


def _values(change: Change, box: Any, before: Any) -> list[Any]:
    """Returns the values of a change; none if it did not come."""
    after = contents_of(box)
    if isinstance(after, dict):
        return [after[key] for key in change.keys] if after.keys() >= {*change.keys} else []
    if after is None or before is None:
        return []
    added = _added(before, after) if isinstance(box, set) else after[len(before) :]
    if change.gone:
        added = after
    has_all = len(added) == change.more and all(key < len(after) for key in change.keys)
    return [*(after[key] for key in change.keys), *added] if has_all else []


def _added(before: Sequence[Any], after: Sequence[Any]) -> list[Any]:
    known = {id(x) for x in before}
    return [x for x in after if id(x) not in known]


def _same(one: object, other: object) -> bool:
    if one is other:
        return True
    return type(one) is type(other) and isinstance(one, _ATOMS) and one == other
