"""What an operator of torch reads and writes: in which memory, which bytes, called from where."""

from __future__ import annotations

import functools
import itertools
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from pipegrad.interop.private import TorchDispatchMode
from pipegrad.testing.ordering.clocks import Span

_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)
_MAX_SPANS = 1024  # of one tensor; beyond that its bounds are taken for all of it
_NOBODYS = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<frozen", "<eval_")


@dataclass(frozen=True)
class Operation:
    """One call of an operator.

    Attributes:
        name: As torch prints it.
        reads: Tensors whose values it uses.
        writes: Tensors that it changes or makes.
        group: Name of the process group of an asynchronous collective, else None.
        work: What its caller waits for; the object that it gets, so kept alive until it does.
        syncs_host: Whether the host waits for its result.
        run: Calls it again, on the same tensors, and puts its results where they are now; does
            nothing for a collective.
    """

    name: str
    reads: tuple[torch.Tensor, ...]
    writes: tuple[torch.Tensor, ...]
    group: str | None
    work: dist.Work | None
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

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets torch.compile and torch.export go on as if nobody watched them."""
        return True

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - torch.ops' overloads have no type of their own
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Calls `func` and reports it, unless it is about tensors of another kind (fake, ...)."""
        kwargs = kwargs or {}
        if not all(t in _PLAIN for t in types):
            return func(*args, **kwargs)
        given = _tensors((*args, *kwargs.values()))
        self._observer.before(given)
        out = func(*args, **kwargs)
        operation = _operation(_signature(func), given, args, kwargs, out)
        if operation is not None:
            self._observer.after(operation)
        return out


def spans(tensor: torch.Tensor) -> tuple[Span, ...]:
    """Returns the byte ranges of its storage that `tensor` covers, ascending and apart."""
    if tensor.numel() == 0:
        return ()
    size, start = tensor.itemsize, int(tensor.storage_offset()) * tensor.itemsize
    if tensor.is_contiguous():
        return ((start, start + tensor.numel() * size),)
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
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOBODYS):
        frame = frame.f_back
    code = frame.f_code
    return f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"


_Address = tuple[int, int]  # of the memory, and of the storage


class Memories:
    """Names every storage that is met, and tells when it is freed.

    Args:
        on_free: Called with its name, in the thread that lets go of it last.
    """

    def __init__(self, on_free: Callable[[str], None]) -> None:
        self._on_free = on_free
        self._names: dict[_Address, str] = {}
        self._numbers = itertools.count(1)

    def name(self, tensor: torch.Tensor) -> str:
        """Returns the name of the memory of `tensor`."""
        storage = tensor.untyped_storage()
        # Both: torch gives memory back a little before it says so, and another thread may have it
        # by then, in a storage of another address.
        address = storage.data_ptr(), storage._cdata
        if address not in self._names:
            shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
            name = f"memory {next(self._numbers)}, met as {dtype} {shape}"
            self._names[address] = name
            weakref.finalize(storage, self._freed, address, name).atexit = False
        return self._names[address]

    def _freed(self, address: _Address, name: str) -> None:
        if self._names.get(address) == name:
            del self._names[address]
        self._on_free(name)


class _Signature:
    """What the schema of an operator says, read once."""

    def __init__(self, func: Any) -> None:  # noqa: ANN401
        schema = func._schema
        aliases = [argument.alias_info for argument in schema.arguments]
        self.func = func
        self.name = str(func)
        self.arguments = [argument.name for argument in schema.arguments]
        self.written = [i for i, alias in enumerate(aliases) if alias and alias.is_write]
        self.is_view = not self.written and any(r.alias_info is not None for r in schema.returns)
        self.is_collective = func.namespace == "c10d"
        self.leaves_uninitialised = self.name.startswith(("aten.empty", "aten.new_empty"))
        self.reads_item = self.name == "aten._local_scalar_dense.default"
        self.copies = self.name in ("aten._to_copy.default", "aten.copy_.default")
        # What ones_like is given counts for its shape alone.
        self.reads_nothing = bool(re.match(r"aten\.(new_\w+|\w+_like)\.", self.name))

    def argument(
        self, index: int, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> object:
        """Returns what a call passes for an argument, by position or by name."""
        return args[index] if index < len(args) else kwargs.get(self.arguments[index])


_signature = functools.cache(_Signature)


def _operation(
    signature: _Signature,
    given: Sequence[torch.Tensor],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    out: object,
) -> Operation | None:
    """Returns what a call did; None if it touched no memory, as a view does."""
    if signature.is_collective:
        reads, writes = _collective_accesses(signature, given, args)
        group = _group(signature, args, kwargs)
        work = None if group is None else _work(out)
        operation = Operation(signature.name, reads, writes, group, work, False, _nothing)
        return operation if given else None
    if signature.is_view:
        return None
    written = _tensors([signature.argument(i, args, kwargs) for i in signature.written])
    made = list[torch.Tensor]()
    if not written:
        known = {tensor.untyped_storage().data_ptr() for tensor in given}
        made = [t for t in _tensors(out) if t.untyped_storage().data_ptr() not in known]
    if not (given or made):
        return None

    def again() -> None:
        results = _tensors(signature.func(*args, **kwargs))
        for there, value in zip(_tensors(out), results, strict=True):
            if any(there is tensor for tensor in made):
                there.copy_(value)

    used = [t for t in given if not any(t is w for w in written)]
    return Operation(
        name=signature.name,
        reads=() if signature.reads_nothing else tuple(used),
        # Fresh memory may still be in use, by what held it before, on the stream that asks for it.
        writes=(*written, *made),
        group=None,
        work=None,
        syncs_host=signature.reads_item
        or (signature.copies and _crosses(used, (*written, *made), args, kwargs)),
        run=_nothing if signature.leaves_uninitialised else again,
    )


def _crosses(
    reads: Sequence[torch.Tensor],
    writes: Sequence[torch.Tensor],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
) -> bool:
    """Whether a copy goes between host and device, and the host waits for it."""
    non_blocking = kwargs.get("non_blocking", len(args) > 2 and args[2])
    devices = {tensor.device.type for tensor in (*reads, *writes)}
    return "cpu" in devices and len(devices) > 1 and not non_blocking


def _nothing() -> None:
    """Is run again in the place of a collective, and of a tensor without contents."""


def _collective_accesses(
    signature: _Signature, given: Sequence[torch.Tensor], args: tuple[object, ...]
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Returns what a collective reads and what it writes; its schema does not say."""
    name = signature.name.removeprefix("c10d.")
    if name.startswith("send"):
        return tuple(given), ()
    if name.startswith(
        ("_reduce_scatter", "_allgather", "reduce_scatter", "allgather", "alltoall")
    ):
        written = _tensors(args[0])
        return tuple(t for t in given if not any(t is w for w in written)), tuple(written)
    return (), tuple(given)  # in place, or written alone


def _group(
    signature: _Signature, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> str | None:
    """Returns the name of a collective's process group, None if the call itself waits."""
    passed = {
        name: signature.argument(i, args, kwargs) for i, name in enumerate(signature.arguments)
    }
    if passed.get("async_op") is False:
        return None
    group: Any = passed["process_group"]
    return str(dist.ProcessGroup.unbox(group).group_name)


def _work(out: object) -> dist.Work | None:
    """Returns what an asynchronous collective gives its caller to wait for."""
    made = out if isinstance(out, tuple | list) else (out,)
    found = [one for one in made if isinstance(one, torch.ScriptObject)]
    return dist.Work.unbox(found[0]) if found else None


def _tensors(tree: object) -> list[torch.Tensor]:
    """Returns the tensors with memory in the arguments or results of an operator, in order."""
    if isinstance(tree, torch.Tensor):
        plain = type(tree) in _PLAIN and tree.layout is torch.strided
        return [tree] if plain and tree.device.type != "meta" else []
    found: list[torch.Tensor] = []
    if isinstance(tree, list | tuple):
        for branch in tree:
            if isinstance(branch, list | tuple | torch.Tensor):
                found += _tensors(branch)
    return found


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
