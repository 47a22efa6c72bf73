"""Changes: what a layer hands on beside what it returns.

[Note: changes] A layer may append to a list that it was given, write into any other container or
object that it was given, set an attribute of itself or of a module inside, or be listened to by a
hook. All of that is compared before and behind its recorded call. What changed is an output of the
call like what it returns: its tensors have sources, and travel. A stage that has the layer reads
them at the same places. A stage that has a stand-in for it writes them there.

What a layer hands on in any other way, such as a global list, is not seen here. The recorder
refuses code that reads it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn

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


def roots_of(layer: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:  # noqa: ANN401
    """Returns everything that a call of a layer reaches, but for globals and closures."""
    modules = dict(layer.named_modules())
    return {"args": args, "kwargs": kwargs, "modules": modules, "hooks": modules}


def enclosed(model: nn.Module) -> list[object]:
    """Returns the containers that functions of a model hold, such as hooks, beside the model."""
    functions = (
        function
        for part in model.modules()
        for function in (*vars(part).values(), *part._forward_hooks.values())
        if isinstance(function, FunctionType)
    )
    cells = (cell for function in functions for cell in function.__closure__ or ())
    kinds = (list, dict, set, deque)
    return [x for cell in cells for x in _content(cell) if isinstance(x, kinds)]


def _content(cell: CellType) -> list[object]:
    try:
        return [cell.cell_contents]
    except ValueError:  # nothing yet
        return []


def find(roots: Mapping[str, Any], path: Sequence[Any]) -> Any:  # noqa: ANN401 - any container
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
    """

    def __init__(self, layer: nn.Module, args: Any, kwargs: Any) -> None:  # noqa: ANN401
        self._layer = layer
        self._before = _reached(roots_of(layer, args, kwargs))
        self._heard: list[tuple[Change, list[Any]]] = []

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listens where hooks do."""
        parts = dict(self._layer.named_modules())
        hooked = {name for name, part in parts.items() if part._forward_hooks}
        with _listening(parts, hooked, self._heard):
            yield

    def changes(self) -> list[tuple[Change, list[Any]]]:
        """Returns what has changed, with the new values."""
        found = [
            pair
            for path, value, before in self._before
            for pair in _compared(path, value, before, contents_of(value))
        ]
        return found + self._heard

    def restore(self) -> None:
        """Puts all containers back."""
        for _, value, contents in self._before:
            restore(value, contents)


class Reading:
    """Reads known changes behind a call.

    Args:
        changes: The changes.
        layer: The layer.
        args: Of the call.
        kwargs: Likewise.
    """

    def __init__(
        self,
        changes: Sequence[Change],
        layer: nn.Module,
        args: Any,  # noqa: ANN401
        kwargs: Any,  # noqa: ANN401
    ) -> None:
        self._layer = layer
        self._changes = changes
        roots = roots_of(layer, args, kwargs)
        self._boxes = [find(roots, change.path) for change in changes]
        self._before = [contents_of(box) for box in self._boxes]
        self._heard: list[tuple[Change, list[Any]]] = []

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listens where hooks do."""
        hooked = {change.path[1] for change in self._changes if change.is_heard}
        parts = dict(self._layer.named_modules()) if hooked else {}
        with _listening(parts, hooked, self._heard):
            yield

    def values(self) -> list[list[Any]]:
        """Returns the values of each change; none of one that did not come."""
        heard = iter(self._heard)
        return [
            next((values for change, values in heard if change == expected), [])
            if expected.is_heard
            else _values(expected, box, before)
            for expected, box, before in zip(self._changes, self._boxes, self._before, strict=True)
        ]


def apply(change: Change, values: Sequence[Any], box: Any) -> Callable[[], None]:  # noqa: ANN401
    """Changes a container as a layer did, and returns what takes that back."""
    if change.is_heard:
        _tell(box, *values)
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


def _tell(module: nn.Module, args: Any, kwargs: Any, result: object) -> None:  # noqa: ANN401
    """Calls the hooks of a module."""
    for key, hook in [*module._forward_hooks.items()]:
        has_kwargs = key in module._forward_hooks_with_kwargs
        hook(module, args, kwargs, result) if has_kwargs else hook(module, args, result)


def put(box: Any, key: Any, value: object) -> None:  # noqa: ANN401 - any container
    """Sets a value of a container, an object or a module."""
    if isinstance(box, list | deque | dict):
        box[key] = value
    elif isinstance(box, nn.Module):
        setattr(box, key, value)
    else:
        vars(box)[key] = value


def contents_of(value: Any) -> Any:  # noqa: ANN401 - what it holds has any type
    """Returns what a container, an object or a module holds, as a new dict or list; or None."""
    if isinstance(value, nn.Module):
        own = {name: x for name, x in vars(value).items() if name not in _TABLES}
        return own | value._buffers
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, list | tuple | deque | set):
        return list(value)
    if isinstance(value, _OPAQUE) or not hasattr(value, "__dict__"):
        return None
    return dict(vars(value))


def restore(value: Any, contents: Any) -> None:  # noqa: ANN401 - of `contents_of`
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


def _item(box: Any, key: Any) -> Any:  # noqa: ANN401 - any container
    return box[key] if isinstance(box, list | tuple | deque | dict) else getattr(box, key)


def _reached(roots: Mapping[str, Any]) -> list[tuple[tuple[Any, ...], Any, Any]]:
    """Returns each container with its path and what it holds, those that are given first."""
    seen, found = set[int](), list[tuple[tuple[Any, ...], Any, Any]]()
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
        found.append((path, value, contents))
        items = contents.items() if isinstance(contents, dict) else enumerate(contents)
        queue.extend(((*path, key), x) for key, x in items if not isinstance(x, _OPAQUE))
    return found


def _compared(
    path: tuple[Any, ...],
    value: object,
    before: Any,  # noqa: ANN401 - of `contents_of`
    after: Any,  # noqa: ANN401
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


def _values(change: Change, box: Any, before: Any) -> list[Any]:  # noqa: ANN401
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


@contextmanager
def _listening(
    parts: Mapping[str, nn.Module], names: Collection[str], heard: list[tuple[Change, list[Any]]]
) -> Iterator[None]:
    """Hears what hooks of some modules hear, before they can change it."""

    def hook_of(name: str, *, has_kwargs: bool) -> Any:  # noqa: ANN401 - as torch's
        return lambda _, args, kwargs, result: heard.append(
            (Change(("hooks", name)), [args, kwargs if has_kwargs else {}, result])
        )

    handles = [
        parts[name].register_forward_hook(
            hook_of(name, has_kwargs=bool(parts[name]._forward_hooks_with_kwargs)),
            prepend=True,
            with_kwargs=True,
        )
        for name in parts
        if name in names
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
