"""Traces of torch: what memory operators read and write, and where; events of CUDA devices."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d

from pipegrad.interop.private import TorchDispatchMode, activate_gpu_trace, gpu_trace
from pipegrad.testing.ordering.clocks import Clock, Span

if TYPE_CHECKING:
    from pipegrad.testing.ordering.checker import OrderChecker


_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)
_MAX_SPANS = 1024  # a tensor with more byte ranges counts as one range from first to last byte
_TORCH = Path(torch.__file__).parent
_WRAPPERS = tuple(map(str, (Path(__file__).parent, _TORCH / "_dynamo", _TORCH / "_compile.py")))
_SKIPPED_FILES = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<frozen", "<eval_")


@dataclass(frozen=True)
class Operation:
    """One call of an operator.

    Attributes:
        name: Name of the operator, as torch prints it.
        reads: Tensors whose values it uses.
        writes: Tensors that it changes or makes.
        group: Name of the process group of an asynchronous collective, else None.
        work: The Work that its caller waits for. It is the caller's object, kept alive until then.
        syncs_host: True if the host waits for its result.
        run: Calls it again on the same tensors, and copies its results into the old ones. Does
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
    """Receives each operator of a trace."""

    def before(self, tensors: Sequence[torch.Tensor]) -> None:
        """Called before each operator, with its tensor arguments."""

    def after(self, operation: Operation) -> object:
        """Called after each operator."""


class Trace(TorchDispatchMode):
    """Passes every operator of the thread that enters it to an observer."""

    def __init__(self, observer: Observer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._observer = observer

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets torch.compile and torch.export work as if no trace were active."""
        return True

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - torch.ops' overloads have no type of their own
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Calls `func` and reports it, except for other kinds of tensors, such as fake tensors."""
        kwargs = kwargs or {}
        # Fake tensors have no memory. Wrappers such as DTensor call operators on their parts, and
        # the trace sees these calls.
        if not all(t in _PLAIN for t in types):
            return func(*args, **kwargs)
        arguments = _tensors((*args, *kwargs.values()))
        self._observer.before(arguments)
        out = func(*args, **kwargs)
        operation = _operation(_signature(func), arguments, args, kwargs, out)
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
    # Dimensions are taken from the smallest stride. While they have no gaps they form one dense
    # range, and the other dimensions repeat this range.
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
    """Returns the innermost line outside of torch and of this package."""
    # The user looks for the own line, not for lines of torch or of this tool.
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_SKIPPED_FILES):
        frame = frame.f_back
    code = frame.f_code
    return f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"


def called_by_python() -> bool:
    """Returns whether a collective is called by torch.distributed, not by C++ code such as DDP's.

    C++ code waits in C++, where nobody can listen.
    """
    frame: FrameType | None = sys._getframe(1)
    # A trace is called through torch's own wrappers.
    while frame is not None and frame.f_code.co_filename.startswith(_WRAPPERS):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename == c10d.__file__


_Address = tuple[int, int]  # of the memory, and of the storage


class Memories:
    """Names every storage, and notices when it is freed.

    Args:
        on_free: Called with the name, in the thread that drops the last reference.
    """

    def __init__(self, on_free: Callable[[str], None]) -> None:
        self._on_free = on_free
        self._names: dict[_Address, str] = {}
        self._numbers = itertools.count(1)

    def name(self, tensor: torch.Tensor) -> str:
        """Returns the name of the memory of `tensor`."""
        storage = tensor.untyped_storage()
        # Both addresses are needed. torch returns memory a little before the finalizer runs. Until
        # then another thread may have the same memory, in a storage of another address.
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
    """The facts of an operator's schema, read once."""

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
        # Operators such as ones_like use only the shape of their argument.
        self.reads_nothing = bool(re.match(r"aten\.(new_\w+|\w+_like)\.", self.name))

    def argument(
        self, index: int, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> object:
        """Returns what a call passes for an argument, by position or by name."""
        return args[index] if index < len(args) else kwargs.get(self.arguments[index])


_signature = functools.cache(_Signature)


def _operation(
    signature: _Signature,
    arguments: Sequence[torch.Tensor],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    out: object,
) -> Operation | None:
    """Returns the operation of a call; None if it touched no memory, as a view does."""
    if signature.is_collective:
        reads, writes = _collective_accesses(signature, arguments, args, kwargs)
        group = _group(signature, args, kwargs)
        work = None if group is None else _work(out)
        operation = Operation(signature.name, reads, writes, group, work, False, _nothing)
        return operation if arguments else None
    if signature.is_view:
        return None
    written = _tensors([signature.argument(i, args, kwargs) for i in signature.written])
    fresh = list[torch.Tensor]()
    if not written:
        known = {tensor.untyped_storage().data_ptr() for tensor in arguments}
        fresh = [t for t in _tensors(out) if t.untyped_storage().data_ptr() not in known]
    if not (arguments or fresh):
        return None

    def again() -> None:
        results = _tensors(signature.func(*args, **kwargs))
        for result, value in zip(_tensors(out), results, strict=True):
            if any(result is tensor for tensor in fresh):
                result.copy_(value)

    used = [t for t in arguments if not any(t is w for w in written)]
    return Operation(
        name=signature.name,
        reads=() if signature.reads_nothing else tuple(used),
        # New memory counts as written: another stream may still use what was there before.
        writes=(*written, *fresh),
        group=None,
        work=None,
        syncs_host=signature.reads_item
        or (signature.copies and _crosses(used, (*written, *fresh), args, kwargs)),
        run=_nothing if signature.leaves_uninitialised else again,
    )


def _crosses(
    reads: Sequence[torch.Tensor],
    writes: Sequence[torch.Tensor],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
) -> bool:
    """True if a copy goes between host and device, and the host waits for it."""
    non_blocking = kwargs.get("non_blocking", len(args) > 2 and args[2])
    devices = {tensor.device.type for tensor in (*reads, *writes)}
    return "cpu" in devices and len(devices) > 1 and not non_blocking


def _nothing() -> None:
    """Does nothing: runs instead of a collective, and of an operator without contents."""


def _collective_accesses(
    signature: _Signature,
    arguments: Sequence[torch.Tensor],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Returns the tensors that a collective reads and writes. Its schema does not have them."""
    name = signature.name.removeprefix("c10d.")
    if name.startswith("send") or (
        name.startswith("broadcast") and _is_root(signature, args, kwargs)
    ):
        return tuple(arguments), ()
    if name.startswith(
        ("_reduce_scatter", "_allgather", "reduce_scatter", "allgather", "alltoall")
    ):
        written = _tensors(args[0])
        return tuple(t for t in arguments if not any(t is w for w in written)), tuple(written)
    return (), tuple(arguments)  # in place, or written alone


def _is_root(signature: _Signature, args: tuple[object, ...], kwargs: Mapping[str, object]) -> bool:
    """Whether this rank sends what a broadcast gives all others."""
    names = signature.arguments
    group: Any = signature.argument(names.index("process_group"), args, kwargs)
    root = signature.argument(names.index("root_rank"), args, kwargs)
    return dist.ProcessGroup.unbox(group).rank() == root


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
    """Returns the Work of an asynchronous collective."""
    results = out if isinstance(out, tuple | list) else (out,)
    works = [result for result in results if isinstance(result, torch.ScriptObject)]
    return dist.Work.unbox(works[0]) if works else None


def _tensors(tree: object) -> list[torch.Tensor]:
    """Returns the tensors with memory in the arguments or results of an operator, in order."""
    if isinstance(tree, torch.Tensor):
        plain = type(tree) in _PLAIN and tree.layout is torch.strided
        return [tree] if plain and tree.device.type != "meta" else []
    tensors: list[torch.Tensor] = []
    if isinstance(tree, list | tuple):
        for branch in tree:
            if isinstance(branch, list | tuple | torch.Tensor):
                tensors += _tensors(branch)
    return tensors


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


# Checkers, and the clocks of their events by address. Only the last checker gets callbacks.
_following: list[tuple[OrderChecker, dict[int, Clock]]] = []


def current_strand(device: torch.device) -> str:
    """Returns the name of the current stream of `device`."""
    with torch.cuda.device(device):
        return _name(torch.cuda.current_stream(device).cuda_stream)


@contextlib.contextmanager
def following(checker: OrderChecker) -> Iterator[None]:
    """Passes every event and synchronisation to `checker`, and to no other checker meanwhile."""
    _listen()
    entry = (checker, dict[int, "Clock"]())
    _following.append(entry)
    try:
        yield
    finally:
        _following.remove(entry)


@functools.cache
def _listen() -> None:
    """Registers callbacks, once: torch cannot remove them.

    Source: torch/cuda/_sanitizer.py.
    """
    activate_gpu_trace()
    gpu_trace.register_callback_for_event_record(_recorded)
    gpu_trace.register_callback_for_event_wait(_waited)
    gpu_trace.register_callback_for_event_deletion(_deleted)
    gpu_trace.register_callback_for_event_synchronization(_synchronized_event)
    gpu_trace.register_callback_for_stream_synchronization(_synchronized_stream)
    gpu_trace.register_callback_for_device_synchronization(_synchronized_device)


def _name(stream: int) -> str:
    # The address of a stream is unique in the process. Only default streams all have address 0.
    return f"stream {stream:#x}" if stream else f"default of cuda:{torch.cuda.current_device()}"


def _recorded(event: int, stream: int) -> None:
    for checker, events in _following[-1:]:
        events[event] = checker.recorded(_name(stream))


def _waited(event: int, stream: int) -> None:
    for checker, events in _following[-1:]:
        checker.waited(_name(stream), events.get(event, {}))


def _deleted(event: int) -> None:
    for _, events in _following[-1:]:
        events.pop(event, None)


def _synchronized_event(event: int) -> None:
    for checker, events in _following[-1:]:
        checker.waited(None, events.get(event, {}))


def _synchronized_stream(stream: int) -> None:
    for checker, _ in _following[-1:]:
        checker.waited(None, checker.recorded(_name(stream)))


def _synchronized_device() -> None:
    for checker, _ in _following[-1:]:
        checker.waited(None, checker.everything())
