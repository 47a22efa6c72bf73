"""Calls: a model's calls of its layers, as data, with all outputs of each layer.

[Note: changes] Besides its result, a layer may have other outputs. It may append to a list among
its arguments, write into any other container or object among them, set an attribute of itself or of
a module inside, or call a hook. The values of all these are compared before and after the recorded
call. A changed value is an output of the call like its result: its tensors have sources, and
travel. A stage that has the layer reads them at the same places. A stage with a placeholder of the
layer writes them there.

An output that takes another way, such as a global list, is not compared here. The recorder raises
if code reads it.
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
    """An output of a layer's call: the index of the call, and the index of the leaf."""

    call: int
    leaf: int


@dataclass(frozen=True)
class Origin:
    """The values from which code outside of layers computed other values.

    Attributes:
        sources: Outputs of calls of layers.
        parameters: Names of parameters and buffers.
        draws: Numbers of operators that draw random numbers.
        writers: Names of layers that wrote into one of their input tensors.
        inputs: Names of inputs of the model, without those that only decided a branch.
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
    """A change by a layer: a value of a dict or an object, the end of a list, or a call of a hook.

    Attributes:
        path: Keys from `roots_of` to the dict, object or list, or to a module with hooks.
        key: The key of a dict, or the attribute of an object, that has another value or none now.
        dropped: Number of values that are gone from the end of a list, set or deque. The new values
            follow the others.
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
        """True for a call of hooks: its values are positional and keyword arguments, and result."""
        return bool(self.path[0] == "hooks")

    @property
    def is_inside(self) -> bool:
        """True if the change is in the layer, and not in its arguments."""
        return bool(self.path[0] == "modules")


@dataclass(frozen=True)
class Output:
    """A leaf of the result of a call, or of its changes.

    Attributes:
        value: Value in the sample, if it is no tensor.
        shape: Shape of a tensor in the sample.
        dtype: Dtype of a tensor in the sample.
        like: Index of the argument leaf with the same shape in any batch; None if there is none.
        is_input: True if it is that argument, which the layer returns unchanged.
        same: Index of the first leaf of the call that is the same tensor; None if there is none.
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
        name: Name of the layer; later calls of the same layer add ``#`` and a number.
        layer: Name of the layer.
        origin: The values from which its inputs were computed.
        outputs: The leaves of its result, then the leaves of its changes.
        structure: Pytree structure of its result.
        kinds: Positions of tensors in its result; see `kinds_of`.
        num_inputs: Number of leaves in its arguments.
        changes: Its changes; see [Note: changes].
        structures: Pytree structure of each change's values.
        cleared: Indices of `changes` of containers that code after the layer undoes.
        lost: Names of inner modules and their attributes that it changes to other values than
            tensors.
        flops: Floating-point operations of its forward on the sample.
        saved_bytes: Bytes that its forward on the sample keeps for its backward.
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
        """The number of leaves without the arguments of hooks, which come after all others."""
        pairs = zip(self.changes, self.structures, strict=True)
        return self.structure.num_leaves + sum(x.num_leaves for c, x in pairs if not c.is_heard)

    def name_of(self, leaf: int) -> str:
        """Returns the name of an output."""
        returned = self.outputs[: self.structure.num_leaves]
        tensors = [i for i, output in enumerate(returned) if output.shape is not None]
        return self.name if tensors == [leaf] else f"{self.name}:{leaf}"


@dataclass(frozen=True)
class Flow:
    """The recorded run of a model on a sample.

    Attributes:
        calls: The calls of its layers, in order.
        returned: Name of each output -> the values from which it was computed.
        nested: Names of outputs that are no tensors, but have some inside.
        written: Outputs of layers into which code outside of layers writes in place.
        writes_inputs: True if the model writes into its inputs in place.
        is_heard: True if hooks pass a layer's values to other code.
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
        """For each call, the names of the model's inputs from which its inputs are computed."""
        found = list[frozenset[str]]()
        for call in self.calls:
            before = (found[source.call] for source in call.origin.sources)
            found.append(call.origin.inputs.union(*before))
        return found


def kinds_of(result: object) -> object:
    """Returns the positions of tensors in a layer's result, without the lengths of lists."""
    if isinstance(result, dict):
        return frozenset((key, kinds_of(x)) for key, x in result.items())
    if isinstance(result, tuple):
        return tuple(map(kinds_of, result))
    if isinstance(result, list):
        return frozenset(map(kinds_of, result))
    return isinstance(result, Tensor)


def roots_of(layer: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """Returns all values that a call of a layer can reach, except globals and closures."""
    modules = dict(layer.named_modules())
    return {"args": args, "kwargs": kwargs, "modules": modules, "hooks": modules}


def find(roots: Mapping[str, Any], path: Sequence[Any]) -> Any:
    """Returns the value at a path; None if there is no value."""
    try:
        return reduce(_item, path, roots)
    except (AttributeError, IndexError, KeyError, TypeError):
        return None


class Watch:
    """Compares the values that a call of a layer can reach, before and after the call."""

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
        """Records the arguments of hooks, before the hooks can change them."""

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
        """Returns all changes with their new values."""
        compared = [
            pair for path, value, before in self._before for pair in _compared(path, value, before)
        ]
        return compared + self._heard

    def values(self) -> list[list[Any]]:
        """Returns the values of each known change, none for a change that did not happen."""
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
    """Returns the arguments of a call with other tensors.

    Containers stay the same objects, because a layer may write into them. A tuple is replaced.
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
    """Puts the original tensors back wherever the replacements still are."""
    for box, key, other, x in chain.from_iterable(put_in.values()):
        contents = contents_of(box)
        now = dict(contents if isinstance(contents, dict) else enumerate(contents))
        if now.get(key) is other:
            put(box, key, [x])


def apply(change: Change, values: list[Any], box: Any) -> Callable[[], None]:
    """Applies a change of a layer; returns a function that undoes it."""
    if change.is_heard:
        args, kwargs, result = values
        for key, hook in [*box._forward_hooks.items()]:
            has_kwargs = key in box._forward_hooks_with_kwargs
            hook(box, args, kwargs, result) if has_kwargs else hook(box, args, result)
        return lambda: None
    before = contents_of(box)
    if isinstance(before, dict):  # undo this key only, because other keys may have new values
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
    """Returns the contents of a container, an object or a module as a new dict or list, or None."""
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
    """Restores the contents of a container, an object or a module."""
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
    """Returns each container with its path and contents, starting with the arguments."""
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
    """Yields the changes of a container, an object or a module, with the new values."""
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
    """Returns the contents of a container, of a set with its former elements first."""
    if not isinstance(box, set):
        return contents_of(box)
    places = {id(x): i for i, x in enumerate(before)}
    return sorted(box, key=lambda x: places.get(id(x), len(places)))


def _same(one: object, other: object) -> bool:
    if one is other:
        return True
    return type(one) is type(other) and isinstance(one, _ATOMS) and one == other
