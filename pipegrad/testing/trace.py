"""What an operator of torch reads and writes: in which memory, which bytes, called from where."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode  # its documented home

from pipegrad.testing.clocks import Span

_MAX_SPANS = 1024  # of one tensor; beyond that its bounds are taken for all of it
_HERE = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)


@dataclass(frozen=True)
class Operation:
    """One call of an operator.

    Attributes:
        name: As torch prints it.
        reads: Tensors whose values it uses.
        writes: Tensors that it changes or makes.
        group: Name of the process group of an asynchronous collective, else None.
        syncs_host: Whether the host waits for its result.
        run: Calls it again, on the same tensors, and puts its results where they are now; does
            nothing for a collective.
    """

    name: str
    reads: tuple[torch.Tensor, ...]
    writes: tuple[torch.Tensor, ...]
    group: str | None
    syncs_host: bool
    run: Callable[[], None]


class Observer(Protocol):
    """Who is told."""

    def before(self, tensors: Sequence[torch.Tensor]) -> None:
        """Called ahead of each operator, with the tensors it is given."""

    def after(self, operation: Operation) -> object:
        """Called when it has been called."""


class Trace(TorchDispatchMode):
    """Tells of every operator in the thread that enters it."""

    def __init__(self, observer: Observer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._observer = observer

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - torch.ops' overloads have no type of their own
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Calls `func` and reports it."""
        kwargs = kwargs or {}
        self._observer.before(_tensors((args, kwargs)))
        out = func(*args, **kwargs)
        operation = _operation(func, args, kwargs, out)
        if operation.reads or operation.writes:
            self._observer.after(operation)
        return out


def spans(tensor: torch.Tensor) -> tuple[Span, ...]:
    """Returns the byte ranges of its storage that `tensor` covers, ascending and apart."""
    if tensor.numel() == 0:
        return ()
    size, start = tensor.itemsize, int(tensor.storage_offset()) * tensor.itemsize
    dims = sorted(zip(map(int, tensor.stride()), map(int, tensor.shape), strict=True))
    dense, rest = size, list[tuple[int, int]]()
    for stride, length in dims:
        if length == 1 or stride == 0:
            continue
        if stride * size == dense and not rest:
            dense *= length
        else:
            rest.append((stride * size, length))
    number = 1
    for _, length in rest:
        number *= length
    if number > _MAX_SPANS:
        return ((start, start + dense + sum(step * (length - 1) for step, length in rest)),)
    corners = itertools.product(*(range(0, step * length, step) for step, length in rest))
    return tuple(_merged(sorted((start + sum(c), start + sum(c) + dense) for c in corners)))


def call_site() -> str:
    """Returns the innermost line that is neither torch's nor this tool's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_TORCH, _HERE, "<")):
        frame = frame.f_back
    code = frame.f_code
    return f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"


class Memories:
    """Names every storage that is met, and tells when it is freed.

    Args:
        on_free: Called with its name, in the thread that lets go of it last.
    """

    def __init__(self, on_free: Callable[[str], None]) -> None:
        self._on_free = on_free
        self._names: dict[int, str] = {}
        self._numbers = itertools.count(1)

    def name(self, tensor: torch.Tensor) -> str:
        """Returns the name of the memory of `tensor`."""
        storage = tensor.untyped_storage()
        pointer = storage.data_ptr()
        if pointer not in self._names:
            shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
            name = f"memory {next(self._numbers)}, met as {dtype} {shape}"
            self._names[pointer] = name
            weakref.finalize(storage, self._freed, pointer, name).atexit = False
        return self._names[pointer]

    def _freed(self, pointer: int, name: str) -> None:
        if self._names.get(pointer) == name:
            del self._names[pointer]
        self._on_free(name)


def _operation(
    func: Any,  # noqa: ANN401
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    out: object,
) -> Operation:
    given = _tensors((args, kwargs))
    if func.namespace == "c10d":
        reads, writes = _collective_accesses(func.__name__.split(".")[0], given, args)
        group = _group(func, args, kwargs)
        return Operation(str(func), reads, writes, group, False, lambda: None)
    schema = func._schema
    named = [*zip(schema.arguments, args, strict=False)]
    named += [(a, kwargs[a.name]) for a in schema.arguments if a.name in kwargs]
    written = [t for a, v in named if a.alias_info and a.alias_info.is_write for t in _tensors(v)]
    if not written and any(r.alias_info is not None for r in schema.returns):
        return Operation(str(func), (), (), None, False, lambda: None)  # a view
    known = {t.untyped_storage().data_ptr() for t in given}
    made = [t for t in _tensors(out) if t.untyped_storage().data_ptr() not in known]
    uninitialised = str(func).startswith(("aten.empty", "aten.new_empty"))

    def run() -> None:
        if uninitialised:
            return
        again = _tensors(func(*args, **kwargs))
        for there, value in zip(_tensors(out), again, strict=True):
            if any(there is tensor for tensor in made):
                there.copy_(value)

    return Operation(
        name=str(func),
        reads=tuple(t for t in given if not any(t is w for w in written)),
        # Fresh memory may still be in use, by what held it before, on the stream that asks for it.
        writes=(*written, *made),
        group=None,
        syncs_host=str(func) == "aten._local_scalar_dense.default",
        run=run,
    )


def _collective_accesses(
    name: str, given: Sequence[torch.Tensor], args: tuple[object, ...]
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Returns what a collective reads and what it writes; its schema does not say."""
    if name == "send":
        return tuple(given), ()
    if name.startswith(
        ("_reduce_scatter", "_allgather", "reduce_scatter", "allgather", "alltoall")
    ):
        written = _tensors(args[0])
        return tuple(t for t in given if not any(t is w for w in written)), tuple(written)
    return (), tuple(given)  # in place, or written alone


def _group(func: Any, args: tuple[object, ...], kwargs: Mapping[str, object]) -> str | None:  # noqa: ANN401
    """Returns the name of a collective's process group, None if the call itself waits."""
    arguments = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | {**kwargs}
    if arguments.get("async_op", True) is False:
        return None
    group: Any = arguments["process_group"]
    return str(dist.ProcessGroup.unbox(group).group_name)


def _tensors(tree: object) -> list[torch.Tensor]:
    """Returns the tensors with memory in the arguments or results of an operator, in order."""
    if isinstance(tree, torch.Tensor):
        has_memory = tree.layout is torch.strided and tree.device.type != "meta"
        return [tree] if has_memory else []
    if isinstance(tree, Mapping):
        tree = tuple(tree.values())
    return [t for x in tree for t in _tensors(x)] if isinstance(tree, list | tuple) else []


def _merged(ranges: Iterable[Span]) -> Iterator[Span]:
    current: Span | None = None
    for start, end in ranges:
        if current is None or start > current[1]:
            if current is not None:
                yield current
            current = (start, end)
        else:
            current = (current[0], max(end, current[1]))
    if current is not None:
        yield current
